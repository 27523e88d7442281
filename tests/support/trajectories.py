"""Trajectories made by hand, for tests of what becomes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agent_rl.types import StopReason, Trajectory, Turn, VersionSpan


def trajectory(
    reward: float, sampled: int = 2, stop: StopReason = StopReason.SUBMITTED, task_id: str = "t"
) -> Trajectory:
    """Three tokens of prompt, then ``sampled`` ones of log-prob -1, by weights "0"."""
    length = 3 + sampled
    mask = np.arange(length) >= 3
    return Trajectory(
        task_id=task_id, env="e", tokens=np.arange(length, dtype=np.int32), loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32), routing=None, stop=stop, reward=reward,
        resolved=reward == 1.0, turns=(), messages=(), versions=(VersionSpan(3, length, "0"),),
    )  # fmt: skip


def with_turns(reward: float, sizes: list[int], rewards: list[float]) -> Trajectory:
    """A prompt of 3 tokens, then turns of ``sizes`` tokens, each followed by two tokens of observation."""
    mask, turns = [False] * 3, []
    for size in sizes:
        turns.append(Turn("", None, {}, None, "", len(mask), size, 2, 0, "0", 0.0, 0.0))
        mask += [True] * size + [False] * 2
    made, length = trajectory(reward), len(mask)
    arrays = {"tokens": np.arange(length, dtype=np.int32), "logprobs": np.zeros(length, np.float32)}
    return replace(made, **arrays, loss_mask=np.array(mask), turns=tuple(turns), turn_rewards=tuple(rewards))
