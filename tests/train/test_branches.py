"""A trajectory of several branches counts once: one advantage, one sequence of the loss, one mini step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support import trajectories

from agent_rl.controller.advantages import build_samples
from agent_rl.rollout.filters import filter_metrics
from agent_rl.rollout.rescore import rescore_metrics
from agent_rl.train.batching.partition import group_by_trajectory, split_step
from agent_rl.types import Branch, BranchCause, Group, Rescored, Trajectory


def branched(reward: float, sampled: int, *more: int) -> Trajectory:
    """A trajectory with the numbers of sampled tokens of its branches."""
    first, *rest = (trajectories.trajectory(reward, count) for count in (sampled, *more))
    further = (Branch(t.tokens, t.loss_mask, t.logprobs, None, t.versions, 0, 3, BranchCause.REWRITE) for t in rest)
    return replace(first, further=tuple(further))


def test_the_branches_of_a_trajectory_share_its_advantage_and_weigh_as_their_tokens() -> None:
    group = Group("t", (branched(1.0, 2, 6), branched(0.0, 4)))
    first, second, alone = build_samples([group]).samples
    assert first.advantage == second.advantage == -alone.advantage
    assert (first.weight, second.weight, alone.weight) == (0.25, 0.75, 1.0)
    assert (first.trajectory, second.trajectory, alone.trajectory) == (0, 0, None)
    # A token's part of the mean over sequences of each one's mean: 1 / tokens of its trajectory, in whatever branch.
    assert first.weight / 2 == second.weight / 6 == 1 / 8
    assert {sample.weight for sample in build_samples([group], aggregation="token").samples} == {1.0}


def test_a_task_weighs_the_same_however_many_tokens_its_samples_have() -> None:
    groups = [Group("t", (branched(1.0, 2, 6), branched(0.0, 4))), Group("u", (branched(1.0, 3), branched(0.0, 1)))]
    samples = build_samples(groups, aggregation="prompt").samples
    assert [sample.weight for sample in samples] == pytest.approx([1 / 12] * 3 + [1 / 4] * 2)
    (((share,),),) = (split_step(samples, mini_steps=1, budget=64, ranks=1),)
    assert share.weight == pytest.approx(2), "the number of tasks"


def test_a_branch_without_trained_tokens_is_no_sample() -> None:
    without = branched(1.0, 2, 3)
    (context,) = without.further
    without = replace(without, further=(replace(context, loss_mask=np.zeros(6, np.bool_)),))
    samples = build_samples([Group("t", (without, branched(0.0, 2)))]).samples
    assert [(sample.trajectory, sample.weight) for sample in samples] == [(None, 1.0)] * 2


def test_branches_of_a_trajectory_are_one_sequence_of_one_mini_step() -> None:
    groups = [Group("t", (branched(1.0, 2, 2, 2), branched(0.0, 2), branched(1.0, 2, 2), branched(0.0, 2)))]
    samples = build_samples(groups).samples
    assert group_by_trajectory(samples) == [[0, 1, 2], [3], [4, 5], [6]]
    shares = split_step(samples, mini_steps=2, budget=64, ranks=1)
    members = [sorted(i for micro in share.micro_batches for i in micro) for share in shares[0]]
    assert members == [[0, 1, 2, 3], [4, 5, 6]]
    assert [(share.sequences, share.sampled_tokens) for share in shares[0]] == [(2, 8), (2, 6)]


def test_rescored_values_are_split_by_branch() -> None:
    values = np.arange(5, dtype=np.float32)[None] - 10
    rescored = replace(branched(1.0, 2, 3), rescored=Rescored(values))
    plain = replace(branched(0.0, 1), rescored=Rescored(np.zeros((1, 1), np.float32)))
    first, second, _ = build_samples([Group("t", (rescored, plain))]).samples
    np.testing.assert_array_equal(first.old_logprobs, [0, 0, 0, -10, -9])
    np.testing.assert_array_equal(second.old_logprobs, [0, 0, 0, -8, -7, -6])
    assert rescore_metrics([rescored])["old_logprob/rollout_abs_diff"] == pytest.approx(7.0)


def test_the_length_of_a_trajectory_sums_its_branches() -> None:
    trajectory = branched(1.0, 2, 6)
    assert (trajectory.sampled_tokens, trajectory.total_tokens) == (8, 14)
    values = filter_metrics([Group("t", (trajectory, branched(0.0, 4)))], [])
    assert values["filter/trained_tokens_max"] == 8
