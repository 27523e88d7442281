/** One evaluation: Pass@1 with its interval, and every task's outcome. */

import { live, useResource } from "./data";
import { Fact, Resource } from "./parts";
import { link, route, setQuery } from "./route";
import { denominator, interval, secondsOf, shadeOf, titleOf, tokensOf, verdictOf } from "./tasks";
import { number, percent, plural, seconds, visible } from "./text";
import type { EvaluationPage as Evaluated, Outcome, PassAtK, RunLine } from "./types";

export function EvaluationPage({ runs, run, name }: { runs: RunLine[]; run: string; name: string }) {
  const loaded = useResource<Evaluated>(`${run}/eval/${name}`);
  return (
    <main id="main" class="page">
      <h1>Evaluation {visible(titleOf(runs[Number(run)]?.name ?? run, name))}</h1>
      <Resource of={loaded}>
        {(value) => (
          <>
            <Result value={value} />
            {live && value.n && (
              <nav aria-label="Of this evaluation">
                <a href={link(["search", run], { n: value.n })}>search in texts</a>
              </nav>
            )}
            <Tasks run={run} outcomes={value.outcomes} />
          </>
        )}
      </Resource>
    </main>
  );
}

function Result({ value }: { value: Evaluated }) {
  const { usage, cost, samples } = value;
  const further = Object.entries(value.pass_at_k ?? {}).filter(([k]) => k !== "1");
  return (
    <dl class="facts">
      <Fact name="Pass@1">
        <b>{percent(value.pass_at_1)}</b>
      </Fact>
      <Fact name="95 % interval">{interval(value)}</Fact>
      <Fact name="denominator">{denominator(value)}</Fact>
      {samples !== null && samples > 1 && <Fact name="samples a task">{samples}</Fact>}
      {further.map(([k, rate]) => (
        <Fact key={k} name={`Pass@${k}`}>
          {passAtK(rate)}
        </Fact>
      ))}
      <Fact name="not graded">{number(value.ungraded)}</Fact>
      <Fact name="infrastructure failures">{number(value.infrastructure_failures)}</Fact>
      <Fact name="time">{seconds(value.seconds)}</Fact>
      {usage && <Fact name="tokens">{`${number(usage.prompt)} in, ${number(usage.completion)} out`}</Fact>}
      {cost !== null && <Fact name="cost">{dollars(cost)}</Fact>}
      {value.model && <Fact name="model">{visible(value.model)}</Fact>}
    </dl>
  );
}

function passAtK(value: number | null | PassAtK): string {
  if (value === null || typeof value === "number") return percent(value);
  return `${percent(value.rate)} [${value.interval.map(percent).join(", ")}]`;
}

function dollars(cost: number): string {
  return `$${cost < 0.1 ? cost.toPrecision(2) : cost.toFixed(2)}`;
}

interface Column {
  key: string;
  explain: string;
  value: (outcome: Outcome) => number | string | null | undefined;
  text?: (value: number) => string;
}

const COLUMNS: Column[] = [
  { key: "turns", explain: "The mean of the samples.", value: (one) => one.turns_mean, text: (value) => number(value, 3) },
  { key: "time", explain: "Seconds of a sample; the mean.", value: secondsOf, text: seconds },
  { key: "tokens", explain: "Tokens of a trajectory; the mean.", value: tokensOf },
  { key: "tokens in", explain: "Prompt tokens of all requests.", value: (one) => one.usage?.prompt },
  { key: "tokens out", explain: "Completion tokens of all requests.", value: (one) => one.usage?.completion },
  { key: "cost", explain: "Of all samples.", value: (one) => one.cost, text: dollars },
  { key: "endings", explain: "Why the episodes ended.", value: (one) => [...new Set(one.stops)].join(", ") },
  { key: "suspected hacks", explain: "Samples that a control suspects.", value: (one) => one.suspected_hacks },
  { key: "error", explain: "Why a sample could not be graded.", value: (one) => one.error || null },
];
const VERDICTS: Record<string, (outcome: Outcome) => boolean> = {
  resolved: ({ graded, resolved }) => graded > 0 && resolved === graded,
  "not resolved": ({ graded, resolved }) => resolved < graded,
  "not graded": ({ graded }) => graded === 0,
};

function Tasks({ run, outcomes }: { run: string; outcomes: Outcome[] }) {
  const query = route.value.query;
  const [task, verdict, sort] = ["task", "verdict", "sort"].map((key) => query.get(key) ?? "");
  const kept = outcomes.filter((one) => one.task_id.includes(task) && (VERDICTS[verdict]?.(one) ?? true));
  const columns = COLUMNS.filter(({ value }) => outcomes.some((one) => value(one) != null));
  return (
    <>
      <form class="filters" role="search" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
        <label>
          task contains
          <input type="search" value={task} onInput={(event) => setQuery({ task: event.currentTarget.value })} />
        </label>
        <label>
          verdict
          <select value={verdict} onChange={(event) => setQuery({ verdict: event.currentTarget.value })}>
            <option value="">all</option>
            {Object.keys(VERDICTS).map((one) => (
              <option key={one} value={one}>
                {one}
              </option>
            ))}
          </select>
        </label>
        <span role="status" class="count">{`${number(kept.length)} of ${plural(outcomes.length, "task")}`}</span>
      </form>
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of tasks">
        <table>
          <thead>
            <tr>
              <th scope="col">task</th>
              <th scope="col">verdict</th>
              {columns.map((column) => (
                <Head key={column.key} column={column} sort={sort} />
              ))}
            </tr>
          </thead>
          <tbody>
            {sorted(kept, columns, sort).map((one) => (
              <Task key={one.task_id} run={run} one={one} columns={columns} />
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

function Head({ column: { key, explain }, sort }: { column: Column; sort: string }) {
  const order = sort === `-${key}` ? "descending" : sort === key ? "ascending" : "none";
  return (
    <th scope="col" aria-sort={order} title={explain}>
      <button class="sort" onClick={() => setQuery({ sort: order === "descending" ? key : `-${key}` })}>
        {key}
        <span aria-hidden="true">{{ descending: " ▾", ascending: " ▴", none: "" }[order]}</span>
      </button>
    </th>
  );
}

/** Tasks without a value come last. */
function sorted(outcomes: Outcome[], columns: Column[], sort: string): Outcome[] {
  const column = columns.find(({ key }) => key === sort.replace(/^-/, ""));
  if (!column) return outcomes;
  const sign = sort.startsWith("-") ? -1 : 1;
  return outcomes.toSorted((one, other) => {
    const [a, b] = [column.value(one), column.value(other)];
    if (a == null || b == null) return Number(a == null) - Number(b == null);
    return a === b ? 0 : a < b ? -sign : sign;
  });
}

function Task({ run, one, columns }: { run: string; one: Outcome; columns: Column[] }) {
  const { samples } = one;
  return (
    <tr>
      <td>
        {samples.length ? <a href={link(["t", run, samples[0].id])}>{visible(one.task_id)}</a> : visible(one.task_id)}
        {samples.length > 1 &&
          samples.map(({ id, resolved }, i) => (
            <a key={id} href={link(["t", run, id])} class={resolved ? "sample good" : "sample bad"}>
              {i + 1}
            </a>
          ))}
      </td>
      <td class={`outcome ${shadeOf(one)}`}>{verdictOf(one)}</td>
      {columns.map(({ key, value, text }) => {
        const found = value(one);
        return <td key={key}>{typeof found === "number" ? (text ?? number)(found) : visible(found ?? "–")}</td>;
      })}
    </tr>
  );
}
