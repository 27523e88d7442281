"""The figures and tables of docs/research/paper-small.md, and those of your own matrix of runs.

    python benchmarks/paper_figures.py --out runs/figures           # the page's
    python benchmarks/paper_figures.py RUN... --out runs/figures    # your own runs, the baseline first
    python benchmarks/paper_figures.py RUN... --save runs.csv.zst   # write runs as a table

The page's runs are in the table docs/research/paper-runs.csv.zst. A table has one row for each step of each run: the
run's setting, the metrics of METRICS, and Pass@1 where the run was evaluated. Step 0 is the evaluation before training.
``benchmarks/run_matrix.py`` trains the runs.

A run is one sample, however many tasks it was evaluated on: another seed draws other episodes and makes other weights.
Intervals are 95 % intervals over seeds (Student's t). "Detectable" is the difference that the same number of runs with
the same spread shows in 4 of 5 experiments.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
import zstandard

PAGE_TABLE = Path(__file__).parents[1] / "docs" / "research" / "paper-runs.csv.zst"
LAST = 10
"""Number of steps at the end of a run whose mean reward is compared; also the window of the collapse rule."""
DESCRIPTION = ("run", "method", "replay", "ablation", "depth", "updates", "lr", "seed")
METRICS = (
    "reward/mean",
    "rollout/sampled_tokens_mean",
    "train/grad_norm",
    "train/entropy",
    "train/approx_kl",
    "train/clip_fraction",
    "mismatch/k3_kl",
    "mismatch/f_tau_2",
    "mismatch_without_replay/k3_kl",
    "mismatch_without_replay/router_mismatch",
    "mismatch_without_replay/token_mismatch",
    "r3/router_mismatch",
)
PANELS = (
    ("reward/mean", "training reward", "linear"),
    ("pass_at_1", "held-out Pass@1", "linear"),
    ("mismatch/k3_kl", "k3-KL, trainer against engine", "log"),
    ("mismatch/f_tau_2", "F(2): tokens beyond a factor 2", "symlog"),
    ("train/grad_norm", "gradient norm", "log"),
    ("train/entropy", "entropy", "linear"),
    ("rollout/sampled_tokens_mean", "response length: sampled tokens per episode", "linear"),
)
"""Metric, title and scale of each panel."""
FIGURES = {"paper-runs": ("paper-small", 4), "paper-runs-1": ("paper-small", 1)} | {
    "paper-runs-long": ("paper-long", 4),
    "paper-runs-long-1": ("paper-long", 1),
}
"""The figures of the page: the series of runs that each draws, and its number of updates per step."""
METHODS = (("GRPO", "off"), ("GRPO", "r3"), ("GRPO", "r2"), ("GRPO + TIS", "off"), ("GSPO", "off"), ("GSPO", "r3"))
"""The six settings of the page, in its order."""
ABLATIONS = (
    ("all (`none`)", "paper-small-r3-4-0"),
    ("nothing (`train.replay=off`)", "paper-small-off-4-0"),
    ("`old_logprob_only`", "paper-small-old-logprob-only-4-0"),
    ("`update_only`", "paper-small-update-only-4-0"),
    ("`sampled_only`", "paper-small-sampled-only-4-0"),
    ("`alternate_layers`", "paper-small-alternate-layers-4-0"),
    ("all, `async_rollout.depth` 2", "paper-small-ahead-4-0"),
    ("`fresh_only`, `async_rollout.depth` 2", "paper-small-fresh-only-4-0"),
    ("`shifted`", "paper-small-shifted-4-0"),
)
"""The rows of the page's table of ablations, and their runs."""
SETTINGS_HEADER = (
    "setting, updates per step",
    "Pass@1 before → after (by seed)",
    "difference; detectable",
    f"reward of the last {LAST} steps",
    "difference, same seeds; detectable",
    "k3-KL, median; max",
    "F(2), max",
    "gradient norm, median; max",
    "entropy",
)
LONG_HEADER = (
    "setting, updates per step",
    "Pass@1 at 0, 20, 40, 60",
    "at 60, by seed",
    "reward, steps 1-20, 21-40, 41-60",
    "collapsed",
    "k3-KL, median, without → with replay",
    "F(2), max",
    "gradient norm, median; max",
    "entropy",
)
ABLATIONS_HEADER = (
    "replayed",
    "routers that differ, median",
    "k3-KL: mean, median",
    "KL of the four updates, median",
    "clipped, median",
    "gradient norm, median; max",
    "reward, steps 1-5, 6-15",
    "Pass@1",
)
_DRAWS = 400_000
_COLORS = 10
_STYLES = ("-", "--", ":")
_LINEAR_BELOW = 1e-4  # F(2) is 0 in most steps, and a logarithmic axis has no zero
Key = TypeVar("Key", bound=Hashable)
Table = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Run:
    """One training run. ``method``: objective and corrections, such as ``GRPO + TIS``. ``updates``: updates per step.
    ``steps``: the metrics of each step. ``pass_at_1``: the rate of each sampled evaluation, by step."""

    name: str
    method: str
    replay: str
    ablation: str
    depth: int
    updates: int
    lr: float
    seed: int
    steps: Sequence[Mapping[str, float]]
    pass_at_1: Mapping[int, float]

    @property
    def setting(self) -> str:
        """What the run's figures are listed under: ``GRPO + R3``, ``GSPO, depth 2``."""
        name = self.method + (f" + {self.replay.upper()}" if self.replay != "off" else "")
        name += f" ({self.ablation})" if self.ablation != "none" else ""
        return name + (f", depth {self.depth}" if self.depth else "")

    @property
    def without_replay(self) -> tuple[Hashable, ...]:
        """Everything that two runs of a pair have in common, replay apart."""
        return self.method, self.depth, self.updates, self.lr, self.seed

    def values(self, metric: str) -> list[float]:
        """A metric in the steps that have it. A step without an update has few."""
        found = [row[metric] for row in self.steps if metric in row]
        if not found:
            raise SystemExit(f"{self.name}: no step has {metric}")
        return found

    def reward(self, first: int | None = None, last: int | None = None) -> float:
        """The mean training reward of the steps from ``first`` to ``last``; by default of the :data:`LAST` steps."""
        rewards = self.values("reward/mean")
        return float(np.mean(rewards[-LAST:] if first is None else rewards[first - 1 : last]))

    @property
    def last_pass_at_1(self) -> float:
        return self.pass_at_1[max(self.pass_at_1)]

    @property
    def collapsed(self) -> int | None:
        """The first step at which the mean reward of :data:`LAST` steps is under half of the highest one before."""
        rewarded = [row for row in self.steps if "reward/mean" in row]
        best = 0.0
        for end in range(LAST, len(rewarded) + 1):
            mean = float(np.mean([row["reward/mean"] for row in rewarded[end - LAST : end]]))
            if mean < best / 2:
                return int(rewarded[end - 1]["step"])
            best = max(best, mean)
        return None


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference with its 95 % interval, and the difference that the experiment could detect."""

    value: float
    interval: tuple[float, float]
    detectable: float

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """The mean of ``second`` minus that of ``first``, for two groups of runs with one spread; None below two each."""
    if min(len(first), len(second)) < 2:
        return None
    freedom = len(first) + len(second) - 2
    spread = (np.var(first) * len(first) + np.var(second) * len(second)) / freedom
    error = float(np.sqrt(spread * (1 / len(first) + 1 / len(second))))
    return _with_interval(float(np.mean(second) - np.mean(first)), error, freedom)


def paired_difference(first: Mapping[Key, float], second: Mapping[Key, float]) -> Difference | None:
    """The same from the differences of runs with one key; None below two common keys."""
    apart = [second[key] - value for key, value in first.items() if key in second]
    if len(apart) < 2:
        return None
    return _with_interval(float(np.mean(apart)), float(np.std(apart, ddof=1) / np.sqrt(len(apart))), len(apart) - 1)


def _with_interval(value: float, error: float, freedom: int) -> Difference:
    # numpy has no quantiles of Student's t. Those of many draws are right to a hundredth.
    beyond, power = map(float, np.quantile(np.random.default_rng(0).standard_t(freedom, _DRAWS), (0.975, 0.8)))
    return Difference(value, (value - beyond * error, value + beyond * error), (beyond + power) * error)


def read_run(directory: Path) -> Run:
    """Read a run directory: ``config.yaml``, ``metrics.jsonl`` and the evaluations in ``state.json``."""
    if not (directory / "config.yaml").is_file() or not (directory / "metrics.jsonl").is_file():
        raise SystemExit(f"{directory}: not a run directory with a finished step")
    config = yaml.safe_load((directory / "config.yaml").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    evaluations = json.loads((directory / "state.json").read_text())["evaluations"]
    rates = {
        int(key.removeprefix("step-").partition("/")[0]): report["pass_at_1"]
        for key, report in evaluations.items()
        if key.endswith("/sampled") and report["pass_at_1"] is not None
    }
    train = config["train"]
    return Run(
        name=directory.name,
        method=_method(train),
        replay=train["replay"],
        ablation=config["r3"]["ablation"],
        depth=config["async_rollout"]["depth"],
        updates=train["mini_steps"] * train["epochs"],
        lr=train["lr"],
        seed=config["seed"],
        steps=[{key: row[key] for key in ("step", *METRICS) if key in row} for row in rows],
        pass_at_1=rates,
    )


def _method(train: Mapping[str, Any]) -> str:
    parts = [train["objective"].upper()]
    if train["lora"]:
        parts.append("LoRA")
    if weight := train["correction"]["weight"]:
        parts.append("TIS" if weight == "token" else f"{weight} weights")
    if mask := train["correction"]["mask"]:
        parts.append(f"{mask} mask")
    if (source := train["old_logprob"]["source"]) != "recompute":
        parts.append(source)
    return " + ".join(parts)


def write_table(runs: Iterable[Run], path: Path) -> None:
    """Write runs as a CSV file that zstandard compresses. Numbers keep all their digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*DESCRIPTION, "step", "pass_at_1", *METRICS])
    for run in runs:
        described = [run.name, run.method, run.replay, run.ablation, run.depth, run.updates, run.lr, run.seed]
        steps = {int(row["step"]): row for row in run.steps}
        for step in sorted({*steps, *run.pass_at_1}):
            row = steps.get(step, {})
            writer.writerow([*described, step, run.pass_at_1.get(step, ""), *(row.get(name, "") for name in METRICS)])
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(text.getvalue().encode()))


def read_table(path: Path) -> list[Run]:
    """Read the runs of a table, in its order."""
    with zstandard.open(path, "rt", encoding="utf-8", newline="") as lines:
        by_run: dict[str, list[dict[str, str]]] = {}
        for row in csv.DictReader(lines):
            by_run.setdefault(row["run"], []).append(row)
    return [_run_of_rows(rows) for rows in by_run.values()]


def _run_of_rows(rows: Sequence[Mapping[str, str]]) -> Run:
    first = rows[0]
    return Run(
        name=first["run"],
        method=first["method"],
        replay=first["replay"],
        ablation=first["ablation"],
        depth=int(first["depth"]),
        updates=int(first["updates"]),
        lr=float(first["lr"]),
        seed=int(first["seed"]),
        steps=[
            {name: float(row[name]) for name in ("step", *METRICS) if row.get(name)} for row in rows if int(row["step"])
        ],
        pass_at_1={int(row["step"]): float(row["pass_at_1"]) for row in rows if row["pass_at_1"]},
    )


def of_series(runs: Iterable[Run], series: str, updates: int | None = None) -> list[Run]:
    """The runs of the page's six settings that ``run_matrix.py`` named ``series``, in the page's order."""
    known = [
        run
        for run in runs
        if run.name.startswith(f"{series}-")
        and run.ablation == "none"
        and run.depth == 0
        and run.lr == 3e-4
        and updates in (None, run.updates)
    ]
    return sorted(known, key=lambda run: (-run.updates, METHODS.index((run.method, run.replay)), run.seed))


def by_setting(runs: Iterable[Run]) -> dict[tuple[str, int, float], list[Run]]:
    """The runs of each setting, number of updates and learning rate, in the given order."""
    groups: dict[tuple[str, int, float], list[Run]] = {}
    for run in runs:
        group = groups.setdefault((run.setting, run.updates, run.lr), [])
        if any(other.seed == run.seed for other in group):
            raise SystemExit(f"{run.name}: a second run of {run.setting} with seed {run.seed}")
        group.append(run)
    return groups


def settings_table(runs: Sequence[Run]) -> list[list[str]]:
    """One row for each setting. Each is compared with the first setting that has its updates and learning rate."""
    groups = by_setting(runs)
    table = [list(SETTINGS_HEADER)]
    for (setting, updates, lr), group in groups.items():
        baseline = next(other for (_, number, rate), other in groups.items() if (number, rate) == (updates, lr))
        compared = (None, None) if baseline is group else _compared(baseline, group)
        first = [run.pass_at_1[min(run.pass_at_1)] for run in group if run.pass_at_1]
        last = [run.last_pass_at_1 for run in group if run.pass_at_1]
        table.append(
            [
                f"{setting}, {updates}",
                f"{100 * float(np.mean(first)):.1f} → {_percent(last)}" if last else "",
                *(f"{found}; {100 * found.detectable:.0f}" if found else "" for found in compared[:1]),
                _percent([run.reward() for run in group]),
                *(f"{found}; {100 * found.detectable:.0f}" if found else "" for found in compared[1:]),
                f"{_median(group, 'mismatch/k3_kl')}; {_largest(group, 'mismatch/k3_kl')}",
                _largest(group, "mismatch/f_tau_2"),
                _norms(group),
                _entropy(group),
            ]
        )
    return table


def _compared(baseline: Sequence[Run], group: Sequence[Run]) -> tuple[Difference | None, Difference | None]:
    rates = [[run.last_pass_at_1 for run in runs if run.pass_at_1] for runs in (baseline, group)]
    rewards = [{run.seed: run.reward() for run in runs} for runs in (baseline, group)]
    return difference(*rates), paired_difference(*rewards)


def long_table(runs: Sequence[Run]) -> list[list[str]]:
    """One row for each setting of the runs of 60 steps."""
    table = [list(LONG_HEADER)]
    for (setting, updates, _), group in by_setting(runs).items():
        thirds = [float(np.mean([run.reward(first, first + 19) for run in group])) for first in (1, 21, 41)]
        rates = [float(np.mean([run.pass_at_1[step] for run in group])) for step in (0, 20, 40, 60)]
        k3 = _median(group, "mismatch/k3_kl")
        if group[0].replay == "r3":
            k3 = f"{_median(group, 'mismatch_without_replay/k3_kl')} → {k3}"
        table.append(
            [
                f"{setting}, {updates}",
                ", ".join(f"{100 * rate:.1f}" for rate in rates),
                ", ".join(f"{100 * run.pass_at_1[60]:.1f}" for run in group),
                ", ".join(f"{100 * reward:.1f}" for reward in thirds),
                _collapses(group),
                k3,
                _largest(group, "mismatch/f_tau_2"),
                _norms(group),
                _entropy(group),
            ]
        )
    return table


def pairs_table(runs: Sequence[Run]) -> list[list[str]]:
    """What replay changes, over all pairs of runs that differ in replay alone."""
    table = [["", "pairs", "points of Pass@1; detectable", f"points of reward, last {LAST} steps; detectable"]]
    for name, replay, updates in (
        ("R3 minus no replay", "r3", None),
        ("R3 minus no replay, 4 updates per step", "r3", 4),
        ("R3 minus no replay, 1 update per step", "r3", 1),
        ("R2 minus no replay", "r2", None),
    ):
        chosen = [run for run in runs if run.ablation == "none" and updates in (None, run.updates)]
        sides = [{run.without_replay: run for run in chosen if run.replay == kind} for kind in ("off", replay)]
        common = sides[0].keys() & sides[1].keys()
        rates = paired_difference(*({key: side[key].last_pass_at_1 for key in sorted(common)} for side in sides))
        rewards = paired_difference(*({key: side[key].reward() for key in sorted(common)} for side in sides))
        if rates and rewards:
            cells = [f"{found}; {100 * found.detectable:.0f}" for found in (rates, rewards)]
            table.append([name, str(len(common)), *cells])
    return table


def ablations_table(runs: Sequence[Run]) -> list[list[str]]:
    """One row for each run of ABLATIONS."""
    named = {run.name: run for run in runs}
    table = [list(ABLATIONS_HEADER)]
    for label, name in ABLATIONS:
        run = named[name]
        routers = "not recorded"
        if run.replay != "off":
            routers = f"{100 * float(np.median(run.values('r3/router_mismatch'))):.1f} %"
        k3 = run.values("mismatch/k3_kl")
        table.append(
            [
                label,
                routers,
                f"{_power(float(np.mean(k3)))}, {_power(float(np.median(k3)))}",
                _power(float(np.median(run.values("train/approx_kl")))),
                f"{100 * float(np.median(run.values('train/clip_fraction'))):.2f} %",
                _norms([run]),
                f"{run.reward(1, 5):.2f}, {run.reward(6, 15):.2f}",
                f"{100 * run.pass_at_1[0]:.1f} → {100 * run.pass_at_1[15]:.1f}",
            ]
        )
    return table


def _percent(rates: Sequence[float]) -> str:
    """The mean in percent, then each value where there are several."""
    each = f" ({', '.join(f'{100 * rate:.1f}' for rate in rates)})" if len(rates) > 1 else ""
    return f"{100 * float(np.mean(rates)):.1f}{each}"


def _power(value: float) -> str:
    """``1.2e-4``."""
    if value >= 0.1 or not value:
        return f"{value:.2g}"
    number, _, exponent = f"{value:.1e}".partition("e")
    return f"{number}e{int(exponent)}"


def _median(runs: Sequence[Run], metric: str) -> str:
    """The mean of the runs' medians: a few steps decide the mean of a heavy tail."""
    return _power(float(np.mean([np.median(run.values(metric)) for run in runs])))


def _largest(runs: Sequence[Run], metric: str) -> str:
    return _power(max(max(run.values(metric)) for run in runs))


def _norms(runs: Sequence[Run]) -> str:
    norms = [run.values("train/grad_norm") for run in runs]
    return f"{float(np.mean([np.median(each) for each in norms])):.2f}; {max(map(max, norms)):.1f}"


def _entropy(runs: Sequence[Run]) -> str:
    return f"{float(np.mean([np.mean(run.values('train/entropy')[-LAST:]) for run in runs])):.3f}"


def _collapses(runs: Sequence[Run]) -> str:
    steps = [str(step) for run in runs if (step := run.collapsed) is not None]
    return f"{len(steps)} of {len(runs)}" + (f", at step {' and '.join(steps)}" if steps else "")


def markdown(table: Table) -> str:
    """A table as Markdown, without a line break at its end."""
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw runs by setting: each run as a thin line, the mean of a setting's runs as a thick one."""
    from matplotlib.figure import Figure  # the object interface: no pyplot state, no display
    from PIL import Image

    panels = panels_of(runs)
    columns = -(-len(panels) // 2)
    figure = Figure(figsize=(14 / 3 * columns, 8), layout="constrained")
    groups = by_setting(runs)
    several_rates = len({lr for *_, lr in groups}) > 1
    places = figure.subplots(2, columns).flat
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    for axes, (metric, title, scale) in zip(places, panels, strict=False):
        for number, ((setting, updates, lr), group) in enumerate(groups.items()):
            name = f"{setting}, {updates} per step" + (f", lr {lr:g}" if several_rates else "")
            _draw_setting(axes, [_series(run, metric) for run in group], line_style(number), name)
        if scale == "symlog":
            axes.set_yscale(scale, linthresh=_LINEAR_BELOW)
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale(scale)
        axes.set(title=title, xlabel="global step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    Image.open(picture).quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def panels_of(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """The panels for which a run has a value."""
    return [panel for panel in PANELS if any(_series(run, panel[0]) for run in runs)]


def line_style(number: int) -> dict[str, str]:
    """The color and the dashes of setting ``number``; thirty settings differ."""
    return {"color": f"C{number % _COLORS}", "linestyle": _STYLES[number // _COLORS % len(_STYLES)]}


def _series(run: Run, metric: str) -> dict[float, float]:
    if metric == "pass_at_1":
        return {float(step): rate for step, rate in sorted(run.pass_at_1.items())}
    return {row["step"]: row[metric] for row in run.steps if metric in row}


def _draw_setting(axes: Any, runs: Sequence[Mapping[float, float]], line: Mapping[str, str], name: str) -> None:
    """``runs``: the values of each run by step. The mean covers the steps that all runs have."""
    for run in runs if len(runs) > 1 else ():
        axes.plot(list(run), list(run.values()), linewidth=0.6, alpha=0.5, **line)
    common = sorted(set.intersection(*(set(run) for run in runs)))
    means = [sum(run[step] for run in runs) / len(runs) for step in common]
    axes.plot(common, means, marker=".", markersize=3, label=name, **line)


def page_tables(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """The title and the Markdown of each table of the page."""
    small, long = of_series(runs, "paper-small"), of_series(runs, "paper-long")
    yield "15 steps: pairs of runs that differ in replay alone", markdown(pairs_table(small))
    yield "15 steps: settings", markdown(settings_table(small))
    yield "60 steps: pairs of runs that differ in replay alone", markdown(pairs_table(long))
    yield "60 steps: settings", markdown(long_table(long))
    yield "Ablations, 15 steps, seed 0", markdown(ablations_table(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run directories; none: the page's table")
    parser.add_argument("--out", type=Path, help="directory for figures and tables")
    parser.add_argument("--save", type=Path, help="write the runs as a table (.csv.zst)")
    options = parser.parse_args()
    runs = [read_run(directory) for directory in options.runs] or read_table(PAGE_TABLE)
    if options.save:
        write_table(runs, options.save)
    if options.runs:
        tables = [("Settings", markdown(settings_table(runs))), ("Pairs", markdown(pairs_table(runs)))]
        figures = {"training": runs}
    else:
        tables = list(page_tables(runs))
        figures = {name: of_series(runs, *series) for name, series in FIGURES.items()}
    text = "\n\n".join(f"{title}\n\n{table}" for title, table in tables)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "tables.md").write_text(text + "\n")
        for name, drawn in figures.items():
            draw(drawn, options.out / f"{name}.png")


if __name__ == "__main__":
    main()
