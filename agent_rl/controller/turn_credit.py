"""Advantages by turn (``train.turn_rewards``): each turn has a return, and its tokens the advantage of that return.

With the rewards r of a trajectory's T turns and the reward of its end added to the last one::

    R_t = r_t + gamma R_{t+1}           A_t = (R_t - baseline) / scale, over all turns of the group (or step)

GTPO (arXiv 2511.14846) takes normalized discounted returns of turns as advantages. As in TorchRL's MCAdvantage, the
turns of all trajectories of a group are normalized together. The baseline and the scale are those of the config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import TrainerError
from agent_rl.types import Trajectory


@dataclass(frozen=True, slots=True)
class Credit:
    """What a trajectory is rewarded for: itself, or each of its turns. ``returns`` and sampled ``tokens`` of each."""

    returns: Sequence[float]
    tokens: Sequence[int]

    @classmethod
    def by_turn(cls, trajectory: Trajectory, reward: float, gamma: float) -> Credit:
        """The credit of each turn; ``reward`` is that of the end. Raises TrainerError for sampled tokens of no turn."""
        earned = list(trajectory.turn_rewards) or [0.0] * max(1, len(trajectory.turns))
        earned[-1] += reward
        returns, value = list[float](), 0.0
        for own in reversed(earned):
            value = own + gamma * value
            returns.append(value)
        return cls(returns[::-1], _turn_tokens(trajectory))

    def mean(self, advantages: NDArray[np.float64]) -> float:
        """The mean over the trajectory's tokens."""
        weights = self.tokens if sum(self.tokens) else None
        return float(np.average(advantages, weights=weights))


def split(advantages: NDArray[np.float64], group: Sequence[Credit]) -> list[NDArray[np.float64]]:
    """The advantages of a group by trajectory."""
    ends = np.cumsum([len(credit.returns) for credit in group])[:-1]
    return np.split(advantages, ends) if group else []


def by_turn(trajectory: Trajectory, branch: int, advantages: NDArray[np.float64]) -> NDArray[np.float32]:
    """``[S]``: the advantage of the turn of each token of a branch; 0 for tokens of no turn."""
    turns = _turn_of_tokens(trajectory, branch)
    return np.where(turns >= 0, advantages[turns], 0.0).astype(np.float32)


def observations(trajectory: Trajectory, branch: int) -> NDArray[np.bool_]:
    """``[S]``: the observations of a branch: the tokens after its first trained one that no turn produced. So neither
    the prompt nor what the branch shares with an earlier one, nor turns that are left out of training."""
    after = np.cumsum(trajectory.branches[branch].loss_mask) > 0
    return after & (_turn_of_tokens(trajectory, branch) < 0)


def _turn_tokens(trajectory: Trajectory) -> list[int]:
    """Sampled tokens of each turn."""
    counts = np.zeros(max(1, len(trajectory.turns)), np.int64)
    for number, branch in enumerate(trajectory.branches):
        turns = _turn_of_tokens(trajectory, number)[1:][branch.loss_mask[1:]]
        if (turns < 0).any():
            raise TrainerError(f"{trajectory.task_id}: {(turns < 0).sum()} sampled tokens belong to no turn")
        counts += np.bincount(turns, minlength=len(counts))
    return counts.tolist()


def _turn_of_tokens(trajectory: Trajectory, branch: int) -> NDArray[np.int64]:
    """``[S]``: the turn that produced each token of a branch; -1 for other tokens."""
    turn_of = np.full(len(trajectory.branches[branch].tokens), -1)
    for number, turn in enumerate(trajectory.turns):
        if turn.branch == branch:
            start = turn.prompt_tokens
            turn_of[start : start + turn.completion_tokens + turn.inserted_tokens] = number
    return turn_of
