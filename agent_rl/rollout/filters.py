"""Which trajectories and groups a step learns from, and what leaving out the others does to their lengths.

================ ============================================================ =================================
filter           what is left out                                             source
================ ============================================================ =================================
dynamic sampling groups whose rewards are all equal; others are drawn instead DAPO, arXiv 2503.14476, section 3.2
overlong         from the loss, trajectories cut at the end of the context    the same, section 3.4
compact          from the loss, also those out of turns or out of time        DeepSWE, rLLM 2025
================ ============================================================ =================================

A trajectory left out of the loss still counts for its group's advantages. Infrastructure failures never get here.
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
    """The endings that a filter leaves out of the loss."""
    return _MASKED[kind]


def contrasting(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the rewards differ: some solved and some not, where rewards are 0 and 1. Without that no trajectory has
    an advantage over another."""
    return len({trajectory.reward for trajectory in trajectories}) > 1


def teaches(group: Group, masked: Collection[StopReason] = ()) -> bool:
    """Whether a loss over the group has any term: its rewards differ, and not all its trajectories are left out."""
    return contrasting(group.trajectories) and any(_trained(trajectory, masked) for trajectory in group.trajectories)


def filter_metrics(
    kept: Sequence[Group], discarded: Sequence[Group], masked: Collection[StopReason] = ()
) -> dict[str, float]:
    """``filter/*`` of one step; lengths are in sampled tokens.

    ``length_ratio``: mean length of the trajectories trained on over that of all that were sampled, 1 where the filters
    don't care for length (or nothing is trained on). ``discarded`` are whole groups; of ``kept`` ones the ``masked``
    endings, and groups without contrast, are not trained on either.
    """
    everything = [t for group in (*kept, *discarded) for t in group.trajectories]
    trained = [
        t for group in kept if contrasting(group.trajectories) for t in group.trajectories if _trained(t, masked)
    ]
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
    """A line where filtering biases lengths: the steps' ``filter/length_ratio`` have a mean logarithm that is more than
    three standard errors from 0; None where it has not, or there are too few steps to tell."""
    logs = [math.log(ratio) for ratio in ratios if ratio > 0]
    if len(logs) < _REPORT_STEPS:
        return None
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    if abs(mean) <= _REPORT_DEVIATIONS * error or round(mean, 2) == 0:
        return None
    low, high = (math.exp(mean + sign * _REPORT_DEVIATIONS * error) for sign in (-1, 1))
    return (
        f"filters bias lengths: over {len(logs)} steps what is trained on is {math.exp(mean):.2f} times as long as "
        f"what was sampled [{low:.2f}, {high:.2f}]; see filter/trained_tokens_* and filter/discarded_tokens_*"
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
