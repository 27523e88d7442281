"""ECHO: which tokens are observations, and their cross entropy in the loss against loops over floats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.trajectories import with_turns

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.controller.advantages import build_samples
from agent_rl.controller.turn_credit import observations
from agent_rl.types import Branch, BranchCause, Group

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.train.batching.packing import pack  # noqa: E402
from agent_rl.train.batching.partition import split_step  # noqa: E402
from agent_rl.train.loss.policy_loss import LossCounts, policy_loss  # noqa: E402
from agent_rl.train.step import _training_input, grpo_loss  # noqa: E402

ECHO = TrainConfig.model_validate({"echo": {"coefficient": 0.3}})


def test_observations_are_the_tokens_between_turns_and_after_them() -> None:
    made = with_turns(1.0, [2, 3], [])
    assert np.flatnonzero(observations(made, 0)).tolist() == [5, 6, 10, 11]
    # A turn that is left out of training is no observation, and neither is the prompt before the first trained one.
    left_out = replace(made, loss_mask=made.loss_mask & (np.arange(12) < 7))
    assert np.flatnonzero(observations(left_out, 0)).tolist() == [5, 6, 10, 11]
    second = replace(made, loss_mask=made.loss_mask & (np.arange(12) >= 7))
    assert np.flatnonzero(observations(second, 0)).tolist() == [10, 11]


def test_what_a_branch_shares_is_observed_once() -> None:
    made = with_turns(1.0, [2, 3], [])
    of_branch = replace(made.turns[1], branch=1)
    shared = Branch(
        made.tokens, made.loss_mask & (np.arange(12) >= 7), made.logprobs, None, made.versions, 0, 7,
        BranchCause.COMPACTION,
    )  # fmt: skip
    both = replace(
        made, loss_mask=made.loss_mask & (np.arange(12) < 7), turns=(made.turns[0], of_branch), further=(shared,)
    )
    assert np.flatnonzero(observations(both, 1)).tolist() == [10, 11]


def test_trajectories_of_equal_rewards_are_observed_too() -> None:
    group = Group("t", (with_turns(0.0, [2], []), with_turns(0.0, [1, 1], [])))
    made = build_samples([group], equal_rewards=True, observed=True)
    assert [int(sample.observed.sum()) for sample in made.samples if sample.observed is not None] == [2, 4]
    shares = split_step(made.samples, mini_steps=1, budget=64, ranks=2)
    assert [share.observed for (share,) in shares] == [6, 6], "over all ranks"


def test_the_loss_adds_the_cross_entropy_of_observations() -> None:
    """- coefficient / O * sum of log-probs, over micro-batches; other unsampled tokens stay without effect."""
    samples = build_samples(
        [Group("t", (with_turns(0.0, [2], []), with_turns(1.0, [1, 2], [])))], equal_rewards=True, observed=True
    ).samples
    ((share,),) = split_step(samples, mini_steps=1, budget=10, ranks=1)
    config = RunConfig.model_validate({"name": "t", "model": ".", "train": ECHO.model_dump()})
    plain = RunConfig.model_validate({"name": "t", "model": "."})
    draw, total, extra, expected = torch.Generator().manual_seed(0), 0.0, 0.0, 0.0
    assert len(share.micro_batches) == 2
    for ids in share.micro_batches:
        batch = pack(samples, ids)
        old = -torch.rand(batch.tokens, generator=draw, dtype=torch.float64)
        current = old.clone().requires_grad_()
        item = _training_input(batch, old, "recompute")
        item = replace(item, extras={**item.extras, "factors": torch.ones(batch.tokens, dtype=torch.float64)})
        loss, values = grpo_loss(config, share)(current, None, item)
        total += loss.item()
        extra += float(values["observation"])
        expected += grpo_loss(plain, share)(current, None, item)[0].item()
        (gradient,) = torch.autograd.grad(loss, current)
        assert batch.observed_T is not None
        for t in np.flatnonzero(batch.observed_T):
            expected -= 0.3 / share.observed * old[t].item()
            assert gradient[t].item() == pytest.approx(-0.3 / share.observed)
        assert not gradient[torch.from_numpy(~(batch.observed_T | batch.mask_T))].any()
    assert share.observed == 6
    assert total == pytest.approx(expected)
    assert extra > 0


def test_values_at_other_tokens_have_no_effect_and_no_observation_is_no_loss() -> None:
    ones, mask = torch.ones(4), torch.tensor([False, True, False, False])
    observed = torch.tensor([False, False, True, False])

    def loss(values: list[float], observed_T: torch.Tensor) -> float:
        result = policy_loss(
            torch.tensor(values), -ones, ones, 0 * ones, mask, torch.zeros(4, dtype=torch.int64), entropy_T=ones,
            weights_T=ones, train=ECHO, length=4, counts=LossCounts(1, 1, 1.0, int(observed_T.sum())),
            observed_T=observed_T,
        )  # fmt: skip
        return result.loss.item()

    assert loss([float("nan"), -1.0, -2.0, float("inf")], observed) == pytest.approx(0.6)
    assert loss([-1.0] * 4, mask & False) == 0.0


def test_what_conflicts_is_refused() -> None:
    data = {"name": "test", "model": ".", "train": {"echo": {}}}
    assert RunConfig.model_validate(data).train.learns_from_equal_rewards
    for rollout, reason in (
        ({"temperature": 0.7}, r"train\.echo requires rollout\.temperature 1"),
        ({"harness": {"command": "agent"}}, r"train\.echo conflicts with rollout\.harness"),
        ({"dynamic_sampling": {"enabled": True}}, r"dynamic_sampling conflicts with train\.echo"),
    ):
        with pytest.raises(ValueError, match=reason):
            RunConfig.model_validate({**data, "rollout": rollout})
