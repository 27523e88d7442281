"""Engines, a log and checks for episodes of several branches (``rollout.compaction``, ``rollout.subagents``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_rl.rollout.episode_recovery import LoggedTurn, decode_turn, encode_turn
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.types import Completion, Trajectory
from support import memory_env


@dataclass
class ListLog:
    turns: list[LoggedTurn] = field(default_factory=list)

    async def kept(self) -> Sequence[LoggedTurn]:
        return tuple(self.turns)

    async def keep(self, turn: LoggedTurn) -> None:
        self.turns.append(decode_turn(encode_turn(turn), "a test"))

    async def start_over(self) -> None:
        raise AssertionError("a replayed turn differs")


@dataclass
class Recording:
    """An engine that keeps what ``inner`` sampled, and how many rows of routes it sent."""

    inner: Any
    sampled: list[int] = field(default_factory=list)
    rows: int = 0

    async def generate(self, tokens: Any, sampling: Any, **options: Any) -> Completion:
        completion: Completion = await self.inner.generate(tokens, sampling, **options)
        self.sampled += completion.tokens
        self.rows += 0 if completion.routing is None else completion.routing.tokens
        return completion


@dataclass
class Replaying:
    """An engine that returns ``completions`` one after another."""

    completions: list[Completion]

    async def generate(self, *request: Any, **options: Any) -> Completion:
        return self.completions.pop(0)


def check_branch(trajectory: Trajectory, branch: Any) -> None:
    """Its log-probs and routes are those of its own positions, and it begins as its parent does."""
    tokens, mask, size = branch.tokens, branch.loss_mask, len(branch.tokens)
    positions = np.where(mask, -0.001 * (np.arange(size) + 1), 0).astype(np.float32)
    assert np.array_equal(branch.logprobs, positions)
    assert branch.routing.present.tolist() == [True] * (size - 1) + [False]
    assert branch.routing.experts[:-1].tolist() == [
        memory_env.row_of(position, int(token)) for position, token in enumerate(tokens[:-1])
    ]
    if branch.parent is not None:
        parent = trajectory.branches[branch.parent]
        assert branch.tokens[: branch.shared].tolist() == parent.tokens[: branch.shared].tolist()
        assert not mask[: branch.shared].any()


def text(branch: Any) -> str:
    return ByteRenderer().decode(branch.tokens.tolist())


def trained(trajectory: Trajectory) -> list[int]:
    return [token for branch in trajectory.branches for token in branch.tokens[branch.loss_mask].tolist()]
