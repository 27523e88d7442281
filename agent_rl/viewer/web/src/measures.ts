/** What tokens can be coloured by. */

import { BINS, PLAIN } from "./highlights";
import type { BranchTokens } from "./tokens";

export type Scale = "ramp" | "signed" | "classes";

export interface Measure {
  key: string;
  name: string;
  unit: string;
  scale: Scale;
  explain: string;
  /** One value a token, NaN where it has none; null where the branch holds none at all. */
  values: (tokens: BranchTokens) => Float64Array | null;
  /** The value of the strongest colour; by default the 98th percentile of those that are there. */
  limit?: (tokens: BranchTokens) => number;
}

const layers = (tokens: BranchTokens) => Math.max(1, tokens.layers);

export const MEASURES: Measure[] = [
  {
    key: "logprob",
    name: "log-prob",
    unit: "nats",
    scale: "ramp",
    explain: "Minus the log-prob that the engine sampled the token with: strong is surprising.",
    values: (tokens) => tokens.logprob.map((value) => -value),
  },
  {
    key: "gap_without_replay",
    name: "gap without replay",
    unit: "nats",
    scale: "signed",
    explain: "Trainer minus engine log-prob where the trainer chose its own experts.",
    values: (tokens) => tokens.gapWithoutReplay,
  },
  {
    key: "gap",
    name: "gap with replay",
    unit: "nats",
    scale: "signed",
    explain: "Trainer minus engine log-prob where the trainer replayed the engine's experts.",
    values: (tokens) => tokens.gap,
  },
  {
    key: "differs_without_replay",
    name: "differing layers without replay",
    unit: "layers",
    scale: "ramp",
    explain: "MoE layers that chose other experts in the trainer than in the engine, when the token was made.",
    values: (tokens) => tokens.differsWithoutReplay,
    limit: layers,
  },
  {
    key: "differs",
    name: "differing layers with replay",
    unit: "layers",
    scale: "ramp",
    explain: "MoE layers that used other experts in the trainer than in the engine, although it replayed them.",
    values: (tokens) => tokens.differs,
    limit: layers,
  },
  {
    key: "entropy",
    name: "entropy",
    unit: "nats",
    scale: "ramp",
    explain: "The entropy of the trainer's distribution that the token was drawn from.",
    values: (tokens) => tokens.entropy,
  },
  {
    key: "mask",
    name: "sampled or not",
    unit: "",
    scale: "classes",
    explain: "The loss mask: tokens that the model sampled are coloured.",
    values: (tokens) => tokens.sampled,
  },
  {
    key: "advantage",
    name: "advantage",
    unit: "",
    scale: "signed",
    explain: "The advantage of the trajectory, on the tokens that were trained on.",
    values: (tokens) => tokens.advantage,
    limit: () => 2,
  },
  {
    key: "version",
    name: "weight version",
    unit: "",
    scale: "classes",
    explain: "Which weights sampled the token; each version has its own colour.",
    values: (tokens) => tokens.version,
  },
  {
    key: "flags",
    name: "clip and correction",
    unit: "",
    scale: "classes",
    explain: "What the update did with the token: 1 clipped, 2 weight changed by the correction, 4 masked by it; sums of these.",
    values: (tokens) => tokens.flags,
  },
];

export function measureOf(key: string | null): Measure {
  return MEASURES.find((measure) => measure.key === key) ?? MEASURES[0];
}

export function flagNames(flags: number): string {
  const names = ["clipped", "weight corrected", "masked by the correction"];
  return names.filter((_, bit) => flags & (1 << bit)).join(", ") || "none";
}

/** The value of the strongest colour. */
export function limitOf(measure: Measure, tokens: BranchTokens, values: Float64Array): number {
  if (measure.limit) return measure.limit(tokens);
  const sizes = values.filter(Number.isFinite).map(Math.abs).sort();
  return sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.98))] || 1;
}

/** The bin of every token. A ramp's bins are 0 to 15; a signed scale's are 0 to 7 below zero and 8 to 15 above it. */
export function binsOf(values: Float64Array, scale: Scale, limit: number): Int8Array {
  const bin = { ramp: rampBin, signed: signedBin, classes: classBin }[scale];
  return Int8Array.from(values, (value) => (Number.isNaN(value) ? PLAIN : bin(value, limit)));
}

function rampBin(value: number, limit: number): number {
  return value <= 0 ? PLAIN : Math.min(BINS - 1, Math.floor((value / limit) * BINS));
}

function signedBin(value: number, limit: number): number {
  const half = BINS / 2;
  const size = Math.min(half, Math.ceil((Math.abs(value) / limit) * half - 0.5));
  if (size === 0) return PLAIN;
  return value < 0 ? half - size : half - 1 + size;
}

function classBin(value: number): number {
  return value === 0 ? PLAIN : (value - 1) % BINS;
}

const SHADE = { light: [[214, 69, 24], [24, 98, 196], [196, 32, 58]], dark: [[255, 138, 76], [92, 160, 255], [255, 104, 120]] };

/** The colour of a bin, to lie under text. */
export function binColour(scale: Scale, bin: number, dark: boolean): string {
  if (scale === "classes") return `hsl(${(205 + bin * 137.5) % 360} 75% ${dark ? 60 : 45}% / 0.38)`;
  const [ramp, below, above] = dark ? SHADE.dark : SHADE.light;
  const half = BINS / 2;
  const share = scale === "ramp" ? (bin + 1) / BINS : (bin < half ? half - bin : bin - half + 1) / half;
  const [red, green, blue] = scale === "ramp" ? ramp : bin < half ? below : above;
  return `rgb(${red} ${green} ${blue} / ${(0.02 + 0.66 * share).toFixed(3)})`;
}

const sheet = new CSSStyleSheet();
document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];

/** Give the page's 16 highlights the colours of a scale. */
export function setPalette(scale: Scale, dark: boolean): void {
  const rules = Array.from({ length: BINS }, (_, bin) => `::highlight(bin-${bin}){background-color:${binColour(scale, bin, dark)}}`);
  sheet.replaceSync(rules.join(""));
}
