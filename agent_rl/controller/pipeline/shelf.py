"""Trajectories whose arrays and texts lie in the journal until their batch is taken: so memory holds one batch of them,
however far sampling runs ahead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np

from agent_rl.rollout.group import EpisodeRunner
from agent_rl.types import Group, Trajectory
from envs import Task


@dataclass(frozen=True, slots=True, eq=False)
class Shelved:
    """A group of :func:`bare` trajectories; ``keys`` tell which of those journaled each one is."""

    group: Group
    keys: tuple[bytes, ...]

    def filled(self, journaled: Iterable[Trajectory]) -> Group:
        """The group with its trajectories as they were ``journaled``."""
        by_key = {_key(trajectory): trajectory for trajectory in journaled}
        members = [_dressed(each, by_key[key]) for each, key in zip(self.group.trajectories, self.keys, strict=True)]
        return replace(self.group, trajectories=tuple(members))


@dataclass(slots=True)
class Shelf:
    """Makes the trajectories of one group bare as they end: a group may wait long for its last one."""

    keys: list[bytes] = field(default_factory=list)

    def runner(self, run: EpisodeRunner) -> EpisodeRunner:
        """``run``, whose trajectories are journaled, giving them :func:`bare`. Whoever runs them puts each into its
        group without waiting for anything else: the ``keys`` have the order of the group."""

        async def shelving(task: Task) -> Trajectory:
            trajectory = await run(task)
            if trajectory.stop.infrastructure:
                return trajectory
            self.keys.append(_key(trajectory))
            return bare(trajectory)

        return shelving

    def of(self, group: Group) -> Shelved:
        """``group``, which was formed of what :meth:`runner` gave."""
        return Shelved(group, tuple(self.keys))


def bare(trajectory: Trajectory) -> Trajectory:
    """What is asked of a trajectory until its batch is taken: its ending, its reward, and what no journal has. Of its
    tokens there is one, where any was sampled."""
    tokens = min(1, trajectory.sampled_tokens)
    return replace(
        trajectory, tokens=np.zeros(tokens, np.int32), loss_mask=np.ones(tokens, np.bool_),
        logprobs=np.zeros(tokens, np.float32), routing=None, turns=(), messages=(), versions=(), patch="", tests={},
        test_log="", further=(),
    )  # fmt: skip


def _key(trajectory: Trajectory) -> bytes:
    """No two samplings agree in all tokens and log-probs; of two that do, either's arrays are right."""
    digest = sha256()
    for branch in trajectory.branches:
        digest.update(branch.tokens.tobytes() + branch.logprobs.tobytes())
    return digest.digest()


def _dressed(bare: Trajectory, whole: Trajectory) -> Trajectory:
    return replace(
        whole, queue_seconds=bare.queue_seconds, recovered=bare.recovered, replayed_turns=bare.replayed_turns,
        audit=bare.audit,
    )  # fmt: skip
