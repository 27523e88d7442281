/** Media queries as signals. */

import { type ReadonlySignal, signal } from "@preact/signals";

export function media(query: string): ReadonlySignal<boolean> {
  const list = matchMedia(query);
  const matches = signal(list.matches);
  list.addEventListener("change", () => (matches.value = list.matches));
  return matches;
}
