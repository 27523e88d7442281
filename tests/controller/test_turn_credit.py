"""Advantages by turn: against loops over floats, and what they are without rewards of turns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectories import with_turns

from agent_rl.config import RunConfig
from agent_rl.controller.advantages import build_samples
from agent_rl.train.batching.packing import pack
from agent_rl.types import Group, Trajectory

REWARD = st.floats(-2, 2, width=16)


def by_loops(members: list[Trajectory], gamma: float) -> list[list[float]]:
    """The advantage of every turn of every trajectory."""
    returns = []
    for member in members:
        earned = [*member.turn_rewards]
        earned[-1] += member.reward or 0.0
        of_turns = [
            sum(gamma ** (later - turn) * earned[later] for later in range(turn, len(earned)))
            for turn in range(len(earned))
        ]
        returns.append(of_turns)
    every = [value for of_turns in returns for value in of_turns]
    mean = sum(every) / len(every)
    std = math.sqrt(sum((value - mean) ** 2 for value in every) / len(every))
    return [[(value - mean) / (std + 1e-6) for value in of_turns] for of_turns in returns]


MEMBER = st.lists(st.tuples(st.integers(1, 4), REWARD), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(REWARD, MEMBER), min_size=2, max_size=4), gamma=st.sampled_from([0.0, 0.7, 1.0]))
def test_each_token_has_the_advantage_of_its_turn(
    shapes: list[tuple[float, list[tuple[int, float]]]], gamma: float
) -> None:
    members = [with_turns(reward, [n for n, _ in turns], [r for _, r in turns]) for reward, turns in shapes]
    made = build_samples([Group("t", tuple(members))], gamma=gamma)
    expected = by_loops(members, gamma)
    if made.zero_variance_groups:
        assert np.ptp([value for of_turns in expected for value in of_turns]) < 1e-2
        return
    assert made.turn_reward == pytest.approx(np.mean([r for _, turns in shapes for _, r in turns]), abs=1e-9)
    for index, (member, of_turns, sample) in enumerate(zip(members, expected, made.samples, strict=True)):
        batch = pack(made.samples, [index])
        at = 3
        for turn, value in zip(member.turns, of_turns, strict=True):
            found = batch.advantages_T[at : at + turn.completion_tokens]
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-4)
            assert batch.mask_T[at : at + turn.completion_tokens].all()
            at += turn.completion_tokens + 2
        tokens = np.array(sample.advantages)[np.array(sample.loss_mask)]
        assert made.decisions[index].advantage == pytest.approx(tokens.mean(), rel=1e-4, abs=1e-4)


def test_without_rewards_of_turns_the_tokens_have_the_advantage_of_the_trajectory() -> None:
    """Undiscounted, where all trajectories have as many turns. Groups of equal rewards have no effect."""
    members = [replace(with_turns(reward, [2, 3], [0.0, 0.0]), turn_rewards=()) for reward in (0.0, 1.0, 0.25)]
    groups = [Group("t", tuple(members)), Group("u", (members[1], members[1]))]
    by_turn, whole = build_samples(groups, gamma=1.0), build_samples(groups)
    assert (by_turn.zero_variance_groups, len(by_turn.samples)) == (1, 3)
    for one, other in zip(by_turn.samples, whole.samples, strict=True):
        np.testing.assert_allclose(np.array(one.advantages)[one.loss_mask], other.advantage, rtol=1e-5)


def test_equal_rewards_teach_where_turns_differ() -> None:
    members = (with_turns(1.0, [2, 2], [0.0, 1.0]), with_turns(1.0, [2, 2], [1.0, 0.0]))
    group = Group("t", members)
    assert not build_samples([group]).samples
    assert len(build_samples([group], gamma=1.0).samples) == 2


def test_what_conflicts_is_refused() -> None:
    data = {"name": "test", "model": ".", "train": {"turn_rewards": {"gamma": 0.9}}}
    RunConfig.model_validate(data)
    with pytest.raises(ValueError, match=r"dynamic_sampling conflicts with train\.turn_rewards"):
        RunConfig.model_validate({**data, "rollout": {"dynamic_sampling": {"enabled": True}}})
    with pytest.raises(ValueError, match=r"train\.turn_rewards conflicts with rollout\.harness"):
        RunConfig.model_validate({**data, "rollout": {"harness": {"command": "agent"}}})
