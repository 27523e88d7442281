/** The list of a run's trajectories: filters, a table of which only the visible rows are in the page, running episodes. */

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { live, useResource } from "./data";
import { bounds, chosen, RANGES, type Sortable } from "./filter";
import { Notes, Outcome, Resource } from "./parts";
import { link, route, setQuery } from "./route";
import { number, plural, seconds, visible } from "./text";
import type { Columns, Exported, Index, Live, RunLine } from "./types";

const ROW = 30;

interface Column {
  key: Sortable;
  name: string;
  text: (columns: Columns, row: number) => string;
  explain: string;
}

const numeric = (key: Exclude<Sortable, "task" | "stop" | "training_status" | "id">, name: string, explain: string): Column => ({
  key,
  name,
  explain,
  text: (columns, row) => number(columns[key][row], 3),
});

const COLUMNS: Column[] = [
  { key: "step", name: "step", text: (c, row) => c.n[row], explain: "Where it is filed: a step, or an evaluation." },
  { key: "task", name: "task", text: (c, row) => visible(c.task[row]), explain: "The task's id." },
  numeric("reward", "reward", "Its reward; – where the infrastructure broke it."),
  { key: "stop", name: "ending", text: (c, row) => c.stop[row], explain: "Why the episode ended." },
  { key: "training_status", name: "training status", text: (c, row) => c.training_status[row] ?? "–", explain: "What the trainer made of it." },
  numeric("advantage", "advantage", "Its advantage within its group."),
  numeric("turns", "turns", "Turns that were taken."),
  numeric("tokens", "tokens", "All tokens of the trajectory."),
  numeric("hacks", "hacks", "Suspected hacks: changed test infrastructure."),
  numeric("worst_gap_without_replay", "gap without replay", "The largest gap of log-probs between trainer and engine, own experts."),
  numeric("worst_gap", "gap with replay", "The largest gap of log-probs between trainer and engine, experts replayed."),
  { key: "seconds", name: "time", text: (c, row) => seconds(c.seconds[row]), explain: "From its start to its reward." },
];

export function TrajectoriesPage({ runs }: { runs: RunLine[] }) {
  const run = Number(route.value.path[1] || 0);
  const index = useResource<Index>(`${run}/trajectories`);
  return (
    <main id="main" class="page list-page">
      <h1>Trajectories</h1>
      {runs.length > 1 && (
        <nav class="tabs" aria-label="Run">
          {runs.map((line) => (
            <a key={line.run} href={link(["trajectories", line.run])} aria-current={line.run === run ? "page" : undefined}>
              {visible(line.name)}
            </a>
          ))}
        </nav>
      )}
      {live && <Running run={run} goesOn={runs[run]?.state === "running"} />}
      <Resource of={index}>{(value) => <List run={run} index={value} />}</Resource>
    </main>
  );
}

function List({ run, index }: { run: number; index: Index }) {
  const query = route.value.query;
  const exported = useResource<Exported>(live ? null : "exported").value?.trajectories[run];
  const opens = useMemo(() => (live ? null : new Set(exported)), [exported]);
  const rows = useMemo(() => chosen(index.columns, query), [index, query]);
  return (
    <>
      <Filters run={run} columns={index.columns} query={query} />
      <p role="status" class="count">
        {rows.length.toLocaleString("en")} of {index.columns.id.length.toLocaleString("en")} trajectories
        {opens && `; this export opens ${opens.size} of them`}
      </p>
      <Table run={run} columns={index.columns} rows={rows} sort={query.get("sort") ?? ""} opens={opens} />
    </>
  );
}

function Filters({ run, columns, query }: { run: number; columns: Columns; query: URLSearchParams }) {
  const choices = useMemo(
    () => ({ n: unique(columns.n), stop: unique(columns.stop), training_status: unique(columns.training_status) }),
    [columns],
  );
  return (
    <form class="filters" role="search" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
      <label>
        task contains
        <input type="search" value={query.get("task") ?? ""} onInput={(e) => setQuery({ task: e.currentTarget.value })} />
      </label>
      <Choice name="filed under" param="n" values={choices.n} query={query} />
      <Choice name="ending" param="stop" values={choices.stop} query={query} />
      <Choice name="training status" param="training_status" values={choices.training_status} query={query} />
      <Choice name="resolved" param="resolved" values={["true", "false"]} query={query} />
      {RANGES.map(({ key, name, hint }) => {
        const value = query.get(key) ?? "";
        return (
          <label key={key}>
            {name}
            <input
              size={7}
              placeholder={hint}
              value={value}
              aria-invalid={value !== "" && bounds(value) === null}
              onInput={(e) => setQuery({ [key]: e.currentTarget.value })}
            />
          </label>
        );
      })}
      <a class="button" href={link(route.value.path)}>
        Clear
      </a>
      {live && <a href={link(["search", run], { n: query.get("n") ?? "" })}>search in texts</a>}
    </form>
  );
}

function unique(values: (string | null)[]): string[] {
  return [...new Set(values)].map((value) => value ?? "none");
}

function Choice({ name, param, values, query }: { name: string; param: string; values: string[]; query: URLSearchParams }) {
  return (
    <label>
      {name}
      <select value={query.get(param) ?? ""} onChange={(e) => setQuery({ [param]: e.currentTarget.value })}>
        <option value="">all</option>
        {values.map((value) => (
          <option key={value} value={value}>
            {visible(value)}
          </option>
        ))}
      </select>
    </label>
  );
}

interface Listed {
  run: number;
  columns: Columns;
  rows: Uint32Array;
  sort: string;
  /** The ids that can be opened; null: all. */
  opens: Set<string> | null;
}

/** Only the rows in sight are in the page; the space of the others is kept. */
function Table({ run, columns, rows, sort, opens }: Listed) {
  const box = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const read = () => setView({ top: box.current!.scrollTop, height: box.current!.clientHeight });
  useEffect(() => {
    const observer = new ResizeObserver(read);
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, []);
  const first = Math.max(0, Math.min(Math.floor(view.top / ROW) - 10, rows.length - 1));
  const shown = Array.from(rows.subarray(first, first + Math.ceil(view.height / ROW) + 20));
  return (
    <div class="table" ref={box} onScroll={read} tabIndex={0} role="region" aria-label="Table of trajectories">
      <table aria-rowcount={rows.length + 1}>
        <thead>
          <tr>
            {COLUMNS.map((column) => (
              <Head key={column.key} column={column} sort={sort} />
            ))}
          </tr>
        </thead>
        <tbody>
          <tr aria-hidden="true" style={{ height: `${first * ROW}px` }} />
          {shown.map((row, i) => (
            <tr key={columns.id[row]} aria-rowindex={first + i + 2} class={columns.resolved[row] ? "good" : ""}>
              {COLUMNS.map((column) => (
                <td key={column.key} class={column.key}>
                  {column.key === "task" && (!opens || opens.has(columns.id[row])) ? (
                    <a href={link(["t", run, columns.id[row]])}>{column.text(columns, row)}</a>
                  ) : (
                    column.text(columns, row)
                  )}
                </td>
              ))}
            </tr>
          ))}
          <tr aria-hidden="true" style={{ height: `${Math.max(0, rows.length - first - shown.length) * ROW}px` }} />
        </tbody>
      </table>
    </div>
  );
}

/** A click sorts from the largest, one more from the smallest, a third as filed. */
function Head({ column: { key, name, explain }, sort }: { column: Column; sort: string }) {
  const next = sort === `-${key}` ? key : sort === key ? "" : `-${key}`;
  const order = sort === `-${key}` ? "descending" : sort === key ? "ascending" : "none";
  return (
    <th scope="col" class={key} aria-sort={order} title={explain}>
      <button onClick={() => setQuery({ sort: next })}>
        {name}
        <span aria-hidden="true">{{ descending: " ▾", ascending: " ▴", none: "" }[order]}</span>
      </button>
    </th>
  );
}

/** The episodes of a step that has not ended: of a run that was killed, those that its next start takes up. */
function Running({ run, goesOn }: { run: number; goesOn: boolean }) {
  const { value } = useResource<Live>(`${run}/live`);
  if (!value || value.step === null) return null;
  const resolved = value.episodes.filter((episode) => episode.resolved).length;
  return (
    <details class="episodes">
      <summary>
        Step {value.step} {goesOn ? "is running" : "was under way"}: {plural(value.episodes.length, "episode")}
        {value.expected !== null && ` of ${value.expected}`} ended, {resolved} resolved
      </summary>
      <Notes notes={value.notes} />
      <table>
        <thead>
          <tr>
            {["task", "outcome", "ending", "turns", "tokens", "time"].map((name) => (
              <th scope="col">{name}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {value.episodes.map((episode, i) => (
            <tr key={i}>
              <td>{visible(episode.task)}</td>
              <td>
                <Outcome {...episode} />
              </td>
              <td>{episode.stop}</td>
              <td>{episode.turns}</td>
              <td>{episode.tokens}</td>
              <td>{seconds(episode.seconds)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}
