"""Paired comparison of two evaluations of the same tasks.

Pass rates vary far more between tasks than between two policies on one task. The difference is therefore taken within
each task, and interval, test and required number of tasks are those of paired samples.

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
    """One task of an evaluation: the number of ``graded`` samples and of those that ``resolved`` it."""

    resolved: int
    graded: int


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two evaluations on the ``tasks`` that both graded. Shares, not percent.

    ``pass_at_1``: of the first and the second evaluation; ``difference``: second minus first, with its 95 %
    ``interval``. ``better_first`` and ``better_second``: the number of tasks with a higher pass rate in one of them;
    ``p_value``: of the exact sign test on these two counts. ``tasks_needed``: tasks for the target difference at 80 %
    power; ``detectable``: the difference with 80 % power at this number of tasks. Both assume per-task differences as
    large as in these two evaluations, and are None if no task differs or there are too few.
    """

    tasks: int
    pass_at_1: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    better_first: int
    better_second: int
    p_value: float
    tasks_needed: int | None
    detectable: float | None


def compare(first: Sequence[Score], second: Sequence[Score], *, target: float, seed: int) -> PairedComparison:
    """Compare scores of the same tasks in the same order, each with at least one graded sample.

    ``target``: the difference > 0 for ``tasks_needed``; ``seed``: of the bootstrap. Raises ValueError without tasks.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"nothing to pair: {len(first)} and {len(second)} tasks")
    rates = [np.array([score.resolved / score.graded for score in scores]) for scores in (first, second)]
    differences = rates[1] - rates[0]
    better = int((differences < 0).sum()), int((differences > 0).sum())
    square = float(np.mean(differences**2))
    return PairedComparison(
        tasks=len(first),
        pass_at_1=(float(rates[0].mean()), float(rates[1].mean())),
        difference=float(differences.mean()),
        interval=bootstrap_interval(differences, seed),
        better_first=better[0],
        better_second=better[1],
        p_value=sign_test(*better),
        tasks_needed=tasks_needed(square, target),
        detectable=detectable_difference(square, len(first)),
    )


def bootstrap_interval(differences_n: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """The 2.5 % and 97.5 % percentiles of the bootstrapped mean. ``differences_n``: ``[tasks]``."""
    generator, count = np.random.default_rng(seed), len(differences_n)
    draws = (generator.integers(count, size=(_CHUNK, count)) for _ in range(RESAMPLES // _CHUNK))
    means = np.concatenate([differences_n[drawn].mean(axis=1) for drawn in draws])
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def sign_test(fewer: int, more: int) -> float:
    """The exact two-sided p-value of a split at least this uneven under equal probabilities; 1 without tasks."""
    count = fewer + more
    tail = sum(math.comb(count, k) for k in range(min(fewer, more) + 1))
    return min(1.0, 2 * tail / 2**count)


def tasks_needed(square: float, difference: float) -> int | None:
    """The number of tasks for ``difference`` to be significant at 5 % with 80 % power. ``square`` is the mean squared
    difference of a task; None if it is 0."""
    if not square:
        return None
    spread = math.sqrt(max(0.0, square - difference**2))
    return math.ceil(((Z95 * math.sqrt(square) + Z80 * spread) / difference) ** 2)


def detectable_difference(square: float, tasks: int) -> float | None:
    """The difference for which :func:`tasks_needed` is ``tasks``; None for fewer than 4 tasks or ``square`` 0."""
    if not square or tasks < 4:
        return None
    root = Z95 * math.sqrt(tasks) + Z80 * math.sqrt(tasks - Z95**2 + Z80**2)
    return math.sqrt(square) * root / (tasks + Z80**2)


@dataclass(frozen=True, slots=True)
class ExcludedTasks:
    """Ids of tasks that a comparison excludes because one evaluation does not have them, or did not grade them."""

    missing: tuple[str, ...]
    ungraded: tuple[str, ...]


def common_tasks(evaluations: Sequence[Mapping[str, Score]]) -> tuple[list[str], list[ExcludedTasks]]:
    """The sorted ids of the tasks that all ``evaluations`` graded, and for each the tasks for which it is the cause of
    the exclusion."""
    every = sorted(set[str]().union(*evaluations))
    excluded = [
        ExcludedTasks(
            missing=tuple(task for task in every if task not in scores),
            ungraded=tuple(task for task in every if task in scores and not scores[task].graded),
        )
        for scores in evaluations
    ]
    return [task for task in every if all(task in scores and scores[task].graded for scores in evaluations)], excluded
