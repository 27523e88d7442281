/** What tokens are coloured by, and the way from the largest value to the next. */

import { useMemo } from "preact/hooks";
import { binColour, flagNames, limitOf, type Measure, MEASURES } from "./measures";
import { setQuery } from "./route";
import { scheme } from "./scheme";
import { number } from "./text";
import { bySize, type BranchTokens, worstNativeGap } from "./tokens";
import type { Branch } from "./types";

export interface Colouring {
  measure: Measure;
  tokens: BranchTokens;
  values: Float64Array | null;
  token: number | null;
  select: (token: number | null) => void;
}

export function Toolbar({ measure, tokens, values, token, select, branches }: Colouring & { branches: Branch[] }) {
  const order = useMemo(() => (values ? bySize(values) : []), [values]);
  const at = token === null ? -1 : order.indexOf(token);
  const go = (place: number) => select(order[Math.min(order.length - 1, Math.max(0, place))] ?? null);
  const worst = useMemo(() => worstNativeGap(branches), [branches]);
  const goToWorst = () => setQuery({ by: "gap_without_replay", branch: worst?.branch ? String(worst.branch) : "", token: String(worst?.token) });
  return (
    <div class="toolbar" role="toolbar" aria-label="Colours of tokens">
      <label>
        Colour tokens by{" "}
        <select value={measure.key} onChange={(event) => setQuery({ by: event.currentTarget.value })}>
          {MEASURES.map((one) => (
            <option key={one.key} value={one.key} disabled={one.values(tokens) === null}>
              {one.name}
            </option>
          ))}
        </select>
      </label>
      <Legend {...{ measure, tokens, values }} />
      <span class="steps">
        <button onClick={() => go(0)} disabled={!order.length}>
          Largest
        </button>
        <button onClick={() => go(at - 1)} disabled={at <= 0} aria-label="Next larger value">
          ▲
        </button>
        <button onClick={() => go(at + 1)} disabled={at + 1 >= order.length} aria-label="Next smaller value">
          ▼
        </button>
        {at >= 0 && <span class="dim"> number {(at + 1).toLocaleString("en")} of {order.length.toLocaleString("en")}</span>}
      </span>
      {worst && <button onClick={goToWorst}>Largest gap without replay</button>}
      <p class="dim explain">{measure.explain}</p>
    </div>
  );
}

function Legend({ measure, tokens, values }: { measure: Measure; tokens: BranchTokens; values: Float64Array | null }) {
  if (!values) return <span class="note">Not kept for this trajectory.</span>;
  const dark = scheme.value === "dark";
  const limit = limitOf(measure, tokens, values);
  const names = classNames(measure, tokens, values);
  const swatch = (bin: number) => <i style={{ background: binColour(measure.scale, bin, dark) }} />;
  if (measure.scale === "classes")
    return (
      <span class="legend">
        {names.map(([bin, name]) => (
          <span key={name}>
            {swatch(bin)} {name}{" "}
          </span>
        ))}
      </span>
    );
  return (
    <span class="legend">
      {measure.scale === "signed" ? number(-limit, 2) : 0} <span aria-hidden="true">{Array.from({ length: 16 }, (_, bin) => swatch(bin))}</span>{" "}
      {number(limit, 2)} {measure.unit}
    </span>
  );
}

function classNames(measure: Measure, tokens: BranchTokens, values: Float64Array): [number, string][] {
  if (measure.key === "mask") return [[0, "sampled"]];
  if (measure.key === "version") return tokens.versions.map((version, i) => [i % 16, `version ${version}`]);
  const found = [...new Set(values)].filter((value) => value > 0).sort((a, b) => a - b);
  return found.map((flags) => [flags - 1, flagNames(flags)]);
}
