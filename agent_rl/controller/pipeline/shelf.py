"""Ended groups whose arrays lie in the journal until their batch is taken: so memory holds one batch of arrays, however
far sampling runs ahead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from agent_rl.types import Group, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Shelved:
    """A group without its arrays; ``keys`` tell of each trajectory which arrays are its own."""

    group: Group
    keys: tuple[bytes, ...]

    @classmethod
    def of(cls, group: Group) -> Shelved:
        members = tuple(map(_bare, group.trajectories))
        return cls(replace(group, trajectories=members), tuple(map(_key, group.trajectories)))

    def filled(self, journaled: Iterable[Trajectory]) -> Group:
        """The group with the arrays of its trajectories as they were ``journaled``."""
        by_key = {_key(trajectory): trajectory for trajectory in journaled}
        members = [_dressed(bare, by_key[key]) for bare, key in zip(self.group.trajectories, self.keys, strict=True)]
        return replace(self.group, trajectories=tuple(members))


def _key(trajectory: Trajectory) -> bytes:
    """No two samplings agree in all tokens and log-probs; of two that do, either's arrays are right."""
    digest = sha256()
    for branch in trajectory.branches:
        digest.update(branch.tokens.tobytes() + branch.logprobs.tobytes())
    return digest.digest()


def _bare(trajectory: Trajectory) -> Trajectory:
    return replace(
        trajectory, tokens=np.zeros(0, np.int32), loss_mask=np.zeros(0, np.bool_), logprobs=np.zeros(0, np.float32),
        routing=None, further=(),
    )  # fmt: skip


def _dressed(bare: Trajectory, whole: Trajectory) -> Trajectory:
    return replace(
        bare, tokens=whole.tokens, loss_mask=whole.loss_mask, logprobs=whole.logprobs, routing=whole.routing,
        further=whole.further,
    )  # fmt: skip
