/** The metrics that stay at the top of the curves, kept by the browser for each choice of runs. */

import { signal } from "@preact/signals";

const changes = signal(0);

function keyOf(directories: string[]): string {
  return `agent-rl pins ${directories.join(" ")}`;
}

export function pinned(directories: string[]): string[] {
  void changes.value;
  try {
    const held: unknown = JSON.parse(localStorage.getItem(keyOf(directories)) ?? "[]");
    return Array.isArray(held) ? held.filter((name) => typeof name === "string") : [];
  } catch {
    return []; // the browser keeps nothing for this page, or something else wrote there
  }
}

export function togglePin(directories: string[], name: string): void {
  const held = pinned(directories);
  const next = held.includes(name) ? held.filter((one) => one !== name) : [...held, name];
  try {
    localStorage.setItem(keyOf(directories), JSON.stringify(next));
  } catch {
    return;
  }
  changes.value++;
}
