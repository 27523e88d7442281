/** One step: its groups, and how many tokens each expert of each layer got. */

import { useMemo } from "preact/hooks";
import { live, useResource } from "./data";
import { type Heat, HeatMap } from "./heat";
import { Heads, Resource } from "./parts";
import { link, route } from "./route";
import { number, visible } from "./text";
import type { Loads, Step } from "./types";

export function StepPage() {
  const [, run, n] = route.value.path;
  const loaded = useResource<Step>(`${run}/steps/${n}`);
  return (
    <main id="main" class="page">
      <h1>{/^\d+$/.test(n) ? `Step ${n}` : n}</h1>
      <nav aria-label="Of this step">
        <a href={link(["trajectories", run], { n })}>its trajectories</a>{" "}
        {live && <a href={link(["search", run], { n })}>search in texts</a>}
      </nav>
      <ExpertLoads run={run} n={n} />
      <Resource of={loaded}>{(step) => <Groups run={run} step={step} />}</Resource>
    </main>
  );
}

function ExpertLoads({ run, n }: { run: string; n: string }) {
  const loaded = useResource<Loads>(`${run}/loads/${n}`);
  const heat = useMemo(() => heatOf(loaded.value), [loaded.value]);
  return (
    <section aria-label="Loads of experts">
      <h2>Layers x experts: tokens that each expert got</h2>
      <Resource of={loaded}>{() => heat && <HeatMap heat={heat} />}</Resource>
    </section>
  );
}

function heatOf(value: Loads | null): Heat | null {
  if (!value?.loads) return null;
  const { loads, num_experts, layers } = value;
  const most = loads.flat().reduce((a, b) => Math.max(a, b), 1);
  return {
    name: "Load",
    rows: Array.from({ length: layers }, (_, layer) => `layer ${layer}`),
    columns: num_experts,
    columnName: (expert) => `expert ${expert}`,
    value: (layer, expert) => loads[layer][expert],
    limit: most,
    unit: "tokens",
  };
}

function Groups({ run, step }: { run: string; step: Step }) {
  const { columns } = step;
  const rows = new Map(columns.id.map((id, row) => [id, row]));
  return (
    <section aria-label="Groups">
      <h2>Groups</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Table of groups">
        <table>
          <thead>
            <Heads names={["group", "task", "trained on", "rewards", "trajectories", "infrastructure failures"]} />
          </thead>
          <tbody>
            {step.groups.map(({ group, task, infrastructure_failures, members, trained }) => (
              <tr key={group}>
                <td>
                  <a href={link(["group", run, step.n, group])}>group {group}</a>
                </td>
                <td>{visible(task)}</td>
                <td>{trained ? "yes" : "no"}</td>
                <td>{members.map((id) => number(columns.reward[rows.get(id)!], 2)).join(" ")}</td>
                <td>
                  {members.map((id) => (
                    <a key={id} href={link(["t", run, id])} class="member">
                      {id}
                    </a>
                  ))}
                </td>
                <td>{infrastructure_failures}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
