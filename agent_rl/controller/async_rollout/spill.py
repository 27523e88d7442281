"""Trajectories whose arrays and texts lie in the journal until their batch is taken: so memory holds one batch of them,
however far sampling runs ahead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from agent_rl.rollout.group import EpisodeRunner
from agent_rl.types import Group, Trajectory
from envs import Task


def spill(run: EpisodeRunner) -> EpisodeRunner:
    """``run``, whose trajectories are journaled, giving them :func:`strip` as they end: a group may wait long for its
    last one."""

    async def shelved(task: Task) -> Trajectory:
        trajectory = await run(task)
        return trajectory if trajectory.stop.infrastructure else strip(trajectory)

    return shelved


def restore(group: Group, journaled: Iterable[Trajectory]) -> Group:
    """A group of :func:`strip` trajectories with all that was ``journaled`` of each, in the order of the group."""
    pairs = zip(group.trajectories, journaled, strict=True)
    return replace(group, trajectories=tuple(_restored(each, whole) for each, whole in pairs))


def strip(trajectory: Trajectory) -> Trajectory:
    """What is asked of a trajectory until its batch is taken: its ending, its reward, and what no journal has. Of its
    tokens there is one, where any was sampled."""
    tokens = min(1, trajectory.sampled_tokens)
    return replace(
        trajectory, tokens=np.zeros(tokens, np.int32), loss_mask=np.ones(tokens, np.bool_),
        logprobs=np.zeros(tokens, np.float32), routing=None, turns=(), messages=(), versions=(), patch="", tests={},
        test_log="", further=(),
    )  # fmt: skip


def _restored(strip: Trajectory, whole: Trajectory) -> Trajectory:
    return replace(
        whole, queue_seconds=strip.queue_seconds, recovered=strip.recovered, replayed_turns=strip.replayed_turns,
        audit=strip.audit,
    )  # fmt: skip
