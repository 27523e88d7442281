/** One trajectory: its conversation with coloured tokens, where its time went, its patch, its tests. */

import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useMemo, useRef } from "preact/hooks";
import { stepOf, useResource } from "./data";
import { mark, paint, type Shown, tokenAt } from "./highlights";
import { binColour, binsOf, flagNames, limitOf, type Measure, measureOf, MEASURES, setPalette } from "./measures";
import { Fact, LongText, Notes, Outcome, Resource } from "./parts";
import { type Heat, HeatMap } from "./heat";
import { link, route, setQuery } from "./route";
import { scheme } from "./scheme";
import { number, plural, seconds, visible } from "./text";
import { TimeBar } from "./timebar";
import { TokenPanel } from "./token_panel";
import { bySize, type BranchTokens, type Part, partsOf, tokensOf, worstNativeGap } from "./tokens";
import type { Branch, RouteMap, Run, Trajectory, Turn } from "./types";

export function TrajectoryPage() {
  const [, run, id] = route.value.path;
  const loaded = useResource<Trajectory>(`${run}/t/${id}`, stepOf(run, id));
  const facts = useResource<Run>(`${run}/run`).value?.facts;
  return (
    <main id="main" class="page">
      <Resource of={loaded}>{(value) => <Whole run={run} value={value} layers={facts?.moe_layers ?? 0} />}</Resource>
    </main>
  );
}

function Whole({ run, value, layers }: { run: string; value: Trajectory; layers: number }) {
  const index = Math.max(0, Math.min(Number(route.value.query.get("branch") ?? 0), value.branches.length - 1));
  const branch: Branch | undefined = value.branches[index];
  return (
    <>
      <Heading run={run} value={value} />
      <TimeBar trajectory={value} />
      {value.branches.length > 1 && <Branches value={value} index={index} />}
      {branch ? (
        <Conversation key={`${value.id} ${index}`} {...{ run, value, branch, index, layers }} />
      ) : (
        <PlainText trajectory={value} />
      )}
      <Patch patch={value.patch} />
      <Tests value={value} />
    </>
  );
}

function Heading({ run, value }: { run: string; value: Trajectory }) {
  const at = value.siblings.indexOf(value.id);
  const sibling = (step: number, name: string) =>
    value.siblings[at + step] && <a href={link(["t", run, value.siblings[at + step]])}>{name}</a>;
  return (
    <header class="heading">
      <h1>{visible(value.task)}</h1>
      <nav aria-label="Around this trajectory">
        <a href={link(["trajectories", run], { n: value.n })}>filed under {value.n}</a>
        <a href={link(["group", run, value.n, value.group])}>group of {value.siblings.length}</a>
        <a href={link(["step", run, value.n])}>expert loads</a>
        {sibling(-1, "← previous of the group")}
        {sibling(1, "next of the group →")}
      </nav>
      <dl class="facts">
        <Fact name="outcome">
          <Outcome {...value} />
        </Fact>
        <Fact name="reward">{number(value.reward)}</Fact>
        <Fact name="ending">{value.stop}</Fact>
        <Fact name="training_status">{value.training_status ?? "–"}</Fact>
        <Fact name="advantage">{number(value.advantage)}</Fact>
        <Fact name="turns">{value.turns.length}</Fact>
        <Fact name="tokens">{value.branches.reduce((sum, branch) => sum + branch.tokens.length, 0).toLocaleString("en")}</Fact>
        <Fact name="trajectory">{value.id}</Fact>
        {value.hacks.length > 0 && <Fact name="suspected hacks">{visible(value.hacks.join(", "))}</Fact>}
      </dl>
      {value.error && <p class="note bad">{visible(value.error)}</p>}
    </header>
  );
}

function Branches({ value, index }: { value: Trajectory; index: number }) {
  return (
    <label>
      Branch{" "}
      <select value={index} onChange={(event) => setQuery({ branch: event.currentTarget.value, token: "" })}>
        {value.branches.map((branch, i) => (
          <option value={i} key={i}>
            {i}: {visible(branch.cause)}, {plural(branch.tokens.length, "token")}
            {branch.parent !== null && `, shares ${branch.shared} with ${branch.parent}`}
          </option>
        ))}
      </select>
    </label>
  );
}

interface Place {
  run: string;
  value: Trajectory;
  branch: Branch;
  index: number;
  layers: number;
}

function Conversation({ run, value, branch, index, layers }: Place) {
  const query = route.value.query;
  const tokens = useMemo(() => tokensOf(branch, value, layers), [branch, value, layers]);
  const parts = useMemo(() => partsOf(branch, value.turns, index), [branch, value, index]);
  const measure = measureOf(query.get("by"));
  const values = useMemo(() => measure.values(tokens), [measure, tokens]);
  const token = query.has("token") ? Number(query.get("token")) : null;
  const id = index ? `${value.id}.${index}` : value.id;
  const map = useResource<RouteMap>(`${run}/routes/${id}/map`, stepOf(run, value.id));
  const select = useCallback((next: number | null) => setQuery({ token: next === null ? "" : String(next) }), []);
  return (
    <section aria-label="Conversation" class="conversation">
      <Toolbar {...{ measure, tokens, values, token, select }} branches={value.branches} />
      <div class="columns">
        {parts ? (
          <TokenText {...{ parts, tokens, measure, values, token, select }} />
        ) : (
          <PlainText trajectory={value} />
        )}
        <TokenPanel {...{ tokens, token, map, run, id }} />
      </div>
      {map.value && <Mismatch map={map.value} onPick={(row) => select(Math.min(row + 1, tokens.count - 1))} />}
    </section>
  );
}

interface Colouring {
  measure: Measure;
  tokens: BranchTokens;
  values: Float64Array | null;
  token: number | null;
  select: (token: number | null) => void;
}

function Toolbar({ measure, tokens, values, token, select, branches }: Colouring & { branches: Branch[] }) {
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

/** The texts of all tokens. Its nodes are made once; colours and the selection are laid over them. */
function TokenText({ parts, measure, tokens, values, token, select }: Colouring & { parts: Part[] }) {
  const box = useRef<HTMLDivElement>(null);
  const shown = useRef<Shown[]>([]);
  const dark = scheme.value === "dark";
  useEffect(() => {
    const places = [...box.current!.querySelectorAll(".text")];
    shown.current = places.flatMap((place, i) =>
      place.firstChild instanceof Text ? [{ stretch: parts[i].stretch, node: place.firstChild }] : [],
    );
  }, [parts]);
  useEffect(() => setPalette(measure.scale, dark), [measure, dark]);
  useEffect(() => {
    if (!values) return;
    paint(shown.current, binsOf(values, measure.scale, limitOf(measure, tokens, values)));
    return () => paint([], new Int8Array());
  }, [parts, measure, values, tokens]);
  useEffect(() => {
    bring(mark(shown.current, token));
    return () => void mark([], null);
  }, [parts, token]);
  const onClick = (event: MouseEvent) => {
    const found = tokenAt(shown.current, event.clientX, event.clientY);
    if (found !== null) select(found);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") select(null);
    if (!move) return;
    event.preventDefault();
    select(token === null ? 0 : Math.min(tokens.count - 1, Math.max(0, token + move)));
  };
  const body = useMemo(() => parts.map((part) => <TextPart key={part.stretch.first} part={part} />), [parts]);
  return (
    <div
      class="tokens"
      ref={box}
      tabIndex={0}
      role="group"
      aria-label="Text of the trajectory. The left and right arrow keys move from token to token."
      onClick={onClick}
      onKeyDown={onKeyDown}
    >
      {body}
    </div>
  );
}

/** Scroll to where a token stands, unless it is in sight. */
function bring(range: Range | null): void {
  const element = range?.startContainer.parentElement;
  if (!range || !element) return;
  element.closest("details")?.setAttribute("open", "");
  const inSight = ({ top, bottom }: DOMRect) => top > 60 && bottom < innerHeight - 20;
  if (inSight(range.getBoundingClientRect())) return;
  element.scrollIntoView({ block: "nearest" }); // what is far away is laid out only now
  requestAnimationFrame(() => {
    const place = range.getBoundingClientRect();
    if (!inSight(place)) scrollBy({ top: place.top - innerHeight / 3 });
  });
}

function TextPart({ part: { kind, turn, number: at, stretch } }: { part: Part }) {
  const text = (
    <div class="text" dir="ltr">
      {stretch.text}
    </div>
  );
  const begins = turn && (kind === "thoughts" || (kind === "sampled" && !turn.thinking_tokens));
  return (
    <div class={`part ${kind}`}>
      {kind === "prompt" && <h2>Prompt</h2>}
      {begins && <TurnHead turn={turn} at={at} />}
      {kind === "observed" && <h3>observed</h3>}
      {kind === "thoughts" && turn ? <Thoughts length={plural(turn.thinking_tokens, "token")}>{text}</Thoughts> : text}
    </div>
  );
}

/** Folded; a token that is selected in them unfolds them. */
function Thoughts({ length, children }: { length: string; children: ComponentChildren }) {
  return (
    <details>
      <summary class="dim">thoughts: {length}</summary>
      {children}
    </details>
  );
}

function TurnHead({ turn, at }: { turn: Turn; at: number }) {
  return (
    <h2>
      Turn {at}: {turn.tool ? <>calls {visible(turn.tool)}</> : "makes no call"}{" "}
      <span class="dim">
        {plural(turn.completion_tokens, "token")}, {seconds(turn.generate_seconds)} to write, {seconds(turn.tool_seconds)} to
        run, weights {visible(turn.weight_version)}
      </span>
      {turn.parse_failure && <span class="bad"> {visible(turn.parse_failure)}</span>}
    </h2>
  );
}

/** The conversation where the texts of single tokens are not known: messages and turns as they were written. */
function PlainText({ trajectory }: { trajectory: Trajectory }) {
  const opening = trajectory.messages.findIndex((message) => message.role === "assistant");
  const before = opening < 0 ? trajectory.messages : trajectory.messages.slice(0, opening);
  return (
    <div class="tokens">
      {before.map((message, i) => (
        <div class="part prompt" key={i}>
          <h2>{message.role}</h2>
          <LongText text={message.content} name={`Message of ${message.role}`} />
        </div>
      ))}
      {trajectory.turns.map((turn, i) => (
        <div class="part sampled" key={i}>
          <TurnHead turn={turn} at={i + 1} />
          <TurnText turn={turn} at={i + 1} />
          <h3>observed</h3>
          <LongText text={turn.observation} name={`Observation of turn ${i + 1}`} />
        </div>
      ))}
    </div>
  );
}

function TurnText({ turn, at }: { turn: Turn; at: number }) {
  const thoughts = [...turn.text].slice(0, turn.thinking_chars).join(""); // counted in code points
  return (
    <>
      {thoughts && (
        <Thoughts length={plural(turn.thinking_chars, "character")}>
          <LongText text={thoughts} name={`Thoughts of turn ${at}`} />
        </Thoughts>
      )}
      <LongText text={turn.text.slice(thoughts.length)} name={`Turn ${at}`} />
    </>
  );
}

function Mismatch({ map, onPick }: { map: RouteMap; onPick: (row: number) => void }) {
  const native = useMemo(() => heatOf(map, map.differs_without_replay, "without replay"), [map]);
  const replay = useMemo(() => heatOf(map, map.differs, "with replay"), [map]);
  return (
    <section aria-label="Differing experts">
      <h2>Layers x tokens: where trainer and engine used other experts</h2>
      <Notes notes={map.notes} />
      {native && <HeatMap heat={native} onPick={onPick} />}
      {replay && <HeatMap heat={replay} onPick={onPick} />}
    </section>
  );
}

function heatOf(map: RouteMap, pairs: [number, number][] | null, which: string): Heat | null {
  if (!pairs) return null;
  const cells = new Uint8Array(map.layers * map.rows);
  for (const [row, layer] of pairs) cells[layer * map.rows + row] = 1;
  return {
    name: `Differing experts ${which}: ${plural(pairs.length, "router")}`,
    rows: Array.from({ length: map.layers }, (_, layer) => `layer ${layer}`),
    columns: map.rows,
    columnName: (row: number) => `row of token ${row}`,
    value: (layer: number, row: number) => cells[layer * map.rows + row],
    limit: 1,
    unit: "",
  };
}

function Patch({ patch }: { patch: string }) {
  if (!patch) return null;
  return (
    <section aria-label="Patch">
      <h2>Patch</h2>
      <pre class="patch" tabIndex={0} role="region" aria-label="Patch">
        {patch.length > 200_000 ? visible(patch) : patch.split("\n").map((line, i) => <span key={i} class={lineClass(line)}>{`${visible(line)}\n`}</span>)}
      </pre>
    </section>
  );
}

function lineClass(line: string): string {
  if (/^(\+\+\+|---|diff|index|@@)/.test(line)) return "hunk";
  return line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : "";
}

function Tests({ value }: { value: Trajectory }) {
  const tests = Object.entries(value.tests);
  if (!tests.length && !value.test_log) return null;
  const passed = tests.filter(([, status]) => status.toLowerCase().startsWith("pass")).length;
  return (
    <section aria-label="Tests">
      <h2>Hidden tests {tests.length > 0 && <span class="dim">{passed} of {tests.length} passed</span>}</h2>
      {tests.length > 0 && (
        <ul class="tests">
          {tests.map(([name, status]) => (
            <li key={name} class={status.toLowerCase().startsWith("pass") ? "good" : "bad"}>
              <b>{visible(status)}</b> {visible(name)}
            </li>
          ))}
        </ul>
      )}
      {value.test_log && <LongText text={value.test_log} name="Log of the tests" />}
    </section>
  );
}
