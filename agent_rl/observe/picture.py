"""One picture of a run: reward, mismatch and stage times over steps, saved as PNG."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_rl.observe.files import write_atomic

Rows = Sequence[Mapping[str, float]]


def draw_run(rows: Rows, path: Path, *, title: str, evaluations: Mapping[int, tuple[float, float, float]]) -> None:
    """Draw ``rows`` of metrics.jsonl. ``evaluations`` maps a step to Pass@1 and its interval ``(value, low, high)``."""
    from matplotlib.figure import Figure  # the object interface: no global pyplot state, no display needed

    figure = Figure(figsize=(12, 4), layout="constrained")
    reward, mismatch, times = figure.subplots(1, 3)
    _draw_reward(reward, rows, evaluations)
    _draw_mismatch(mismatch, rows)
    _draw_times(times, rows)
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomic(path, buffer.getvalue())


def _series(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in points], [value for _, value in points]


def _draw_reward(axes: Any, rows: Rows, evaluations: Mapping[int, tuple[float, float, float]]) -> None:
    axes.plot(*_series(rows, "reward/mean"), color="tab:blue", label="training reward (mean)")
    if evaluations:
        steps = sorted(evaluations)
        values = [evaluations[step][0] for step in steps]
        below = [evaluations[step][0] - evaluations[step][1] for step in steps]
        above = [evaluations[step][2] - evaluations[step][0] for step in steps]
        axes.errorbar(
            steps, values, yerr=[below, above], fmt="o", color="tab:red", capsize=4, label="held-out Pass@1, 95 %"
        )
    axes.set(xlabel="global step", ylim=(0, 1), title="reward")
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.3)


def _draw_mismatch(axes: Any, rows: Rows) -> None:
    for key, label, colour in (
        ("mismatch_native/k3_kl", "without replay", "tab:orange"),
        ("mismatch/k3_kl", "with replay", "tab:green"),
    ):
        steps, values = _series(rows, key)
        if any(value > 0 for value in values):
            axes.plot(steps, values, color=colour, label=label)
            axes.set_yscale("log")
    axes.set(xlabel="global step", title="k3-KL, trainer against engine")
    if axes.lines:
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def _draw_times(axes: Any, rows: Rows) -> None:
    stages = [
        stage for stage in ("rollout", "old_logprob", "update", "weight_sync") if _series(rows, f"time/{stage}")[0]
    ]
    if stages:
        steps = [row["step"] for row in rows]
        axes.stackplot(
            steps, *[[row.get(f"time/{stage}", 0.0) for row in rows] for stage in stages], labels=stages, alpha=0.8
        )
        axes.legend(loc="upper right", fontsize=8)
    axes.set(xlabel="global step", ylabel="seconds", title="time of a step")
    axes.grid(alpha=0.3)
