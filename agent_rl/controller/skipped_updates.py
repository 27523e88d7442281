"""Steps that changed no weights, and why: a run of nothing else learns nothing, however busy it looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def why_idle(row: Mapping[str, float]) -> str | None:
    """Why the step with the metrics ``row`` changed no weights, or None where it did."""
    if row.get("train/updates"):
        return None
    if row.get("train/skipped_updates"):
        return "the guard left the update out"
    if not row.get("rollout/trajectories"):
        return "every group was lost to the infrastructure"
    if row.get("reward/groups_uniform") == 1.0:
        return _uniform(row["reward/mean"])
    return "no trajectory was left to train on (see filter/* and r3/dropped_samples)"


def idle_steps(rows: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """How many steps changed no weights, by reason, the commonest first."""
    return dict(Counter(reason for row in rows if (reason := why_idle(row)) is not None).most_common())


def _uniform(reward: float) -> str:
    equal = "the rewards within every group are equal"
    if reward == 0.0:
        return f"{equal}, all 0: the tasks are too hard for the model, or their grading is broken"
    return f"{equal}, all 1: the tasks are too easy for the model" if reward == 1.0 else equal
