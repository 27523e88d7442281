"""Two evaluations of the same tasks, compared task by task. Pure functions; numpy only.

Tasks differ from each other far more than two policies do on one of them. So the difference is taken within each task,
and its interval, its test and the number of tasks that a difference needs are those of paired samples.

============= ==============================================================================================
interval      95 % of the mean difference: percentiles of a bootstrap over *tasks* (samples of one task are not
              independent), Efron 1979
test          the exact sign test over tasks that differ; with one sample a task it is McNemar's exact test (1947)
tasks needed  for a paired difference at 5 % (two-sided) and 80 % power: Connor 1987, with the mean square of the
              tasks' differences for the share of discordant pairs, which it is with one sample a task
============= ==============================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_rl.evaluation.report import Z95

Z80 = 0.8416212335729143
"""The 80 % quantile of the normal distribution."""
RESAMPLES = 10_000
_CHUNK = 100


@dataclass(frozen=True, slots=True)
class Score:
    """One task in an evaluation: how many of its ``graded`` samples ``resolved`` it."""

    resolved: int
    graded: int


@dataclass(frozen=True, slots=True)
class Paired:
    """What two evaluations say about the ``tasks`` that both graded. Shares, not percent.

    ``pass_at_1``: of the first and the second on those tasks; ``difference``: the second less the first, with its 95 %
    ``interval``. ``better_first`` and ``better_second``: tasks that one resolved in a greater share of its samples;
    ``p_value``: of so uneven a split by chance. ``tasks_needed``: for a difference as asked to be shown in 4 of 5
    comparisons; ``shown``: the difference that this many tasks show so often. Both suppose that the evaluations differ
    on single tasks as much as these two do, and are None where these never differ (or are too few).
    """

    tasks: int
    pass_at_1: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    better_first: int
    better_second: int
    p_value: float
    tasks_needed: int | None
    shown: float | None


def compare(first: Sequence[Score], second: Sequence[Score], *, wanted: float, seed: int) -> Paired:
    """Compare scores of the same tasks, in the same order, each of at least one graded sample. ``wanted``: the
    difference that ``tasks_needed`` is for, above 0; ``seed``: of the bootstrap. Raises ValueError without tasks."""
    if not first or len(first) != len(second):
        raise ValueError(f"nothing to pair: {len(first)} and {len(second)} tasks")
    rates = [np.array([score.resolved / score.graded for score in scores]) for scores in (first, second)]
    differences = rates[1] - rates[0]
    better = int((differences < 0).sum()), int((differences > 0).sum())
    square = float(np.mean(differences**2))
    return Paired(
        tasks=len(first),
        pass_at_1=(float(rates[0].mean()), float(rates[1].mean())),
        difference=float(differences.mean()),
        interval=bootstrap_interval(differences, seed),
        better_first=better[0],
        better_second=better[1],
        p_value=sign_test(*better),
        tasks_needed=tasks_needed(square, wanted),
        shown=shown_by(square, len(first)),
    )


def bootstrap_interval(differences_n: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """The 2.5 % and 97.5 % percentiles of the mean of as many differences, drawn with putting back."""
    generator, count = np.random.default_rng(seed), len(differences_n)
    draws = (generator.integers(count, size=(_CHUNK, count)) for _ in range(RESAMPLES // _CHUNK))
    means = np.concatenate([differences_n[drawn].mean(axis=1) for drawn in draws])
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def sign_test(fewer: int, more: int) -> float:
    """How likely a split at least as uneven is where either side is as likely: exact, two-sided; 1 for no task."""
    count, ways, tail = fewer + more, 1, 0
    for k in range(min(fewer, more) + 1):
        tail += ways
        ways = ways * (count - k) // (k + 1)
    return min(1.0, 2 * tail / 2**count)


def tasks_needed(square: float, difference: float) -> int | None:
    """Tasks for ``difference`` to be significant at 5 % in 80 % of all comparisons; ``square`` is the mean square of a
    task's difference. None where it is 0."""
    if not square:
        return None
    spread = math.sqrt(max(0.0, square - difference**2))
    return math.ceil(((Z95 * math.sqrt(square) + Z80 * spread) / difference) ** 2)


def shown_by(square: float, tasks: int) -> float | None:
    """The difference for which :func:`tasks_needed` is ``tasks``; None for fewer than 4, or where none can be told."""
    if not square or tasks < 4:
        return None
    root = Z95 * math.sqrt(tasks) + Z80 * math.sqrt(tasks - Z95**2 + Z80**2)
    return math.sqrt(square) * root / (tasks + Z80**2)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Ids of tasks that are not compared: those that one evaluation lacks, and those that it could not grade."""

    missing_first: tuple[str, ...]
    missing_second: tuple[str, ...]
    ungraded_first: tuple[str, ...]
    ungraded_second: tuple[str, ...]


def pair(first: Mapping[str, Score], second: Mapping[str, Score]) -> tuple[list[str], LeftOut]:
    """The ids of the tasks that both graded, sorted, and those that are left out. A task that both could not grade is
    named for both."""
    common = sorted(first.keys() & second.keys())
    return [task for task in common if first[task].graded and second[task].graded], LeftOut(
        missing_first=tuple(sorted(second.keys() - first.keys())),
        missing_second=tuple(sorted(first.keys() - second.keys())),
        ungraded_first=tuple(task for task in common if not first[task].graded),
        ungraded_second=tuple(task for task in common if not second[task].graded),
    )
