/** The page: its head, and the page that the address names. */

import { render } from "preact";
import { useEffect } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./app.css";
import { CurvesPage } from "./curves";
import { connected, hearChanges, live, useResource } from "./data";
import { EvaluationPage } from "./evaluation";
import { EvaluationsPage } from "./evaluations";
import { GroupPage } from "./group";
import { PairPage } from "./pair";
import { Notes, Resource } from "./parts";
import { link, route } from "./route";
import { openRows } from "./rows";
import { SearchPage } from "./search";
import { StepPage } from "./step";
import { visible } from "./text";
import { TrajectoriesPage } from "./trajectories";
import { TrajectoryPage } from "./trajectory";
import type { RunLine, Runs } from "./types";

function App() {
  const runs = useResource<Runs>("runs");
  const page = route.value.path[0];
  useEffect(() => {
    document.title = `${route.value.path.filter(Boolean).join(" ") || "curves"} · agent-rl`;
  }, [route.value]);
  return (
    <>
      <a class="skip" href="#main" onClick={skip}>
        Skip to the content
      </a>
      <header class="top">
        <b>agent-rl</b>
        <Pages page={page} runs={runs.value?.runs ?? []} />
        <span class="dim">{runs.value && runs.value.runs.map(({ name }) => visible(name)).join(", ")}</span>
        {live && <State />}
      </header>
      <Resource of={runs}>{(value) => <Page page={page} runs={value.runs} />}</Resource>
    </>
  );
}

/** The fragment names the page, so the link can't lead there by itself. */
function skip(event: MouseEvent): void {
  event.preventDefault();
  const main = document.getElementById("main");
  main?.setAttribute("tabindex", "-1");
  main?.focus();
}

function State() {
  const words = { null: "", true: "live", false: "the server does not answer" };
  return (
    <span role="status" class={`live ${connected.value}`}>
      {words[`${connected.value}`]}
    </span>
  );
}

/** Evaluations alone have no curves. */
function onlyEvaluations(runs: RunLine[]): boolean {
  return runs.length > 0 && runs.every(({ kind }) => kind === "eval");
}

function Pages({ page, runs }: { page: string; runs: RunLine[] }) {
  const run = Number(route.value.path[1]) || 0;
  const only = onlyEvaluations(runs);
  const entries: [string, string, string][] = [
    ...(only ? [] : [["Curves", "", link([])] as [string, string, string]]),
    ...(runs.some(({ pass_at_1 }) => pass_at_1) || only ? [["Evaluations", "evals", link(["evals"])] as [string, string, string]] : []),
    ["Trajectories", "trajectories", link(["trajectories", run])],
  ];
  return (
    <nav aria-label="Pages">
      {entries.map(([name, path, href]) => (
        <a key={name} href={href} aria-current={page === path ? "page" : undefined}>
          {name}
        </a>
      ))}
    </nav>
  );
}

function Page({ page, runs }: { page: string; runs: RunLine[] }) {
  const [, run, name] = route.value.path;
  if (page === "trajectories") return <TrajectoriesPage runs={runs} />;
  if (page === "t") return <TrajectoryPage />;
  if (page === "group") return <GroupPage />;
  if (page === "step") return <StepPage />;
  if (page === "pair") return <PairPage />;
  if (page === "search") return <SearchPage />;
  if (page === "eval") return <EvaluationPage {...{ runs, run, name }} />;
  if (page === "evals") return <EvaluationsPage runs={runs} />;
  if (page !== "") return <Notes notes={[`There is no page ${page}.`]} />;
  if (!onlyEvaluations(runs)) return <CurvesPage runs={runs.filter(({ kind }) => kind !== "eval")} />;
  return runs.length === 1 ? <EvaluationPage runs={runs} run="0" name="eval" /> : <EvaluationsPage runs={runs} />;
}

hearChanges();
openRows();
render(<App />, document.getElementById("app")!);
