/** Which trajectories of the index are shown, and in which order. */

import type { Columns } from "./types";

type Numeric =
  | "step" | "reward" | "turns" | "tokens" | "sampled" | "hacks" | "branches" | "versions"
  | "advantage" | "seconds" | "worst_gap" | "worst_gap_without_replay";
export type Sortable = Numeric | "task" | "stop" | "training_status";

export const RANGES: { key: Numeric; name: string; hint: string }[] = [
  { key: "step", name: "step", hint: "3..9" },
  { key: "reward", name: "reward", hint: "0..1" },
  { key: "turns", name: "turns", hint: "2.." },
  { key: "hacks", name: "suspected hacks", hint: "1.." },
  { key: "branches", name: "branches", hint: "2.." },
  { key: "versions", name: "weight versions", hint: "2.." },
  { key: "worst_gap_without_replay", name: "worst gap without replay", hint: "0.1.." },
  { key: "worst_gap", name: "worst gap with replay", hint: "0.1.." },
];
const CHOICES = ["stop", "training_status", "n"] as const;

/** `3..9`, `3..`, `..9` or `7` as bounds, both included; null for a text that is neither. */
export function bounds(text: string): [number, number] | null {
  const [low, high = low, ...more] = text.split("..").map((part) => part.trim());
  if (more.length || !(low || high)) return null;
  const found: [number, number] = [low ? Number(low) : -Infinity, high ? Number(high) : Infinity];
  return found.some(Number.isNaN) ? null : found;
}

/** The places of the rows that all filters of `query` let through, sorted as it says. */
export function chosen(columns: Columns, query: URLSearchParams): Uint32Array {
  const count = columns.id.length;
  const kept = new Uint8Array(count).fill(1);
  const leaveOut = (drop: (row: number) => boolean) => {
    for (let row = 0; row < count; row++) if (kept[row] && drop(row)) kept[row] = 0;
  };
  const task = query.get("task")?.toLowerCase();
  if (task) leaveOut(lacks(columns.task, task));
  for (const key of CHOICES) {
    const wanted = query.get(key);
    if (wanted) leaveOut((row) => (columns[key][row] ?? "none") !== wanted);
  }
  const resolved = query.get("resolved");
  if (resolved) leaveOut((row) => columns.resolved[row] !== (resolved === "true"));
  for (const { key } of RANGES) {
    const range = bounds(query.get(key) ?? "");
    if (range) leaveOut((row) => !within(columns[key][row], range));
  }
  const rows = new Uint32Array(count).map((_, row) => row).filter((row) => kept[row] === 1);
  return sorted(rows, columns, query.get("sort") ?? "");
}

function within(value: number | null, [low, high]: [number, number]): boolean {
  return value !== null && value >= low && value <= high;
}

/** Whether a row's name lacks `part`; each different name is looked at once. */
function lacks(names: string[], part: string): (row: number) => boolean {
  const known = new Map<string, boolean>();
  return (row) => {
    const name = names[row];
    const lacking = known.get(name) ?? !name.toLowerCase().includes(part);
    known.set(name, lacking);
    return lacking;
  };
}

/** By a column, from its smallest; `-COLUMN` from its largest. Rows without a value come last, others keep their order. */
function sorted(rows: Uint32Array, columns: Columns, sort: string): Uint32Array {
  const sign = sort.startsWith("-") ? -1 : 1;
  const column = columns[sort.replace(/^-/, "") as Sortable] as (number | string | null)[] | undefined;
  if (!column) return rows;
  const keys = typeof column.find((value) => value !== null) === "string" ? ranks(column as (string | null)[]) : column;
  const key = Float64Array.from(keys as (number | null)[], (value) => (value === null ? Infinity : sign * value));
  return rows.sort((a, b) => (key[a] === key[b] ? a - b : key[a] < key[b] ? -1 : 1));
}

function ranks(column: (string | null)[]): (number | null)[] {
  const names = [...new Set(column)].filter((name) => name !== null).sort();
  const rank = new Map(names.map((name, i) => [name, i]));
  return column.map((name) => (name === null ? null : rank.get(name)!));
}
