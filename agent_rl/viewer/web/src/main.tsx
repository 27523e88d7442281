/** The page: its head, and the page that the address names. */

import { render } from "preact";
import { useEffect } from "preact/hooks";
import "uplot/dist/uPlot.min.css";
import "./app.css";
import { CurvesPage } from "./curves";
import { connected, hearChanges, live, useResource } from "./data";
import { EvaluationPage } from "./evaluation";
import { Notes, Resource } from "./parts";
import { link, route } from "./route";
import { GroupPage, StepPage } from "./step";
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
        <nav aria-label="Pages">
          <a href={link([])} aria-current={page === "" ? "page" : undefined}>
            Curves
          </a>
          <a href={link(["trajectories", Number(route.value.path[1]) || 0])} aria-current={page === "trajectories" ? "page" : undefined}>
            Trajectories
          </a>
        </nav>
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

function Page({ page, runs }: { page: string; runs: RunLine[] }) {
  if (page === "trajectories") return <TrajectoriesPage runs={runs} />;
  if (page === "t") return <TrajectoryPage />;
  if (page === "group") return <GroupPage />;
  if (page === "step") return <StepPage />;
  if (page === "eval") return <EvaluationPage />;
  if (page === "") return <CurvesPage runs={runs} />;
  return <Notes notes={[`There is no page ${page}.`]} />;
}

hearChanges();
render(<App />, document.getElementById("app")!);
