"""Selects the trajectories and groups that a step learns from, and reports how the selection shifts their lengths.

================ ================================================================= =================================
filter           what it removes                                                   source
================ ================================================================= =================================
dynamic sampling groups whose rewards are all equal; other tasks are drawn instead DAPO, arXiv 2503.14476, section 3.2
overlong         from the loss: trajectories truncated at the context limit        DAPO, section 3.4
compact          from the loss: also those that hit the turn or time limit         DeepSWE, rLLM 2025
================ ================================================================= =================================

A trajectory removed from the loss still counts in its group's advantages. Infrastructure failures never get here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from agent_rl.config import FilterKind
from agent_rl.types import Group, StopReason, Trajectory

_MASKED: Mapping[FilterKind, frozenset[StopReason]] = {
    "none": frozenset(),
    "overlong": frozenset({StopReason.CONTEXT_FULL}),
    "compact": frozenset({StopReason.CONTEXT_FULL, StopReason.MAX_TURNS, StopReason.TIME_LIMIT}),
}
_REPORT_STEPS = 5
_REPORT_DEVIATIONS = 3.0


def masked_stops(kind: FilterKind) -> frozenset[StopReason]:
    """The stop reasons that a filter removes from the loss."""
    return _MASKED[kind]


def has_contrast(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the rewards differ. With equal rewards every advantage is 0."""
    return len({trajectory.reward for trajectory in trajectories}) > 1


def teaches(group: Group, masked: Collection[StopReason] = ()) -> bool:
    """Whether the group contributes to the loss: its rewards differ, and at least one trajectory is trained on."""
    return has_contrast(group.trajectories) and any(_trained(trajectory, masked) for trajectory in group.trajectories)


def filter_metrics(
    kept: Sequence[Group], discarded: Sequence[Group], masked: Collection[StopReason] = ()
) -> dict[str, float]:
    """``filter/*`` of one step; lengths are in sampled tokens.

    ``length_ratio``: mean length of the trained trajectories divided by the mean of all sampled ones; 1 if nothing is
    trained on. ``discarded`` are whole groups. Of ``kept`` groups, those with equal rewards and trajectories with a
    ``masked`` stop reason are not trained on either.
    """
    everything = [t for group in (*kept, *discarded) for t in group.trajectories]
    trained = [t for g in kept if has_contrast(g.trajectories) for t in g.trajectories if _trained(t, masked)]
    dropped = [t for group in discarded for t in group.trajectories]
    masks = [t for group in kept for t in group.trajectories if t.stop in masked]
    lengths = _lengths(everything)
    ratio = _lengths(trained).mean() / lengths.mean() if trained and lengths.any() else 1.0
    return {
        "filter/groups_drawn": float(len(kept) + len(discarded)),
        "filter/groups_discarded": float(len(discarded)),
        "filter/discarded_solved": float(sum(all(t.resolved for t in group.trajectories) for group in discarded)),
        "filter/discarded_unsolved": float(sum(not any(t.resolved for t in group.trajectories) for group in discarded)),
        "filter/masked_trajectories": float(len(masks)),
        "filter/masked_token_fraction": float(_lengths(masks).sum() / max(1, lengths.sum())),
        "filter/length_ratio": float(ratio),
        **_distribution("filter/trained_tokens", trained),
        **_distribution("filter/discarded_tokens", dropped),
    }


def length_report(ratios: Sequence[float]) -> str | None:
    """A line if filtering biases lengths: the mean logarithm of the steps' ``filter/length_ratio`` is more than 3
    standard errors from 0. None otherwise, and for fewer than 5 steps."""
    logs = [math.log(ratio) for ratio in ratios if ratio > 0]
    if len(logs) < _REPORT_STEPS:
        return None
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    if abs(mean) <= _REPORT_DEVIATIONS * error or round(mean, 2) == 0:
        return None
    low, high = (math.exp(mean + sign * _REPORT_DEVIATIONS * error) for sign in (-1, 1))
    return (
        f"filters bias lengths: over {len(logs)} steps trained trajectories are {math.exp(mean):.2f} times as long as "
        f"sampled ones [{low:.2f}, {high:.2f}]; see filter/trained_tokens_* and filter/discarded_tokens_*"
    )


def _trained(trajectory: Trajectory, masked: Collection[StopReason]) -> bool:
    return trajectory.stop not in masked and trajectory.sampled_tokens > 0


def _lengths(trajectories: Sequence[Trajectory]) -> np.ndarray:
    return np.array([trajectory.sampled_tokens for trajectory in trajectories], np.float64)


def _distribution(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    if not trajectories:
        return {}
    lengths = _lengths(trajectories)
    p10, p50, p90 = np.percentile(lengths, (10, 50, 90))
    values = {"mean": lengths.mean(), "p10": p10, "p50": p50, "p90": p90, "max": lengths.max()}
    return {f"{name}_{key}": float(value) for key, value in values.items()}
