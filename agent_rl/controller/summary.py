"""The result of a run: ``summary.json``, a table, and one picture."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from agent_rl.controller.run_state import RunState, evaluation_source, evaluation_step
from agent_rl.evaluation.report import best_step
from agent_rl.monitoring.plots import draw_run
from agent_rl.utils.run_files import write_json

MEANS = (
    "mismatch/k3_kl",
    "mismatch_without_replay/k3_kl",
    "mismatch/logprob_abs_diff",
    "mismatch_without_replay/logprob_abs_diff",
    "r3/router_mismatch",
    "mismatch_without_replay/router_mismatch",
    "rollout/tokens_per_second",
    "time/step",
)


def summarize(
    state: RunState, rows: Sequence[Mapping[str, float]], facts: Mapping[str, Any], *, steps: int
) -> dict[str, Any]:
    """Write ``summary.json`` and ``run.png``; returns the summary. ``facts`` describe the sandbox and the engine."""
    before, after = state.evaluations.get("step-0/sampled"), state.evaluations.get(f"step-{steps}/sampled")
    evaluations, best = state.evaluations, best_step(state.evaluations)
    summary = {
        "name": state.dir.name,
        "pass_at_1_before": before and before["pass_at_1"],
        "pass_at_1_before_interval": before and before["interval"],
        "pass_at_1_after": after and after["pass_at_1"],
        "pass_at_1_after_interval": after and after["interval"],
        "steps": steps,
        "seconds": _seconds(rows, evaluations),
        **facts,
        "best": best and asdict(best),
        **({"sources": by_source} if (by_source := _by_source(evaluations, steps)) else {}),
        "greedy_before": _rate(evaluations, "step-0/greedy"),
        "greedy_after": _rate(evaluations, f"step-{steps}/greedy"),
        "infrastructure_failures": {key: report["infrastructure_failures"] for key, report in evaluations.items()},
        "steps_without_update": idle_steps(rows),
        "means": {name: statistics.fmean(values) for name in MEANS if (values := _values(rows, name))},
    }
    write_json(state.dir / "summary.json", summary)
    draw_run(rows, state.dir / "run.png", title=state.dir.name, evaluations=evaluation_points(evaluations))
    return summary


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The summary as a table for the terminal."""
    table = Table(title=f"{summary['name']}: {summary['steps']} steps in {summary['seconds']:.0f} s", show_header=False)
    for side in ("before", "after"):
        if (rate := summary[f"pass_at_1_{side}"]) is not None:
            low, high = summary[f"pass_at_1_{side}_interval"]
            table.add_row(f"Pass@1 {side}", f"{100 * rate:.1f} %   [{100 * low:.1f}, {100 * high:.1f}]")
        if (rate := summary[f"greedy_{side}"]) is not None:
            table.add_row(f"Pass@1 {side}, greedy", f"{100 * rate:.1f} %")
    for source, rates in summary.get("sources", {}).items():
        for when, rate in rates.items():
            table.add_row(f"{source}: Pass@1 {when}", "–" if rate is None else f"{100 * rate:.1f} %")
    if best := summary["best"]:
        rate = f"{100 * best['pass_at_1']:.1f} %, the highest of {best['steps']}"
        sources = ", ".join(f"{source} {100 * own:.1f}" for source, own in best["sources"].items() if source)
        table.add_row(f"Pass@1 at the best step, {best['step']}", f"{rate}: {sources}" if sources else rate)
    table.add_row("infrastructure failures in evaluation", str(sum(summary["infrastructure_failures"].values())))
    for reason, count in summary["steps_without_update"].items():
        table.add_row("steps without an update", f"{count} of {summary['steps']}: {reason}")
    for name, value in summary["means"].items():
        table.add_row(f"mean {name}", f"{value:.4g}")
    for name in ("sandbox", "engine"):
        table.add_row(name, str(summary[name]))
    return table


def _values(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """The metric in every step that has it; times only of steps without recovered episodes."""
    complete = [row for row in rows if not (name.startswith("time/") and "time/rollout_recovered" in row)]
    return [row[name] for row in complete if name in row]


def _rate(evaluations: Mapping[str, Mapping[str, Any]], key: str) -> float | None:
    return evaluations[key]["pass_at_1"] if key in evaluations else None


def _by_source(evaluations: Mapping[str, Mapping[str, Any]], steps: int) -> dict[str, dict[str, float | None]]:
    """Pass@1 before and after training by source, of the evaluations of sources (``step-N/SOURCE/KIND``)."""
    rates: dict[str, dict[str, float | None]] = {}
    for when, step in (("before", 0), ("after", steps)):
        for key, report in evaluations.items():
            if evaluation_step(key) == step and (source := evaluation_source(key)):
                name = f"{when}, greedy" if key.endswith("/greedy") else when
                rates.setdefault(source, {})[name] = report["pass_at_1"]
    return rates


def _seconds(rows: Sequence[Mapping[str, float]], evaluations: Mapping[str, Mapping[str, Any]]) -> float:
    """Wall time of all steps and evaluations, over all starts of the run."""
    return sum(row["time/step"] for row in rows) + sum(report["seconds"] for report in evaluations.values())


def evaluation_points(
    evaluations: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[int, tuple[float, float, float]]]:
    """Pass@1 and its interval, sampled, by source and step."""
    points: dict[str, dict[int, tuple[float, float, float]]] = {}
    for key, report in evaluations.items():
        if key.endswith("/sampled") and report["pass_at_1"] is not None:
            of_source = points.setdefault(evaluation_source(key), {})
            of_source[evaluation_step(key)] = (report["pass_at_1"], *report["interval"])
    return points


def why_idle(row: Mapping[str, float]) -> str | None:
    """Why the step with the metrics ``row`` changed no weights; None if it did."""
    if row.get("train/updates"):
        return None
    if row.get("train/skipped_updates"):
        return "the guard skipped the update"
    if row.get("critic/warmup"):
        return "the critic warms up"
    if not row.get("rollout/trajectories"):
        return "infrastructure failures dropped every group"
    if row.get("reward/groups_uniform") == 1.0:
        return _uniform(row["reward/mean"])
    return "all trajectories were filtered out (see filter/* and r3/dropped_samples)"


def idle_steps(rows: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Number of steps that changed no weights, by reason, most frequent first."""
    return dict(Counter(reason for row in rows if (reason := why_idle(row)) is not None).most_common())


def _uniform(reward: float) -> str:
    equal = "the rewards within every group are equal"
    if reward == 0.0:
        return f"{equal}, all 0: the tasks are too hard for the model, or their grading is broken"
    return f"{equal}, all 1: the tasks are too easy for the model" if reward == 1.0 else equal
