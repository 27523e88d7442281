"""The plot of a run, saved as PNG: reward, mismatch and stage times by step."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_rl.utils.run_files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, float]]


Points = Mapping[int, tuple[float, float, float]]
"""Pass@1 by step with its interval: ``(value, low, high)``."""


def draw_run(rows: Rows, path: Path, *, title: str, evaluations: Mapping[str, Points]) -> None:
    """Draw ``rows`` of metrics.jsonl. ``evaluations``: the evaluations of each source; a supervised run has none."""
    from matplotlib.figure import Figure  # the object interface needs no display and no global pyplot state

    supervised = any("sft/loss" in row for row in rows)
    figure = Figure(figsize=(8 if supervised else 12, 4), layout="constrained")
    *first, times = figure.subplots(1, 2 if supervised else 3)
    if supervised:
        _draw_loss(first[0], rows)
    else:
        _draw_reward(first[0], rows, evaluations)
        _draw_mismatch(first[1], rows)
    _draw_times(times, rows)
    for axes in (*first, times):
        _finish(axes)
    figure.suptitle(title)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomic(path, buffer.getvalue())


def _series(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in points], [value for _, value in points]


_EVALUATION_COLORS = ("tab:red", "tab:green", "tab:purple", "tab:brown", "tab:olive", "tab:cyan")


def _draw_reward(axes: Any, rows: Rows, evaluations: Mapping[str, Points]) -> None:
    axes.plot(*_series(rows, "reward/mean"), marker=".", color="tab:blue", label="training reward (mean)")
    for color, (source, points) in zip(cycle(_EVALUATION_COLORS), evaluations.items(), strict=False):
        steps = sorted(points)
        values = [points[step][0] for step in steps]
        below = [points[step][0] - points[step][1] for step in steps]
        above = [points[step][2] - points[step][0] for step in steps]
        label = f"{source or 'held-out'} Pass@1, 95 %"
        axes.errorbar(steps, values, yerr=[below, above], fmt="o", color=color, capsize=4, label=label)
    axes.set(ylim=(0, 1), title="reward")


def _draw_loss(axes: Any, rows: Rows) -> None:
    axes.plot(*_series(rows, "sft/loss"), color="tab:blue", label="training rows")
    axes.plot(*_series(rows, "sft/validation_loss"), marker="o", color="tab:red", label="held-out rows")
    axes.set(title="negative log-likelihood of a token")


def _draw_mismatch(axes: Any, rows: Rows) -> None:
    for key, label, color in (
        ("mismatch_without_replay/k3_kl", "without replay", "tab:orange"),
        ("mismatch/k3_kl", "with replay", "tab:green"),
    ):
        steps, values = _series(rows, key)
        if any(value > 0 for value in values):
            axes.plot(steps, values, marker=".", color=color, label=label)
            axes.set_yscale("log")
    axes.set(title="k3-KL, trainer against engine")


def _draw_times(axes: Any, rows: Rows) -> None:
    """Skips steps that resumed from the journal: their times cover only the last start."""
    rows = [row for row in rows if "time/rollout_recovered" not in row]
    bottom = [0.0] * len(rows)
    for stage in ("rollout", "old_logprob", "update", "weight_sync"):
        if any(f"time/{stage}" in row for row in rows):
            seconds = [row.get(f"time/{stage}", 0.0) for row in rows]
            axes.bar([row["step"] for row in rows], seconds, bottom=bottom, width=1.0, label=stage, alpha=0.8)
            bottom = [below + height for below, height in zip(bottom, seconds, strict=True)]
    axes.set(ylabel="seconds", title="time per step")


def _finish(axes: Any) -> None:
    """Integer steps on the axis, and the legend below the axes."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="global step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)
