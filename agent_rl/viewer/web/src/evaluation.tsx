/** One evaluation: Pass@1 with its interval, and every task's outcome. */

import { useResource } from "./data";
import { Fact, Resource } from "./parts";
import { link, route } from "./route";
import { number, percent, visible } from "./text";
import type { EvaluationPage as Evaluated } from "./types";

export function EvaluationPage() {
  const [, run, key] = route.value.path;
  const loaded = useResource<Evaluated>(`${run}/eval/${key}`);
  return (
    <main id="main" class="page">
      <h1>Evaluation {visible(key)}</h1>
      <Resource of={loaded}>{(value) => <Outcomes run={run} value={value} />}</Resource>
    </main>
  );
}

function Outcomes({ run, value }: { run: string; value: Evaluated }) {
  return (
    <>
      <dl class="facts">
        <Fact name="Pass@1">{percent(value.pass_at_1)}</Fact>
        <Fact name="95 % interval">{value.interval ? value.interval.map(percent).join(" to ") : "–"}</Fact>
        <Fact name="graded">{number(value.graded)}</Fact>
        <Fact name="not graded">{number(value.ungraded)}</Fact>
        <Fact name="infrastructure failures">{number(value.infrastructure_failures)}</Fact>
      </dl>
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of tasks">
        <table>
          <thead>
            <tr>
              {["task", "resolved", "graded", "endings", "turns", "suspected hacks", "error"].map((name) => (
                <th scope="col" key={name}>
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {value.outcomes.map((one, i) => (
              <tr key={i}>
                <td>{one.id ? <a href={link(["t", run, one.id])}>{visible(one.task_id)}</a> : visible(one.task_id)}</td>
                <td class={one.resolved ? "good" : "bad"}>{one.resolved}</td>
                <td>{one.graded}</td>
                <td>{one.stops.join(", ")}</td>
                <td>{number(one.turns_mean, 3)}</td>
                <td>{one.suspected_hacks}</td>
                <td>{visible(one.error ?? "")}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}
