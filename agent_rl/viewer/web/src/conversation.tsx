/** A branch of a trajectory turn by turn: as a conversation, as tokens with colours, or one beside the other. */

import type { ComponentChildren } from "preact";
import { useCallback, useEffect, useMemo, useRef } from "preact/hooks";
import { ChatPrompt, ChatTurn, Thoughts, TurnFigures, turnsOf } from "./chat";
import { stepOf, useResource } from "./data";
import { type Heat, HeatMap } from "./heat";
import { mark, paint, type Shown, tokenAt } from "./highlights";
import { binsOf, limitOf, measureOf, setPalette } from "./measures";
import { media } from "./media";
import { Notes } from "./parts";
import { route, setQuery } from "./route";
import { scheme } from "./scheme";
import { plural, visible } from "./text";
import { TokenPanel } from "./token_panel";
import { type Colouring, Toolbar } from "./toolbar";
import { type Part, partsOf, tokensOf } from "./tokens";
import type { Branch, RouteMap, Trajectory, Turn } from "./types";

/** Where the panel of the token is below the text. */
const narrow = media("(max-width: 900px)");

export type View = "chat" | "tokens" | "both";

/** The prompt (number 0) or a turn: how it reads, and its tokens. */
interface Row {
  number: number;
  chat: ComponentChildren;
  parts: Part[];
}

interface Place {
  run: string;
  value: Trajectory;
  branch: Branch;
  index: number;
  layers: number;
  view: View;
}

/** The conversation without tokens. `found`: the row that a found text is in, which is shown unfolded. */
export function Chat({ value, index, found }: { value: Trajectory; index: number; found: string | null }) {
  const rows = useMemo(() => rowsOf(value, index, [], found), [value, index, found]);
  return <section aria-label="Conversation">{rows.map((row) => <RowView key={row.number} row={row} view="chat" />)}</section>;
}

export function Conversation({ run, value, branch, index, layers, view }: Place) {
  const query = route.value.query;
  const tokens = useMemo(() => tokensOf(branch, value, layers), [branch, value, layers]);
  const parts = useMemo(() => partsOf(branch, value.turns, index) ?? [], [branch, value, index]);
  const found = query.get("at");
  const rows = useMemo(() => rowsOf(value, index, parts, found), [value, index, parts, found]);
  const measure = measureOf(query.get("by"));
  const values = useMemo(() => measure.values(tokens), [measure, tokens]);
  const token = query.has("token") ? Number(query.get("token")) : null;
  const id = index ? `${value.id}.${index}` : value.id;
  const map = useResource<RouteMap>(`${run}/routes/${id}/map`, stepOf(run, value.id));
  const shown = branch.pieces ? view : "chat"; // tokens without texts are shown in the panel only
  const select = useCallback((next: number | null) => setQuery({ token: next === null ? "" : String(next) }), []);
  return (
    <section aria-label="Conversation" class="conversation">
      <Toolbar {...{ measure, tokens, values, token, select }} branches={value.branches} />
      <div class={`columns ${shown}`}>
        <Rows {...{ rows, parts, tokens, measure, values, token, select }} view={shown} />
        <TokenPanel {...{ tokens, token, map, run, id }} />
      </div>
      {map.value && <Mismatch map={map.value} onPick={(row) => select(Math.min(row + 1, tokens.count - 1))} />}
    </section>
  );
}

/** Turns of other branches stand with the prompt, of which they are a part. */
function rowsOf(value: Trajectory, index: number, parts: Part[], found: string | null): Row[] {
  const turns = turnsOf(value.turns, value.branches, index);
  const chat = ({ turn, number }: (typeof turns)[number]) => (
    <ChatTurn key={`${number} ${found}`} turn={turn} number={number} open={found === `turn-${number}`} />
  );
  const prompt = (
    <>
      <ChatPrompt key={`prompt ${found}`} trajectory={value} open={found === "prompt"} />
      {turns.filter(({ own }) => !own).map(chat)}
    </>
  );
  const own = turns.filter(({ own }) => own).map((one) => ({ number: one.number, chat: chat(one) }));
  return [{ number: 0, chat: prompt }, ...own].map((row) => ({
    ...row,
    parts: parts.filter((part) => part.number === row.number),
  }));
}

function RowView({ row: { number, chat, parts }, view }: { row: Row; view: View }) {
  return (
    <div class="row" id={number ? `turn-${number}` : "prompt"}>
      {view !== "tokens" && <div class="cell chat">{chat}</div>}
      {view !== "chat" && (
        <div class="cell">
          {parts.map((part) => (
            <TextPart key={part.stretch.first} part={part} />
          ))}
        </div>
      )}
    </div>
  );
}

/** The texts of all tokens. Its nodes are made once; colours and the selection are laid over them. */
function Rows({ rows, parts, measure, tokens, values, token, select, view }: Colouring & { rows: Row[]; parts: Part[]; view: View }) {
  const box = useRef<HTMLDivElement>(null);
  const shown = useRef<Shown[]>([]);
  const dark = scheme.value === "dark";
  useEffect(() => {
    const places = [...box.current!.querySelectorAll(".text")];
    shown.current = places.flatMap((place, i) =>
      place.firstChild instanceof Text ? [{ stretch: parts[i].stretch, node: place.firstChild }] : [],
    );
  }, [parts, view]);
  useEffect(() => setPalette(measure.scale, dark), [measure, dark]);
  useEffect(() => {
    if (!values) return;
    paint(shown.current, binsOf(values, measure.scale, limitOf(measure, tokens, values)));
    return () => paint([], new Int8Array());
  }, [parts, view, measure, values, tokens]);
  useEffect(() => {
    bring(mark(shown.current, token));
    return () => void mark([], null);
  }, [parts, view, token]);
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
  const body = useMemo(() => rows.map((row) => <RowView key={row.number} row={row} view={view} />), [rows, view]);
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
  const end = narrow.value ? 0.65 * innerHeight : innerHeight; // in a narrow window the panel lies over the rest
  const inSight = ({ top, bottom }: DOMRect) => top > 60 && bottom < end - 20;
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

function TurnHead({ turn, at }: { turn: Turn; at: number }) {
  return (
    <h2>
      Turn {at}: {turn.tool ? <>calls {visible(turn.tool)}</> : "makes no call"}{" "}
      <span class="dim">
        <TurnFigures turn={turn} />, weights {visible(turn.weight_version)}
      </span>
      {turn.parse_failure && <span class="bad"> {visible(turn.parse_failure)}</span>}
    </h2>
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
