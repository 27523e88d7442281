"""Runs of one setting against runs of another: what their seeds say of the difference. Pure functions; numpy only.

A run is one sample here, however many tasks it was evaluated on: another seed draws other episodes, and so makes other
weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

_DRAWS = 400_000
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class SeedDifference:
    """``value``: the second setting's mean less the first's, with its 95 % ``interval`` (Student's t). ``shown``: the
    difference that as many runs of this spread show in 4 of 5 comparisons."""

    value: float
    interval: tuple[float, float]
    shown: float


def seed_difference(first: Sequence[float], second: Sequence[float]) -> SeedDifference | None:
    """What the runs ``second`` have over the runs ``first``, a figure a run, of one spread; None unless both are two or
    more."""
    if min(len(first), len(second)) < 2:
        return None
    freedom = len(first) + len(second) - 2
    spread = (np.var(first) * len(first) + np.var(second) * len(second)) / freedom
    error = float(np.sqrt(spread * (1 / len(first) + 1 / len(second))))
    return _difference(float(np.mean(second) - np.mean(first)), error, freedom)


def paired_difference(first: Mapping[Key, float], second: Mapping[Key, float]) -> SeedDifference | None:
    """The same by the differences of runs with one key, such as their seed, for a figure that follows what the key
    stands for; None unless both have two keys or more in common."""
    apart = [second[key] - value for key, value in first.items() if key in second]
    if len(apart) < 2:
        return None
    return _difference(float(np.mean(apart)), float(np.std(apart, ddof=1) / np.sqrt(len(apart))), len(apart) - 1)


def _difference(value: float, error: float, freedom: int) -> SeedDifference:
    # numpy has no quantiles of Student's t: those of many draws are right to a hundredth.
    beyond, power = map(float, np.quantile(np.random.default_rng(0).standard_t(freedom, _DRAWS), (0.975, 0.8)))
    return SeedDifference(value, (value - beyond * error, value + beyond * error), (beyond + power) * error)
