"""Single properties of objectives and corrections. test_policy_loss.py compares all of them with formulas."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError

from agent_rl.config import (
    Clip,
    CorrectionConfig,
    CorrectionMask,
    CorrectionWeight,
    KlConfig,
    KlEstimator,
    RunConfig,
    TrainConfig,
)
from agent_rl.config.objectives import OBJECTIVES, Aggregation, ObjectiveSpec

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.train.batching.packing import pack  # noqa: E402
from agent_rl.train.batching.partition import MiniStepShare  # noqa: E402
from agent_rl.train.loss import objectives as losses  # noqa: E402
from agent_rl.train.loss.corrections import RATIOS, correction_factors, weight_moments  # noqa: E402
from agent_rl.train.loss.objectives import Terms, Tokens, kl_penalty, objective_terms  # noqa: E402
from agent_rl.train.loss.policy_loss import LossCounts, policy_loss, weighted_cross_entropy  # noqa: E402
from agent_rl.train.step import _sampled_tokens, _training_input, grpo_loss  # noqa: E402
from agent_rl.types import Sample, TokenFlag  # noqa: E402
from sandbox import registry as plugins  # noqa: E402

LENGTHS = (7, 1, 12, 5, 4)


@pytest.fixture(autouse=True)
def double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(seed: int = 0) -> dict[str, Any]:
    """Sequences of LENGTHS, each with one advantage; the fifth has no sampled token."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    old = -torch.rand(total, generator=generator) * 3
    mask = (torch.rand(total, generator=generator) < 0.7) & (sequence < len(LENGTHS) - 1)
    advantages = torch.randn(len(LENGTHS), generator=generator)[sequence]
    new = old + torch.randn(total, generator=generator) * 0.5
    return {"new": new, "old": old, "advantages": advantages, "mask": mask, "sequence": sequence}


def summed(objective: str, data: dict[str, Any], new: Any, clip: Clip) -> Any:
    terms = objective_terms(objective, new, data["old"], data["advantages"], data["mask"], data["sequence"], clip)
    return (terms.loss_T * data["mask"]).sum()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 1.0, -1.28, True),  # above the upper bound with a positive advantage
        (1.5, -1.0, 1.5, False),
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.25, 1.0, -1.25, False),  # the upper bound is 1.28, not 1.2
        (0.78, -1.0, 0.8, True),
    ],
)
def test_grpo_clips_ratios_that_moved_with_the_advantage(
    ratio: float, advantage: float, loss: float, clipped: bool
) -> None:
    zero_T, first_T = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    new_T, advantage_T = torch.tensor([math.log(ratio)]), torch.tensor([advantage])
    terms = objective_terms("grpo", new_T, zero_T, advantage_T, first_T == 0, first_T, Clip(0.2, 0.28))
    assert (terms.loss_T.item(), bool(terms.clipped_T)) == (pytest.approx(loss), clipped)


def test_token_level_gspo_has_the_gradient_of_gspo() -> None:
    """Per sequence: gspo's own loss is |i| * -min(s A, clip(s) A), summed over tokens; both have one gradient."""
    data, clip = draw(), Clip(3e-4, 4e-4)
    new = data["new"].clone().requires_grad_()
    (of_tokens,) = torch.autograd.grad(summed("gspo", data, new, clip), new)
    plain = torch.zeros(())
    for sequence in range(len(LENGTHS) - 1):
        own = data["mask"] & (data["sequence"] == sequence)
        s, a = (new[own] - data["old"][own]).mean().exp(), data["advantages"][own][0]
        plain = plain - own.sum() * torch.minimum(s * a, s.clamp(1 - clip.low, 1 + clip.high) * a)
    (of_sequences,) = torch.autograd.grad(plain, new)
    torch.testing.assert_close(of_tokens, of_sequences, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("objective", OBJECTIVES.built_in)
def test_a_dropped_token_has_no_gradient_even_if_its_ratio_overflows(objective: str, advantage: float) -> None:
    """The rollout's probability of the first token was exp(-101), the trainer's is nearly 1."""
    new = torch.tensor([-1e-6, -1.0], dtype=torch.float32).requires_grad_()
    old, ones = torch.tensor([-101.0, -1.0], dtype=torch.float32), torch.ones(2, dtype=torch.float32)
    mask, sequence = torch.tensor([True, True]), torch.tensor([0, 1])
    factors = correction_factors(CorrectionConfig(mask="token"), new.detach() - old, mask, sequence)
    assert factors.tolist() == [0, 1]
    rest = {"train": TrainConfig(objective=objective), "length": 1, "counts": LossCounts(2, 2, 2.0), "weights_T": ones}
    result = policy_loss(new, old, factors, advantage * ones, mask, sequence, entropy_T=0 * ones, **rest)
    first, second = torch.autograd.grad(result.loss, new)[0].tolist()
    assert (math.isfinite(result.loss.item()), first, second != 0) == (True, 0, True)


@pytest.mark.parametrize(
    ("reference", "k3_limit", "slope"),
    [(1.0, 10.0, 1 - math.e), (12.0, 10.0, 0.0), (12.0, None, 1 - math.exp(12)), (100.0, None, 0.0)],
)
def test_one_tokens_k3_is_bounded(reference: float, k3_limit: float | None, slope: float) -> None:
    """ref - logp = 12: its gradient would outweigh a batch of 100,000 tokens."""
    own = torch.tensor([0.0, -1.0], requires_grad=True)
    kl_penalty(KlConfig(coefficient=0.04, k3_limit=k3_limit), own, torch.tensor([reference, -1.0])).sum().backward()
    assert own.grad is not None
    assert own.grad.tolist() == pytest.approx([slope, 0.0])


def test_a_long_sequences_product_does_not_overflow() -> None:
    log_ratio, mask = torch.full((20_000,), 0.5), torch.ones(20_000, dtype=torch.bool)
    sequence = torch.zeros(20_000, dtype=torch.int64)
    for bounds in (CorrectionConfig(weight="sequence", weight_high=None), CorrectionConfig(mask="sequence")):
        assert torch.isfinite(correction_factors(bounds, log_ratio, mask, sequence)).all()


@pytest.mark.parametrize("weight", get_args(CorrectionWeight))
def test_normalized_weights_have_mean_one_over_sampled_tokens(weight: CorrectionWeight) -> None:
    """Moments of micro-batches and ranks add up. The mean includes the tokens that the mask drops afterwards."""
    data, bounds = draw(), CorrectionConfig(weight=weight, normalize=True)
    ratio, mask, sequence = data["new"] - data["old"], data["mask"], data["sequence"]
    parts = [weight_moments(bounds, *(v[part] for v in (ratio, mask, sequence))) for part in (slice(8), slice(8, 29))]
    count, total = torch.stack(parts).sum(0).tolist()
    assert count == int(mask.sum())
    factors = correction_factors(bounds, ratio, mask, sequence, mean=total / count)
    assert float(factors[mask].mean()) == pytest.approx(1.0, rel=1e-12)
    masked = bounds.model_copy(update={"mask": "token", "mask_low": 0.8, "mask_high": 1.25})
    kept = correction_factors(masked, ratio, mask, sequence, mean=total / count)
    assert torch.equal(kept, torch.where((kept != 0), factors, torch.zeros(())))
    assert (kept == 0).any()


def test_the_configs_choices_are_what_the_losses_register() -> None:
    assert set(get_args(Aggregation)) == losses.AGGREGATIONS.keys()
    assert {*get_args(CorrectionWeight), *get_args(CorrectionMask)} == RATIOS.keys()
    assert set(get_args(KlEstimator)) == losses.KL_ESTIMATORS.keys()


HALVED = ObjectiveSpec("tests_halved:halved", clip=(0.1, 0.1))
"""An objective as another package would bring it."""


def halved(tokens: Tokens, clip: Clip) -> Terms:
    whole = losses.grpo(tokens, clip)
    return Terms(whole.loss_T / 2, whole.clipped_T, whole.ratio_T)


def test_an_objective_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tests_halved", sys.modules[__name__])
    point = EntryPoint("halved", "tests_halved:HALVED", "agent_rl.objectives")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    data, clip = draw(), TrainConfig(objective="halved").clip
    assert clip == Clip(0.1, 0.1)
    for name in ("halved", "tests_halved:HALVED"):
        assert summed(name, data, data["new"], clip) == summed("grpo", data, data["new"], clip) / 2
    with pytest.raises(ValidationError, match=r"train\.dual_clip: objective halved"):
        TrainConfig(objective="halved", dual_clip=3.0)
    with pytest.raises(ValidationError, match=r"train\.objective: objective 'tests_halved:LENGTHS' is a tuple"):
        TrainConfig(objective="tests_halved:LENGTHS")


def test_cross_entropy_weighs_tokens_and_divides_by_the_batchs_weight() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    loss = weighted_cross_entropy(logprobs, torch.tensor([1.0, 0.2, 0.0]), batch_weight=1.2)
    loss.backward()
    assert loss.item() == pytest.approx((1.0 + 0.4) / 1.2)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 1.2, -0.2 / 1.2, 0.0])


def test_tokens_that_off_policy_masking_leaves_out_are_flagged_as_masked() -> None:
    """The second sequence has a negative advantage and has moved away: in this update its tokens are masked."""
    correction = {"opsm": 0.1}
    config = RunConfig.model_validate({"name": "t", "model": ".", "train": {"correction": correction}})
    logprobs = np.full(4, -1.0, np.float32)
    mask = np.array([False, True, True, True])
    samples = [Sample(np.arange(4, dtype=np.int32), mask, logprobs, advantage, None) for advantage in (-1.0, 1.0)]
    batch, current = pack(samples, [0, 1]), torch.full((8,), -2.0)
    inputs = _training_input(batch, torch.full((8,), -1.0), "recompute")
    inputs = replace(inputs, extras={**inputs.extras, "factors": torch.ones(8)})
    _, values = grpo_loss(config, MiniStepShare((), 6, 2, 6.0), detail=True)(current, None, inputs)
    flags = _sampled_tokens([inputs], [values]).flags
    assert [bool(flag & TokenFlag.MASKED) for flag in flags.tolist()] == [True] * 3 + [False] * 3
