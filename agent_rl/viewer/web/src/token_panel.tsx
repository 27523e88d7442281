/** All that is known of the selected token. */

import { useState } from "preact/hooks";
import { type Loaded, live, useResource } from "./data";
import { flagNames } from "./measures";
import { Fact } from "./parts";
import { number, oneLine } from "./text";
import type { BranchTokens } from "./tokens";
import type { RouteMap, Routes } from "./types";

interface Panel {
  tokens: BranchTokens;
  token: number | null;
  map: Loaded<RouteMap>;
  run: string;
  /** The trajectory's, and where it is of a further branch, that branch's number. */
  id: string;
}

export function TokenPanel(props: Panel) {
  const { tokens, token } = props;
  if (token === null || token >= tokens.count)
    return (
      <aside class="panel" aria-label="Token">
        <h2>Token</h2>
        <p class="dim">
          Click a token, or press “Largest”. The arrow keys move from token to token; Escape leaves.
        </p>
      </aside>
    );
  return (
    <aside class="panel" aria-label="Token" aria-live="polite">
      <h2>
        Token {token.toLocaleString("en")} <code>{oneLine(tokens.pieces?.[token] || "…")}</code>
      </h2>
      <Values tokens={tokens} token={token} />
      <Layers {...props} token={token} />
    </aside>
  );
}

function Values({ tokens, token }: { tokens: BranchTokens; token: number }) {
  const sampled = tokens.sampled[token] === 1;
  const at = (column: Float64Array | null) => (column ? column[token] : null);
  const gap = at(tokens.gap);
  const logprob = tokens.logprob[token];
  return (
    <dl class="facts tall">
      <Fact name="id">{tokens.ids[token]}</Fact>
      <Fact name="sampled">
        <span data-value="sampled">{sampled ? "yes" : "no"}</span>
      </Fact>
      {sampled && (
        <>
          <Fact name="engine log-prob">
            <span data-value="logprob">{number(logprob)}</span> <span class="dim">p = {number(Math.exp(logprob), 3)}</span>
          </Fact>
          <Fact name="gap with replay" title="trainer minus engine">
            <span data-value="gap">{value(gap)}</span>
          </Fact>
          <Fact name="gap without replay" title="trainer minus engine">
            <span data-value="gap_without_replay">{value(at(tokens.gapWithoutReplay))}</span>
          </Fact>
          <Fact name="entropy">{value(at(tokens.entropy))}</Fact>
          <Fact name="weights">
            <span data-value="version">{tokens.versions[tokens.version[token] - 1] ?? "–"}</span>
          </Fact>
          <Fact name="advantage">{value(at(tokens.advantage))}</Fact>
          <Fact name="flags">{tokens.flags ? flagNames(tokens.flags[token]) : "–"}</Fact>
        </>
      )}
    </dl>
  );
}

function value(found: number | null): string {
  return found === null || Number.isNaN(found) ? "–" : number(found);
}

/** The layers whose experts differ in the row that made the token. */
function Layers({ tokens, token, map, run, id }: Panel & { token: number }) {
  const row = token - 1;
  if (row < 0) return <p class="dim">No row of routes made the first token.</p>;
  const named = (pairs: [number, number][] | null | undefined, counts: Float64Array | null) => {
    if (pairs) return pairs.filter(([at]) => at === row).map(([, layer]) => layer).join(", ") || "none";
    return counts && !Number.isNaN(counts[token]) ? `${counts[token]} layers` : "–";
  };
  return (
    <>
      <h3>MoE layers with other experts than the engine</h3>
      <dl class="facts tall">
        <Fact name="without replay">
          <span data-value="layers_without_replay">{named(map.value?.differs_without_replay, tokens.differsWithoutReplay)}</span>
          <Before pairs={map.value?.differs_without_replay} row={row} />
        </Fact>
        <Fact name="with replay">
          <span data-value="layers">{named(map.value?.differs, tokens.differs)}</span>
        </Fact>
      </dl>
      {live && <Experts key={row} path={`${run}/routes/${id}?from=${row}&to=${row + 1}`} />}
    </>
  );
}

/** The last row before a token's own that differs: attention carries its difference on. */
function Before({ pairs, row }: { pairs: [number, number][] | null | undefined; row: number }) {
  const last = pairs?.findLast(([at]) => at < row);
  if (!last) return null;
  return (
    <span class="dim">
      {" "}
      (last before: layer {last[1]} at token {last[0]})
    </span>
  );
}

function Experts({ path }: { path: string }) {
  const [open, setOpen] = useState(false);
  const { value, error } = useResource<Routes>(open ? path : null);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>Experts that the engine used</summary>
      {error && <p class="dim">{error}</p>}
      <ol start={0} class="experts">
        {value?.experts[0]?.map((experts, layer) => <li key={layer}>{experts.join(" ")}</li>)}
      </ol>
    </details>
  );
}
