"""``agent-rl r3 figures``: training runs of several settings and seeds, drawn over each other and compared.

::

    RUN/config.yaml, metrics.jsonl, state.json, trajectories/ (token detail)
    ──▶ OUT/training.png, f_tau.png, runs.md, runs.json

A setting is what a config says of the objective, of replay, of corrections and of updates; the runs of one setting
differ by their seeds. The figures follow the R3 paper's (arXiv 2510.11370): ``r3 compare`` draws those of a model, and
this those of its training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table

from agent_rl.config import Replay, RunConfig
from agent_rl.config.loader import load_recorded
from agent_rl.controller.state import evaluation_step
from agent_rl.errors import UserError
from agent_rl.evaluation.seeds import SeedDifference, paired_difference, seed_difference
from agent_rl.monitoring.console import cell
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.monitoring.plots import PASS_AT_1, Rows, draw_settings
from agent_rl.rollout.records import step_stem, steps_on_disk
from agent_rl.rollout.token_details import read_gaps
from agent_rl.utils.run_files import read_json, write_atomic, write_json
from r3.mismatch.figures import f_tau_curves
from r3.mismatch.report import f_tau_curve

NEWEST = 10
"""Steps whose tokens F(tau) and whose rewards are taken, the last ones of every run."""
COLUMN = 20
"""Characters that a setting wants of the terminal's width."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its directory, setting, learning rate, seed, its steps' metrics, and Pass@1 of its sampled
    evaluations by step. ``replay`` and what its setting is called without it; None for an ablation, which is no
    replay that trains."""

    directory: Path
    setting: str
    replay: Replay | None
    without: str
    lr: float
    seed: int
    rows: Rows
    pass_at_1: Mapping[int, float]

    def values(self, name: str) -> list[float]:
        """A metric in the steps that have it. Raises UserError where none has."""
        found = [row[name] for row in self.rows if name in row]
        if not found:
            raise UserError(f"{self.directory}: no step has {name}; right would be a run that has made updates")
        return found

    @property
    def collapsed(self) -> int | None:
        """The first step at which the mean reward of :data:`NEWEST` steps was under half of the highest before."""
        rewarded = [row for row in self.rows if "reward/mean" in row]
        best = 0.0
        for end in range(NEWEST, len(rewarded) + 1):
            mean = float(np.mean([row["reward/mean"] for row in rewarded[end - NEWEST : end]]))
            if mean < best / 2:
                return int(rewarded[end - 1]["step"])
            best = max(best, mean)
        return None


@dataclass(frozen=True, slots=True)
class Setting:
    """What the runs of one setting came to; of each figure the mean over runs, or the largest of all (``max``).

    ``pass_at_1`` are the runs' last evaluations, in the order of ``seeds``, and ``evaluations`` the steps after which
    all were evaluated, with the mean; ``rewards`` the mean training rewards of the last steps; ``collapsed`` the steps
    of :attr:`Run.collapsed`. The differences are to the first setting named, that of rewards between runs of the same
    seed. ``crossed``: steps beyond a limit of the guard, of all runs.
    """

    name: str
    seeds: tuple[int, ...]
    steps: int
    evaluations: tuple[tuple[int, float], ...]
    pass_at_1: tuple[float, ...]
    difference: SeedDifference | None
    rewards: tuple[float, ...]
    reward_difference: SeedDifference | None
    collapsed: tuple[int | None, ...]
    k3_kl: float
    k3_kl_max: float
    f_tau_2_max: float
    grad_norm: float
    grad_norm_max: float
    entropy: float
    crossed: int


@dataclass(frozen=True, slots=True)
class ReplayWorth:
    """What ``replay`` is worth over all pairs of runs, one with it and one without, that differ in nothing else: the
    mean of their differences in the last Pass@1 and in :attr:`Setting.rewards`; None where fewer than two have one.
    ``collapsed``: how many did without replay, and with it."""

    replay: Replay
    pairs: int
    collapsed: tuple[int, int]
    pass_at_1: SeedDifference | None
    reward: SeedDifference | None


def run_figures(directories: Sequence[Path], out: Path) -> None:
    """Draw the runs in ``directories`` and compare their settings, the first one's with each other. Raises UserError
    for a directory that holds no run with a step, and for two runs of one setting and seed."""
    runs = named_by_rate([read_run(directory) for directory in directories])
    settings = by_setting(runs)
    first = next(iter(settings.values()))
    compared = [figures_of(name, each, first) for name, each in settings.items()]
    worth = [found for replay in ("r3", "r2") if (found := replay_worth(replay, runs)) is not None]
    out.mkdir(parents=True, exist_ok=True)
    draw_settings({name: [_drawn(run) for run in each] for name, each in settings.items()}, out / "training.png")
    curves = {name: curve for name, each in settings.items() if (curve := f_tau_at_the_end(each)) is not None}
    if curves:
        write_atomic(out / "f_tau.png", f_tau_curves(curves))
    write_json(
        out / "runs.json",
        {
            "runs": [str(directory) for directory in directories],
            "settings": list(map(asdict, compared)),
            "replay": list(map(asdict, worth)),
        },
    )
    rows = [_cells(setting) for setting in compared]
    sentences = [_sentence(found) for found in worth]
    write_atomic(out / "runs.md", "\n".join([_markdown(rows), *(f"{each}\n" for each in sentences)]).encode())
    console = Console(soft_wrap=True)
    for table in _tables(rows, console.width):
        console.print(table)
    for sentence in sentences:
        console.print(cell(sentence))


def read_run(directory: Path) -> Run:
    """The run in ``directory``, as far as it is. Raises UserError."""
    if not (directory / "config.yaml").is_file() or not (rows := read_metrics(directory)):
        raise UserError(f"{directory}: no run with a step there; right would be a run's directory")
    config = load_recorded(directory / "config.yaml")
    made = read_json(directory / "state.json")["evaluations"]
    rates = {evaluation_step(key): report["pass_at_1"] for key, report in made.items() if key.endswith("/sampled")}
    without = config.model_copy(update={"train": config.train.model_copy(update={"replay": "off"})})
    return Run(
        directory,
        setting_of(config),
        config.train.replay if config.r3.ablation == "none" else None,
        setting_of(without),
        config.train.lr,
        config.seed,
        rows,
        {step: rate for step, rate in rates.items() if rate is not None},
    )


def setting_of(config: RunConfig) -> str:
    """``GRPO``, ``GSPO + R3``, ``GRPO + TIS, 4 updates a step``."""
    train = config.train
    parts = [train.objective.upper()]
    if train.replay != "off":
        parts.append(train.replay.upper())
    if train.lora:
        parts.append("LoRA")
    if weight := train.correction.weight:
        parts.append("TIS" if weight == "token" else f"{weight} weights")
    if mask := train.correction.mask:
        parts.append(f"{mask} mask")
    if config.r3.ablation != "none":
        parts[-1] += f" ({config.r3.ablation})"
    updates = train.mini_steps * train.epochs
    return (
        " + ".join(parts)
        + (f", {updates} updates a step" if updates > 1 else "")
        + (f", depth {config.async_rollout.depth}" if config.async_rollout.depth else "")
    )


def named_by_rate(runs: Sequence[Run]) -> list[Run]:
    """The runs, their settings named with the learning rate where they differ in it: ``GRPO, lr 0.0003``."""
    if len({run.lr for run in runs}) == 1:
        return list(runs)
    return [
        replace(run, setting=f"{run.setting}, lr {run.lr:g}", without=f"{run.without}, lr {run.lr:g}") for run in runs
    ]


def by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each setting, in the order in which they are named. Raises UserError for two of one seed."""
    settings: dict[str, list[Run]] = {}
    for run in runs:
        for other in settings.setdefault(run.setting, []):
            if other.seed == run.seed:
                raise UserError(
                    f"{other.directory} and {run.directory}: both are {run.setting} with seed {run.seed}; name one"
                )
        settings[run.setting].append(run)
    return settings


def figures_of(name: str, runs: Sequence[Run], first: Sequence[Run]) -> Setting:
    """What ``runs`` came to, against the runs ``first``."""
    after, baseline = _at_the_end(runs), _at_the_end(first)
    rewards = _rewards(runs)
    return Setting(
        name=name,
        seeds=tuple(run.seed for run in runs),
        steps=min(len(run.rows) for run in runs),
        evaluations=_by_step(runs),
        pass_at_1=after,
        difference=None if runs is first else seed_difference(baseline, after),
        rewards=tuple(rewards.values()),
        reward_difference=None if runs is first else paired_difference(_rewards(first), rewards),
        collapsed=tuple(run.collapsed for run in runs),
        k3_kl=_mean_of_medians(runs, "mismatch/k3_kl"),
        k3_kl_max=_largest(runs, "mismatch/k3_kl"),
        f_tau_2_max=_largest(runs, "mismatch/f_tau_2"),
        grad_norm=_mean_of_medians(runs, "train/grad_norm"),
        grad_norm_max=_largest(runs, "train/grad_norm"),
        entropy=float(np.mean([np.mean(run.values("train/entropy")[-NEWEST:]) for run in runs])),
        crossed=sum(row.get("guard/crossed", 0) > 0 for run in runs for row in run.rows),
    )


def replay_worth(replay: Replay, runs: Sequence[Run]) -> ReplayWorth | None:
    """What the runs with ``replay`` have over those without; None where fewer than two pairs differ in it alone."""
    without, replayed = (
        {(run.without, run.seed): run for run in runs if run.replay == kind} for kind in ("off", replay)
    )
    pairs = without.keys() & replayed.keys()
    if len(pairs) < 2:
        return None
    both = [{key: runs_of[key] for key in pairs} for runs_of in (without, replayed)]
    rates = [{key: _last(run) for key, run in each.items() if run.pass_at_1} for each in both]
    rewards = [{key: _reward(run) for key, run in each.items()} for each in both]
    fallen = [sum(run.collapsed is not None for run in each.values()) for each in both]
    return ReplayWorth(
        replay, len(pairs), (fallen[0], fallen[1]), paired_difference(*rates), paired_difference(*rewards)
    )


def _at_the_end(runs: Sequence[Run]) -> tuple[float, ...]:
    """Pass@1 of each run's last evaluation; of the runs that have one."""
    return tuple(_last(run) for run in runs if run.pass_at_1)


def _by_step(runs: Sequence[Run]) -> tuple[tuple[int, float], ...]:
    """The steps after which each run was evaluated, with their mean Pass@1."""
    steps = set[int].intersection(*(set(run.pass_at_1) for run in runs))
    return tuple((step, float(np.mean([run.pass_at_1[step] for run in runs]))) for step in sorted(steps))


def _last(run: Run) -> float:
    return run.pass_at_1[max(run.pass_at_1)]


def _reward(run: Run) -> float:
    return float(np.mean(run.values("reward/mean")[-NEWEST:]))


def _rewards(runs: Sequence[Run]) -> dict[int, float]:
    """By seed: it draws the tasks, which decide most of a step's reward."""
    return {run.seed: _reward(run) for run in runs}


def _mean_of_medians(runs: Sequence[Run], name: str) -> float:
    """A few steps decide a mean of heavy tails, so each run's median is taken."""
    return float(np.mean([np.median(run.values(name)) for run in runs]))


def _largest(runs: Sequence[Run], name: str) -> float:
    return max(max(run.values(name)) for run in runs)


def f_tau_at_the_end(runs: Sequence[Run]) -> NDArray[np.float64] | None:
    """F(tau) of the tokens sampled in the last :data:`NEWEST` steps of the runs; None where none was kept."""
    stems = [step_stem(run.directory, step) for run in runs for step in steps_on_disk(run.directory)[-NEWEST:]]
    found = [gaps for stem in stems if (gaps := read_gaps(stem)) is not None]
    gaps_T = np.concatenate([np.empty(0), *found])
    return f_tau_curve(gaps_T) if len(gaps_T) else None


def _drawn(run: Run) -> Rows:
    return [*run.rows, *({"step": step, PASS_AT_1: rate} for step, rate in sorted(run.pass_at_1.items()))]


def _cells(setting: Setting) -> dict[str, str]:
    """A row of the table, by the names of its columns."""
    return {
        "setting": setting.name,
        "seeds": ", ".join(map(str, setting.seeds)),
        "steps": str(setting.steps),
        "Pass@1 by step": ", ".join(f"{step}: {100 * rate:.1f}" for step, rate in setting.evaluations) or "-",
        "at the end": _percent(setting.pass_at_1),
        **_compared("Pass@1", setting.difference),
        f"reward of the last {NEWEST} steps": _percent(setting.rewards),
        **_compared("reward", setting.reward_difference),
        "collapsed": _collapses(setting),
        "k3-KL, median; max": f"{setting.k3_kl:.1e}; {setting.k3_kl_max:.1e}",
        "F(2), max": f"{setting.f_tau_2_max:.1e}",
        "gradient norm, median; max": f"{setting.grad_norm:.3g}; {setting.grad_norm_max:.3g}",
        "entropy at the end": f"{setting.entropy:.3f}",
        "steps beyond the guard's limits": str(setting.crossed),
    }


def _tables(rows: Sequence[Mapping[str, str]], width: int) -> Iterator[Table]:
    """The settings beside each other, a column each, in as many tables as a terminal of that width needs."""
    beside = max(1, width // COLUMN - 1)
    for start in range(0, len(rows), beside):
        some = rows[start : start + beside]
        table = Table("", *(Column(cell(row["setting"]), overflow="fold") for row in some))
        for name in list(some[0])[1:]:
            table.add_row(name, *(cell(row[name]) for row in some))
        yield table


def _percent(rates: Sequence[float]) -> str:
    """The mean, and each where there are several."""
    if not rates:
        return "-"
    each = f" ({', '.join(f'{100 * rate:.1f}' for rate in rates)})" if len(rates) > 1 else ""
    return f"{100 * float(np.mean(rates)):.1f}" + each


def _collapses(setting: Setting) -> str:
    steps = [str(step) for step in setting.collapsed if step is not None]
    return f"{len(steps)} of {len(setting.seeds)}" + (f", at step {', '.join(steps)}" if steps else "")


def _compared(what: str, difference: SeedDifference | None) -> dict[str, str]:
    if difference is None:
        return {f"{what}, to the first": "", f"{what}, would have been shown": ""}
    bounds = ", ".join(f"{100 * bound:+.1f}" for bound in difference.interval)
    return {
        f"{what}, to the first": f"{100 * difference.value:+.1f} [{bounds}]",
        f"{what}, would have been shown": f"{100 * difference.shown:.1f}",
    }


def _sentence(worth: ReplayWorth) -> str:
    text = f"{worth.replay.upper()} less no replay, in {worth.pairs} pairs of runs that differ in nothing else"
    for what, difference in (("Pass@1", worth.pass_at_1), ("reward", worth.reward)):
        if difference is not None:
            apart, shown = _compared(what, difference).values()
            text += f"; {what} {apart}, {shown} would have been shown"
    without, replayed = worth.collapsed
    return f"{text}; {replayed} collapsed with replay, {without} without."


def _markdown(rows: Sequence[Mapping[str, str]]) -> str:
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
