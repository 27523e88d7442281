/** Several evaluations: each with its Pass@1, and a table of tasks by evaluations whose cells open the trajectories. */

import { type Loaded, useResource } from "./data";
import { Heads, Resource } from "./parts";
import { link, route, setQuery } from "./route";
import { denominator, interval, secondsOf, shadeOf, titleOf, verdictOf } from "./tasks";
import { number, percent, plural, seconds, visible } from "./text";
import type { Evaluation, EvaluationPage, Outcome, Run, RunLine } from "./types";

/** The last ones with trajectories; others are shown when they are chosen. */
const FIRST = 6;

interface Entry {
  line: RunLine;
  evaluation: Evaluation;
  /** The run's number and the key. */
  name: string;
}

export function EvaluationsPage({ runs }: { runs: RunLine[] }) {
  const loaded = runs.map((line) => useResource<Run>(`${line.run}/run`));
  const all = loaded.flatMap(({ value }, i) =>
    (value?.evaluations ?? []).map((evaluation) => ({ line: runs[i], evaluation, name: `${i}:${evaluation.key}` })),
  );
  const asked = route.value.query.get("with")?.split(",");
  const shown = asked ? all.filter(({ name }) => asked.includes(name)) : all.filter(({ evaluation }) => evaluation.n !== null).slice(-FIRST);
  return (
    <main id="main" class="page wide">
      <h1>Evaluations</h1>
      {loaded.map((one, i) => (
        <Resource key={i} of={one}>
          {() => null}
        </Resource>
      ))}
      <List all={all} shown={shown} />
      {shown.length > 0 && <Columns key={shown.map(({ name }) => name).join()} shown={shown} />}
    </main>
  );
}

function List({ all, shown }: { all: Entry[]; shown: Entry[] }) {
  const toggle = (name: string) => {
    const names = shown.map((one) => one.name);
    setQuery({ with: (names.includes(name) ? names.filter((one) => one !== name) : [...names, name]).join() || "none" });
  };
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="List of evaluations">
      <table>
        <thead>
          <Heads names={["in the table", "evaluation", "Pass@1", "95 % interval", "denominator", "time"]} />
        </thead>
        <tbody>
          {all.map(({ line, evaluation, name }) => (
            <tr key={name}>
              <td>
                <input
                  type="checkbox"
                  aria-label={`${visible(titleOf(line.name, evaluation.key))} in the table`}
                  checked={shown.some((one) => one.name === name)}
                  onChange={() => toggle(name)}
                />
              </td>
              <td>
                <a href={link(["eval", line.run, evaluation.key])}>{visible(titleOf(line.name, evaluation.key))}</a>{" "}
                <span class="dim">{visible(evaluation.model || "")}</span>
              </td>
              <td>{percent(evaluation.pass_at_1)}</td>
              <td>{interval(evaluation)}</td>
              <td>{denominator(evaluation)}</td>
              <td>{seconds(evaluation.seconds)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Columns({ shown }: { shown: Entry[] }) {
  const loaded = shown.map(({ line, evaluation }) => useResource<EvaluationPage>(`${line.run}/eval/${evaluation.key}`));
  return (
    <>
      {loaded.map((one, i) => (
        <Resource key={shown[i].name} of={one}>
          {() => null}
        </Resource>
      ))}
      <Matrix shown={shown} loaded={loaded} />
    </>
  );
}

const SHOW: Record<string, (cells: Outcome[]) => boolean> = {
  differing: (cells) => new Set(cells.map(({ graded, resolved }) => (graded ? resolved / graded : -1))).size > 1,
  "resolved by none": (cells) => cells.every(({ resolved }) => !resolved),
  "resolved by all": (cells) => cells.every(({ graded, resolved }) => graded > 0 && resolved === graded),
};

function Matrix({ shown, loaded }: { shown: Entry[]; loaded: Loaded<EvaluationPage>[] }) {
  const query = route.value.query;
  const columns = loaded.map(({ value }) => new Map((value?.outcomes ?? []).map((one) => [one.task_id, one])));
  const tasks = [...new Set(columns.flatMap((column) => [...column.keys()]))];
  const [task, show] = [query.get("task") ?? "", query.get("show") ?? ""];
  const rows = tasks
    .map((name) => ({ name, cells: columns.map((column) => column.get(name)) }))
    .filter(({ name, cells }) => name.includes(task) && (SHOW[show]?.(cells.filter((cell) => cell !== undefined)) ?? true));
  const pair = [Number(query.get("a") ?? 0), Number(query.get("b") ?? shown.length - 1)];
  return (
    <section aria-label="Tasks by evaluations">
      <form class="filters" role="search" aria-label="Tasks" onSubmit={(event) => event.preventDefault()}>
        <label>
          task contains
          <input type="search" value={task} onInput={(event) => setQuery({ task: event.currentTarget.value })} />
        </label>
        <label>
          tasks
          <select value={show} onChange={(event) => setQuery({ show: event.currentTarget.value })}>
            <option value="">all</option>
            {Object.keys(SHOW).map((name) => (
              <option key={name} value={name}>
                {name}
              </option>
            ))}
          </select>
        </label>
        {shown.length > 1 && pair.map((at, side) => <Side key={side} side={side} at={at} shown={shown} />)}
        <span role="status" class="count">{`${number(rows.length)} of ${plural(tasks.length, "task")}`}</span>
      </form>
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of tasks by evaluations">
        <table class="matrix">
          <thead>
            <tr>
              <th scope="col">task</th>
              {shown.map(({ line, evaluation, name }) => (
                <th scope="col" key={name}>
                  <a href={link(["eval", line.run, evaluation.key])}>{visible(titleOf(line.name, evaluation.key))}</a>
                  <br />
                  {percent(evaluation.pass_at_1)}
                </th>
              ))}
              {shown.length > 1 && <th scope="col">compare</th>}
            </tr>
          </thead>
          <tbody>
            {rows.map(({ name, cells }) => (
              <tr key={name}>
                <th scope="row">{visible(name)}</th>
                {cells.map((cell, i) => (
                  <Cell key={i} run={shown[i].line.run} cell={cell} />
                ))}
                {shown.length > 1 && (
                  <td>
                    <Pair shown={shown} cells={cells} pair={pair} />
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

/** Which evaluation a side of the comparison shows. */
function Side({ side, at, shown }: { side: number; at: number; shown: Entry[] }) {
  const key = side ? "b" : "a";
  return (
    <label>
      {side ? "compare, right" : "compare, left"}
      <select value={at} onChange={(event) => setQuery({ [key]: event.currentTarget.value })}>
        {shown.map(({ line, evaluation, name }, i) => (
          <option key={name} value={i}>
            {visible(titleOf(line.name, evaluation.key))}
          </option>
        ))}
      </select>
    </label>
  );
}

function Cell({ run, cell }: { run: number; cell: Outcome | undefined }) {
  if (!cell) return <td class="dim">–</td>;
  const { graded, resolved, samples } = cell;
  const words = `${verdictOf(cell)}, ${number(cell.turns_mean, 3)} turns, ${seconds(secondsOf(cell))}`;
  const sign = !graded ? "?" : graded > 1 ? `${resolved}/${graded}` : resolved ? "✓" : "✗";
  return (
    <td class={shadeOf(cell)} title={words}>
      {samples.length ? (
        <a href={link(["t", run, samples[0].id])} aria-label={words}>
          {sign}
        </a>
      ) : (
        <span aria-label={words}>{sign}</span>
      )}
    </td>
  );
}

function Pair({ shown, cells, pair }: { shown: Entry[]; cells: (Outcome | undefined)[]; pair: number[] }) {
  const [a, b] = pair.map((at) => cells[at]?.samples[0]?.id);
  if (!a || !b || pair[0] === pair[1]) return null;
  return <a href={link(["pair", shown[pair[0]].line.run, a, shown[pair[1]].line.run, b])}>side by side</a>;
}
