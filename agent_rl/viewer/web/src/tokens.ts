/** A branch of a trajectory as columns of one value a token, and its text in stretches. */

import { type Stretch, stretchOf } from "./highlights";
import { visible } from "./text";
import type { Branch, Trajectory, Turn } from "./types";

/** Every column has one value a token, NaN where the token has none; a column that nothing was kept for is null. */
export interface BranchTokens {
  count: number;
  ids: number[];
  pieces: string[] | null;
  layers: number;
  versions: string[];
  logprob: Float64Array;
  sampled: Float64Array;
  version: Float64Array;
  gap: Float64Array | null;
  gapWithoutReplay: Float64Array | null;
  entropy: Float64Array | null;
  flags: Float64Array | null;
  advantage: Float64Array | null;
  differs: Float64Array | null;
  differsWithoutReplay: Float64Array | null;
}

export function tokensOf(branch: Branch, trajectory: Trajectory, layers: number): BranchTokens {
  const count = branch.tokens.length;
  const { detail, sampled } = branch;
  const spread = (values: ArrayLike<number | null> | null | undefined) => values && spreadOver(values, sampled, count);
  const n = sampled.reduce((sum, [from, to]) => sum + to - from, 0);
  const constant = (value: number) => spreadOver(new Float64Array(n).fill(value), sampled, count);
  const versions = [...new Set(branch.versions.map(([, , version]) => version))];
  return {
    count,
    ids: branch.tokens,
    pieces: branch.pieces,
    layers,
    versions,
    logprob: spreadOver(branch.logprobs, sampled, count),
    sampled: zeros(constant(1)),
    version: versionColumn(branch, versions, count),
    gap: spread(detail?.gap) ?? null,
    gapWithoutReplay: spread(detail?.gap_without_replay) ?? null,
    entropy: spread(detail?.entropy) ?? null,
    flags: spread(detail?.flags) ?? null,
    advantage: trajectory.advantage === null ? null : constant(trajectory.advantage),
    differs: madeBy(detail?.differs),
    differsWithoutReplay: madeBy(detail?.differs_without_replay),
  };
}

function spreadOver(values: ArrayLike<number | null>, spans: [number, number][], count: number): Float64Array {
  const column = new Float64Array(count).fill(NaN);
  let next = 0;
  for (const [from, to] of spans) for (let i = from; i < to; i++) column[i] = values[next++] ?? NaN;
  return column;
}

function zeros(column: Float64Array): Float64Array {
  return column.map((value) => (Number.isNaN(value) ? 0 : value));
}

function versionColumn(branch: Branch, versions: string[], count: number): Float64Array {
  const column = new Float64Array(count).fill(NaN);
  for (const [from, to, version] of branch.versions) column.fill(1 + versions.indexOf(version), from, to);
  return column;
}

/** Counts of rows as counts of the tokens that the rows made: row i made token i + 1. */
function madeBy(rows: number[] | null | undefined): Float64Array | null {
  if (!rows) return null;
  const column = new Float64Array(rows.length).fill(NaN);
  for (let i = 1; i < rows.length; i++) column[i] = rows[i - 1];
  return column;
}

export interface Part {
  kind: "prompt" | "thoughts" | "sampled" | "observed";
  turn: Turn | null;
  number: number;
  stretch: Stretch;
}

/** The prompt, then each turn's thoughts, its other sampled tokens and what it was shown in return; null where texts of tokens are absent. */
export function partsOf(branch: Branch, turns: Turn[], index: number): Part[] | null {
  const { pieces, tokens } = branch;
  if (!pieces) return null;
  const spans = turns.flatMap((turn, i) =>
    turn.span && turn.branch === index ? [{ turn, number: i + 1, span: turn.span }] : [],
  );
  const part = (kind: Part["kind"], turn: Turn | null, number: number, from: number, to: number): Part => ({
    kind,
    turn,
    number,
    stretch: stretchOf(pieces, from, to, visible),
  });
  const parts = [part("prompt", null, 0, 0, spans[0]?.span[0] ?? tokens.length)];
  spans.forEach(({ turn, number, span: [from, to] }, i) => {
    const said = from + turn.thinking_tokens;
    if (said > from) parts.push(part("thoughts", turn, number, from, said));
    if (to > said) parts.push(part("sampled", turn, number, said, to));
    const next = spans[i + 1]?.span[0] ?? tokens.length;
    if (next > to) parts.push(part("observed", turn, number, to, next));
  });
  return parts;
}

/** Tokens in order of the size of their value, the largest first. */
export function bySize(values: Float64Array): number[] {
  const tokens = Array.from(values.keys()).filter((token) => !Number.isNaN(values[token]));
  return tokens.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]) || a - b);
}

/** Where the gap without replay is largest over all branches; null where none of them has any. */
export function worstNativeGap(branches: Branch[]): { branch: number; token: number } | null {
  const found = branches.flatMap(({ sampled, detail, tokens }, branch) => {
    const gaps = spreadOver(detail?.gap_without_replay ?? [], sampled, tokens.length);
    return bySize(gaps).slice(0, 1).map((token) => ({ branch, token, size: Math.abs(gaps[token]) }));
  });
  return found.sort((a, b) => b.size - a.size)[0] ?? null;
}
