/** The curves of one or more runs, and in what their configs differ. */

import { useMemo } from "preact/hooks";
import { Chart, type Line, type Mark } from "./chart";
import { useResource } from "./data";
import { Notes } from "./parts";
import { pinned, togglePin } from "./pins";
import { link, route, setQuery } from "./route";
import { number, percent, visible } from "./text";
import type { Evaluation, Metrics, Run, RunLine } from "./types";

const COLOURS = ["#3b7dd8", "#e0662f", "#2f9e64", "#b0489f", "#b08a1e", "#5b5fc7", "#c23b4a", "#158f9c"];
const AXES = { step: "step", tokens: "sampled tokens", time: "hours" };
type Axis = keyof typeof AXES;

interface Read {
  line: RunLine;
  run: Run | null;
  metrics: Metrics | null;
  notes: string[];
}

function colourOf(run: number): string {
  return COLOURS[run % COLOURS.length];
}

export function CurvesPage({ runs }: { runs: RunLine[] }) {
  const query = route.value.query;
  const hidden = new Set((query.get("hide") ?? "").split(",").filter(Boolean).map(Number));
  const all = runs.map((line) => useRead(line));
  const read = all.filter(({ line }) => !hidden.has(line.run));
  const axis = (query.get("x") ?? "step") as Axis;
  const toggle = (run: number) => {
    hidden.has(run) ? hidden.delete(run) : hidden.add(run);
    setQuery({ hide: [...hidden].join(",") });
  };
  return (
    <main id="main" class="page">
      <h1>Curves</h1>
      <ul class="runs" aria-label="Runs">
        {runs.map((line) => (
          <RunRow key={line.run} line={line} shown={!hidden.has(line.run)} alone={runs.length === 1} toggle={() => toggle(line.run)} />
        ))}
      </ul>
      {read.map(({ line, notes }) => (
        <Notes key={line.run} notes={notes} />
      ))}
      <Controls axis={axis} search={query.get("metric") ?? ""} />
      <Charts read={read} axis={axis} search={query.get("metric") ?? ""} directories={runs.map(({ directory }) => directory)} />
      {runs.length > 1 && <ConfigDifference read={all} />}
      {read.map(({ line, run }) => run && <Evaluations key={line.run} line={line} evaluations={run.evaluations} />)}
    </main>
  );
}

function useRead(line: RunLine): Read {
  const run = useResource<Run>(`${line.run}/run`);
  const metrics = useResource<Metrics>(`${line.run}/metrics`);
  const errors = [run.error, metrics.error].filter((error) => error !== null);
  const notes = [...errors, ...(run.value?.notes ?? []), ...(metrics.value?.notes ?? [])];
  const known = run.value !== null || run.error !== null; // its marks: without them, each chart would be drawn twice
  return useMemo(
    () => ({ line, run: run.value, metrics: known ? metrics.value : null, notes: notes.map((note) => `${line.name}: ${note}`) }),
    [line, run.value, known, metrics.value, notes.join("\n")],
  );
}

function RunRow({ line, shown, alone, toggle }: { line: RunLine; shown: boolean; alone: boolean; toggle: () => void }) {
  return (
    <li>
      <label>
        {!alone && <input type="checkbox" checked={shown} onChange={toggle} />}
        <i class="key" style={{ background: colourOf(line.run) }} /> <b>{visible(line.name)}</b>
      </label>{" "}
      <span class={`state ${line.state}`}>{line.state}</span> {line.steps}
      {line.total !== null && ` of ${line.total}`} steps
      {line.pass_at_1 && ` · Pass@1 ${percent(line.pass_at_1[0])} [${percent(line.pass_at_1[1])}, ${percent(line.pass_at_1[2])}]`}
      {line.guard > 0 && <span class="bad"> · guard spoke: {line.guard}</span>} ·{" "}
      <a href={link(["trajectories", line.run])}>trajectories</a> <span class="dim">{visible(line.directory)}</span>
    </li>
  );
}

function Controls({ axis, search }: { axis: Axis; search: string }) {
  return (
    <form class="filters" role="search" aria-label="Curves" onSubmit={(event) => event.preventDefault()}>
      <label>
        by
        <select value={axis} onChange={(event) => setQuery({ x: event.currentTarget.value })}>
          <option value="step">step</option>
          <option value="tokens">sampled tokens</option>
          <option value="time">wall time</option>
        </select>
      </label>
      <label>
        metric contains
        <input type="search" value={search} onInput={(event) => setQuery({ metric: event.currentTarget.value })} />
      </label>
    </form>
  );
}

/** A heading for each group of metrics, and below it a chart a metric. */
function Charts({ read, axis, search, directories }: { read: Read[]; axis: Axis; search: string; directories: string[] }) {
  const pins = pinned(directories);
  const groups = useMemo(
    () => grouped(read, search, pins),
    [read.map(({ line }) => line.run).join(), ...read.map((r) => r.metrics), search, pins.join()],
  );
  const passes = useMemo(() => passLines(read, axis), [...read, axis]);
  const section = ([group, names]: [string, string[]]) => (
    <section key={group}>
      <h2>{group}</h2>
      <div class="charts">
        {names.map((name) => (
          <MetricChart key={name} {...{ name, read, axis }} pinned={group === PINNED} pin={() => togglePin(directories, name)} />
        ))}
      </div>
    </section>
  );
  const top = groups.filter(([group]) => group === PINNED);
  return (
    <>
      {top.map(section)}
      {passes.length > 0 && "pass@1 evaluation".includes(search.toLowerCase()) && (
        <section>
          <h2>evaluation</h2>
          <div class="charts">
            <Chart name="Pass@1" unit="share" xName={AXES[axis]} lines={passes} explain="Held-out tasks that were solved, with the 95 % interval." />
          </div>
        </section>
      )}
      {groups.slice(top.length).map(section)}
    </>
  );
}

const PINNED = "pinned";
const FIRST = [PINNED, "reward", "mismatch_without_replay", "mismatch", "r3", "train", "rollout", "time"];

function grouped(read: Read[], search: string, pins: string[]): [string, string[]][] {
  const names = [...new Set(read.flatMap(({ metrics }) => Object.keys(metrics?.columns ?? {})))];
  const groups = new Map<string, string[]>();
  for (const name of names.filter((one) => one.toLowerCase().includes(search.toLowerCase()))) {
    const group = pins.includes(name) ? PINNED : name.split("/")[0];
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  const place = (group: string) => (FIRST.includes(group) ? FIRST.indexOf(group) : FIRST.length);
  return [...groups].sort(([a], [b]) => place(a) - place(b) || (a < b ? -1 : 1));
}

function MetricChart({ name, read, axis, ...pin }: { name: string; read: Read[]; axis: Axis; pinned: boolean; pin: () => void }) {
  const holders = read.filter(({ metrics }) => metrics?.columns[name]);
  const lines = useMemo(() => holders.map((one) => lineOf(one, name, axis)), [...holders, name, axis]);
  const { help, units } = holders[0].metrics!;
  return <Chart name={name} unit={units[name] ?? ""} explain={help[name] ?? ""} lines={lines} xName={AXES[axis]} {...pin} />;
}

/** Where each step lies on the axis; NaN where that is not known. */
function places({ metrics }: Read, axis: Axis): number[] {
  if (!metrics) return [];
  if (axis === "step") return metrics.steps;
  if (axis === "tokens") return metrics.sampled_tokens.map((tokens) => tokens ?? NaN);
  const first = metrics.time.find((time) => time !== null) ?? 0;
  return metrics.time.map((time) => (time === null ? NaN : (time - first) / 3600));
}

function lineOf(read: Read, name: string, axis: Axis): Line {
  const { columns } = read.metrics!;
  const place = places(read, axis);
  const known = <T,>(values: T[]) => values.filter((_, row) => !Number.isNaN(place[row]));
  const [x, y] = [known(place), known(columns[name])];
  const line: Line = { name: read.line.name, colour: colourOf(read.line.run), x, y, marks: marksOf(read, axis) };
  if (name !== "reward/pass_rate" || !columns["rollout/trajectories"]) return line;
  const counts = known(columns["rollout/trajectories"]);
  const intervals = y.map((rate, row) => wilson(rate, counts[row]));
  return { ...line, low: intervals.map(([low]) => low), high: intervals.map(([, high]) => high) };
}

/** The 95 % interval of Wilson around a rate of `count` trials. */
function wilson(rate: number | null, count: number | null): [number | null, number | null] {
  if (rate === null || !count) return [null, null];
  const z = 1.959964;
  const middle = (rate + (z * z) / (2 * count)) / (1 + (z * z) / count);
  const half = (z / (1 + (z * z) / count)) * Math.sqrt((rate * (1 - rate)) / count + (z * z) / (4 * count * count));
  return [Math.max(0, middle - half), Math.min(1, middle + half)];
}

function marksOf(read: Read, axis: Axis): Mark[] {
  const events = (read.run?.guard ?? []).map(({ step, event }) => ({ step, name: `guard: ${event}` }));
  const resumes = (read.run?.resumes ?? []).map((step) => ({ step, name: "resumed" }));
  return [...events, ...resumes].flatMap(({ step, name }) => {
    const x = placeOf(read, axis, step);
    return x === null ? [] : [{ x, name }];
  });
}

function placeOf(read: Read, axis: Axis, step: number): number | null {
  if (axis === "step") return step;
  const row = read.metrics?.steps.indexOf(step) ?? -1;
  const place = step === 0 ? 0 : row < 0 ? NaN : places(read, axis)[row];
  return Number.isNaN(place) ? null : place;
}

function passLines(read: Read[], axis: Axis): Line[] {
  return read.flatMap((one) =>
    [...new Set(one.run?.evaluations.map(({ decoding }) => decoding))].map((decoding) => {
      const points = one.run!.evaluations.flatMap((evaluation) => {
        const x = placeOf(one, axis, evaluation.step);
        return evaluation.decoding === decoding && x !== null ? [{ x, evaluation }] : [];
      });
      return {
        name: `${one.line.name} ${decoding}`,
        colour: colourOf(one.line.run),
        x: points.map(({ x }) => x),
        y: points.map(({ evaluation }) => evaluation.pass_at_1),
        low: points.map(({ evaluation }) => evaluation.interval?.[0] ?? null),
        high: points.map(({ evaluation }) => evaluation.interval?.[1] ?? null),
        marks: marksOf(one, axis),
      };
    }),
  );
}

/** Every key of a nested config as `section.key`, its value as JSON. */
function flat(config: unknown, before = ""): [string, string][] {
  if (config === null || typeof config !== "object" || Array.isArray(config)) return [[before, JSON.stringify(config)]];
  return Object.entries(config).flatMap(([key, value]) => flat(value, before ? `${before}.${key}` : key));
}

function ConfigDifference({ read }: { read: Read[] }) {
  const configs = read.map(({ run }) => new Map(flat(run?.config ?? {})));
  const keys = [...new Set(configs.flatMap((config) => [...config.keys()]))];
  const differing = keys.filter((key) => new Set(configs.map((config) => config.get(key))).size > 1);
  return (
    <section>
      <h2>In what the configs differ</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Differences of the configs">
        <table>
          <thead>
            <tr>
              <th scope="col">key</th>
              {read.map(({ line }) => (
                <th scope="col">{visible(line.name)}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {differing.map((key) => (
              <tr key={key}>
                <th scope="row">{visible(key)}</th>
                {configs.map((config) => (
                  <td>{visible(config.get(key) ?? "–")}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Evaluations({ line, evaluations }: { line: RunLine; evaluations: Evaluation[] }) {
  if (!evaluations.length) return null;
  return (
    <section>
      <h2>Evaluations of {visible(line.name)}</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label={`Evaluations of ${visible(line.name)}`}>
        <table>
          <thead>
            <tr>
              {["evaluation", "Pass@1", "95 % interval", "graded", "not graded", "seconds"].map((name) => (
                <th scope="col">{name}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {evaluations.map((one) => (
              <tr key={one.key}>
                <td>
                  <a href={link(["eval", line.run, one.key])}>{visible(one.key)}</a>
                </td>
                <td>{percent(one.pass_at_1)}</td>
                <td>{one.interval ? `${percent(one.interval[0])} to ${percent(one.interval[1])}` : "–"}</td>
                <td>{number(one.graded)}</td>
                <td>{number(one.ungraded)}</td>
                <td>{number(one.seconds)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
