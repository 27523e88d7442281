"""Pictures of training, saved as PNG: one run's reward, mismatch and stage times, and several runs over each other."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_rl.utils.run_files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, float]]
PASS_AT_1 = "pass_at_1"
"""The name of an evaluation's rate in the rows that :func:`draw_settings` is given."""
PANELS = (
    ("reward/mean", "training reward", "linear"),
    (PASS_AT_1, "held-out Pass@1", "linear"),
    ("mismatch/k3_kl", "k3-KL, trainer against engine", "log"),
    ("mismatch/f_tau_2", "F(2): tokens beyond a factor 2", "symlog"),
    ("train/grad_norm", "gradient norm", "log"),
    ("train/entropy", "entropy", "linear"),
)
_COLOURS = 10
_STYLES = ("-", "--", ":")
_LINEAR_BELOW = 1e-4  # F(2) of most steps is 0, which a logarithm has no place for


def draw_run(rows: Rows, path: Path, *, title: str, evaluations: Mapping[int, tuple[float, float, float]]) -> None:
    """Draw ``rows`` of metrics.jsonl. ``evaluations`` maps a step to Pass@1 and its interval ``(value, low, high)``."""
    from matplotlib.figure import Figure  # the object interface: no global pyplot state, no display needed

    figure = Figure(figsize=(12, 4), layout="constrained")
    reward, mismatch, times = figure.subplots(1, 3)
    _draw_reward(reward, rows, evaluations)
    _draw_mismatch(mismatch, rows)
    _draw_times(times, rows)
    for axes in (reward, mismatch, times):
        _finish(axes)
    figure.suptitle(title)
    _save(figure, path)


def draw_settings(settings: Mapping[str, Sequence[Rows]], path: Path) -> None:
    """Draw runs by setting, a colour each (dashed and dotted after ten): a run as a thin line, and the mean of a
    setting's runs as a thick one. Rows of evaluations have ``step`` and :data:`PASS_AT_1` alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), layout="constrained")
    for axes, (key, title, scale) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for number, (name, runs) in enumerate(settings.items()):
            _draw_setting(axes, [dict(zip(*_series(rows, key), strict=True)) for rows in runs], line_of(number), name)
        if scale == "symlog":
            axes.set_yscale(scale, linthresh=_LINEAR_BELOW)
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale(scale)
        axes.set(title=title)
        _set_steps(axes)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False)
    _save(figure, path)


def line_of(number: int) -> dict[str, str]:
    """The colour and the style of setting ``number``: up to thirty differ."""
    return {"color": f"C{number % _COLOURS}", "linestyle": _STYLES[number // _COLOURS % len(_STYLES)]}


def _draw_setting(axes: Any, runs: Sequence[Mapping[float, float]], line: Mapping[str, str], name: str) -> None:
    """``runs``: a value by step, of each run; their mean is over the steps that all have."""
    for run in runs if len(runs) > 1 else ():
        axes.plot(list(run), list(run.values()), linewidth=0.6, alpha=0.5, **line)
    common = sorted(set.intersection(*(set(run) for run in runs)))
    means = [sum(run[step] for run in runs) / len(runs) for step in common]
    axes.plot(common, means, marker=".", markersize=3, label=name, **line)


def _save(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomic(path, buffer.getvalue())


def _series(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in points], [value for _, value in points]


def _draw_reward(axes: Any, rows: Rows, evaluations: Mapping[int, tuple[float, float, float]]) -> None:
    axes.plot(*_series(rows, "reward/mean"), marker=".", color="tab:blue", label="training reward (mean)")
    if evaluations:
        steps = sorted(evaluations)
        values = [evaluations[step][0] for step in steps]
        below = [evaluations[step][0] - evaluations[step][1] for step in steps]
        above = [evaluations[step][2] - evaluations[step][0] for step in steps]
        axes.errorbar(
            steps, values, yerr=[below, above], fmt="o", color="tab:red", capsize=4, label="held-out Pass@1, 95 %"
        )
    axes.set(ylim=(0, 1), title="reward")


def _draw_mismatch(axes: Any, rows: Rows) -> None:
    for key, label, colour in (
        ("mismatch_without_replay/k3_kl", "without replay", "tab:orange"),
        ("mismatch/k3_kl", "with replay", "tab:green"),
    ):
        steps, values = _series(rows, key)
        if any(value > 0 for value in values):
            axes.plot(steps, values, marker=".", color=colour, label=label)
            axes.set_yscale("log")
    axes.set(title="k3-KL, trainer against engine")


def _draw_times(axes: Any, rows: Rows) -> None:
    """Only of steps that were run whole: one taken up from the journal shows the time of its last start alone."""
    rows = [row for row in rows if "time/rollout_recovered" not in row]
    bottom = [0.0] * len(rows)
    for stage in ("rollout", "old_logprob", "update", "weight_sync"):
        if any(f"time/{stage}" in row for row in rows):
            seconds = [row.get(f"time/{stage}", 0.0) for row in rows]
            axes.bar([row["step"] for row in rows], seconds, bottom=bottom, width=1.0, label=stage, alpha=0.8)
            bottom = [below + own for below, own in zip(bottom, seconds, strict=True)]
    axes.set(ylabel="seconds", title="time of a step")


def _set_steps(axes: Any) -> None:
    """Whole steps on the axis."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="global step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)


def _finish(axes: Any) -> None:
    """Whole steps on the axis, and the legend below it, where it covers nothing."""
    _set_steps(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bsandbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)
