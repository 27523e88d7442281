"""The losses against plain float64 arithmetic, their gradients against finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.config import Clip, CorrectionConfig, KlConfig, TrainConfig  # noqa: E402
from agent_rl.config.objectives import OBJECTIVES  # noqa: E402
from agent_rl.train.loss.corrections import correction_factors  # noqa: E402
from agent_rl.train.loss.objectives import kl_penalty, objective_terms  # noqa: E402
from agent_rl.train.loss.policy_loss import LossCounts, policy_loss, weighted_cross_entropy  # noqa: E402

CLIP = Clip(0.2, 0.28)
UNCORRECTED = CorrectionConfig()
BOUNDS = {"grpo": {"eps_low": CLIP.low, "eps_high": CLIP.high}}


def reference(
    new: list[float], old: list[float], advantage: list[float], mask: list[int], weight: list[float]
) -> float:
    """Token-mean clipped surrogate, one token after another."""
    total = 0.0
    for n, o, a, m, w in zip(new, old, advantage, mask, weight, strict=True):
        ratio = math.exp(n - o)
        total += m * w * -min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
    return total / sum(mask)


def draw(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    return {
        "old": old,
        "new": old + torch.randn(count, generator=generator, dtype=torch.float64) * 0.4,
        "log_ratio": torch.randn(count, generator=generator, dtype=torch.float64) * 0.3,
        "advantages": torch.randn(count, generator=generator, dtype=torch.float64),
        "mask": torch.rand(count, generator=generator) < 0.7,
        "weights": torch.rand(count, generator=generator, dtype=torch.float64) + 0.5,
        "entropy": torch.rand(count, generator=generator, dtype=torch.float64),
    }


def loss_of(
    data: dict[str, torch.Tensor],
    new: torch.Tensor,
    batch_tokens: int | None = None,
    part: slice = slice(None),
    correction: CorrectionConfig = UNCORRECTED,
    objective: str = "grpo",
):
    mask, sequence = data["mask"][part], torch.zeros(len(new[part]), dtype=torch.int64)
    return policy_loss(
        new[part],
        data["old"][part],
        correction_factors(correction, data["log_ratio"][part], mask, sequence),
        data["advantages"][part],
        mask,
        sequence,
        entropy_T=data["entropy"][part],
        weights_T=data["weights"][part],
        train=TrainConfig(
            objective=objective, entropy_coefficient=0.1 * (objective != "grpo"), **BOUNDS.get(objective, {})
        ),
        length=1,
        counts=LossCounts(batch_tokens or int(data["mask"].sum()), 1),
    )


def test_loss_equals_the_reference() -> None:
    data = draw(200)
    expected = reference(*(data[name].tolist() for name in ("new", "old", "advantages", "mask", "weights")))
    assert loss_of(data, data["new"]).loss.item() == pytest.approx(expected, rel=1e-12)


def test_gradient_by_finite_differences() -> None:
    data = draw(40, seed=3)
    new = data["new"].clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda values: loss_of(data, values).loss, (new,), eps=1e-7, atol=1e-6)


def test_parts_add_up_to_the_whole() -> None:
    """Micro-batches of unequal size, each divided by the global count, give the loss and gradient of the whole."""
    data, count = draw(100, seed=1), 100
    whole = data["new"].clone().requires_grad_(True)
    loss_of(data, whole).loss.backward()
    parts = data["new"].clone().requires_grad_(True)
    tokens = int(data["mask"].sum())
    pieces = [loss_of(data, parts, tokens, piece) for piece in (slice(0, 7), slice(7, 60), slice(60, count))]
    sum(piece.loss for piece in pieces).backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-15)
    assert float(sum(p.clipped for p in pieces)) == float(loss_of(data, whole).clipped) > 0


def test_masked_tokens_take_part_in_nothing() -> None:
    data = draw(50, seed=2)
    spoiled = {**data, "old": torch.where(data["mask"], data["old"], torch.tensor(-math.inf, dtype=torch.float64))}
    new = data["new"].clone().requires_grad_(True)
    loss = loss_of(spoiled, new)
    loss.loss.backward()
    assert loss.loss.item() == loss_of(data, data["new"]).loss.item()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()
    assert (new.grad[~data["mask"]] == 0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.5, 1.0, -1.28, True),  # above the upper bound and good: no further
        (1.5, -1.0, 1.5, False),  # above and bad: pushed back in full
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),
        (1.25, 1.0, -1.25, False),  # the upper bound is the higher one
        (0.78, -1.0, 0.8, True),
    ],
)
def test_clip_higher_case_by_case(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    ratio_T, advantage_T = torch.tensor([ratio], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    zero_T, first_T = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    terms = objective_terms("grpo", ratio_T.log(), zero_T, advantage_T, first_T == 0, first_T, CLIP)
    assert terms.loss_T.item() == pytest.approx(loss)
    assert bool(terms.clipped_T) is clipped


def test_clipped_tokens_have_no_gradient_and_others_do() -> None:
    data = draw(300, seed=5)
    new = data["new"].clone().requires_grad_(True)
    loss_of(data, new).loss.backward()
    ratio, good = (data["new"] - data["old"]).exp(), data["advantages"] > 0
    clipped = torch.where(good, ratio > 1.28, ratio < 0.8)
    assert new.grad is not None
    assert (new.grad[clipped] == 0).all()
    assert (new.grad[~clipped & data["mask"]] != 0).all()


def test_a_correction_scales_the_terms_and_is_reported() -> None:
    data = draw(200, seed=4)
    weight = data["log_ratio"].exp().clamp(max=1.1)
    corrected = loss_of(data, data["new"], correction=CorrectionConfig(weight="token", weight_high=1.1))
    by_hand = {**data, "weights": data["weights"] * weight}
    assert corrected.loss.item() == pytest.approx(loss_of(by_hand, data["new"]).loss.item(), rel=1e-12)
    assert corrected.correction.item() == pytest.approx(float(weight[data["mask"]].sum()))
    assert corrected.dropped.item() == 0
    masked = loss_of(data, data["new"], correction=CorrectionConfig(mask="token", mask_low=0.8, mask_high=1.2))
    ratio = data["log_ratio"].exp()[data["mask"]]
    assert masked.dropped.item() == float(((ratio < 0.8) | (ratio > 1.2)).sum()) > 0


def gradient_of(objective: str, new: float, old: float, advantage: float, factor: float, **train: Any) -> float:
    """Of the loss of two tokens in float32, the second of which is ordinary, in the first's
    log-prob."""
    logprobs = torch.tensor([new, -1.0], requires_grad=True)
    result = policy_loss(
        logprobs,
        torch.tensor([old, -1.0]),
        torch.tensor([factor, 1.0]),
        torch.tensor([advantage, 1.0]),
        torch.tensor([True, True]),
        torch.tensor([0, 1]),
        entropy_T=torch.zeros(2),
        weights_T=torch.ones(2),
        train=TrainConfig(objective=objective, **train),
        length=1,
        counts=LossCounts(2, 2),
    )
    result.loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(result.loss)
    assert float(logprobs.grad[1]) != 0.0, "the other token learns"
    return float(logprobs.grad[0])


@pytest.mark.parametrize("objective", OBJECTIVES.built_in)
def test_what_a_correction_leaves_out_has_no_gradient_however_far_off_it_is(objective: str) -> None:
    """The rollout gave exp(-101) to what the trainer is sure of: a ratio that float32 does not hold."""
    bounds = CorrectionConfig(mask="token")
    log_ratio, mask, sequence = torch.tensor([101.0]), torch.tensor([True]), torch.tensor([0])
    factor = correction_factors(bounds, log_ratio, mask, sequence)
    assert factor.item() == 0.0
    for advantage in (1.0, -1.0):
        assert gradient_of(objective, -1e-6, -101.0, advantage, factor.item()) == 0.0


@pytest.mark.parametrize("objective", OBJECTIVES.built_in)
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_an_extreme_ratio_gives_a_gradient_that_is_a_number(objective: str, log_ratio: float) -> None:
    for advantage in (1.0, -1.0):
        assert math.isfinite(gradient_of(objective, log_ratio, 0.0, advantage, 1.0))
    if objective == "grpo":
        assert gradient_of(objective, log_ratio, 0.0, -1.0, 1.0, dual_clip=3.0) == 0.0


@pytest.mark.parametrize(
    ("reference", "k3_limit", "slope"),
    [(1.0, 10.0, 1 - math.e), (12.0, 10.0, 0.0), (12.0, None, 1 - math.exp(12)), (100.0, None, 0.0)],
)
def test_one_tokens_k3_is_bounded(reference: float, k3_limit: float | None, slope: float) -> None:
    """ref - logp = 12: its gradient would outweigh a batch of 100,000 tokens."""
    own = torch.tensor([0.0, -1.0], dtype=torch.float64, requires_grad=True)
    kl = KlConfig(coefficient=0.04, k3_limit=k3_limit)
    kl_penalty(kl, own, torch.tensor([reference, -1.0], dtype=torch.float64)).sum().backward()
    assert own.grad is not None
    assert own.grad.tolist() == pytest.approx([slope, 0.0])


def test_masked_importance_sampling_weighs_what_it_keeps() -> None:
    """Seq-MIS by hand: products 1.2 (kept, and weighed), 0.3 and 4 (out of bounds); Geo-RS + TIS beside it."""
    log_ratio = torch.tensor([1.5, 0.8, 0.6, 0.5, 2.0, 2.0], dtype=torch.float64).log()
    mask, sequence = torch.ones(6, dtype=torch.bool), torch.tensor([0, 0, 1, 1, 2, 2])
    both = CorrectionConfig(weight="sequence", mask="sequence")
    assert correction_factors(both, log_ratio, mask, sequence).tolist() == pytest.approx([1.2, 1.2, 0, 0, 0, 0])
    geometric = CorrectionConfig(weight="token", weight_low=0.9, mask="geometric", mask_low=0.6, mask_high=1.9)
    assert correction_factors(geometric, log_ratio, mask, sequence).tolist() == pytest.approx([1.5, 0.9, 0, 0, 0, 0])


def test_masked_infinities_change_nothing() -> None:
    """CISPO beside a masked log-prob of -inf, and a masked entropy that is no number."""
    data = draw(50, seed=6)
    where = ~data["mask"]
    spoiled = {**data, "entropy": data["entropy"].masked_fill(where, math.nan)}
    for objective in OBJECTIVES.built_in:
        results = []
        for values, junk in ((data, data["new"]), (spoiled, data["new"].masked_fill(where, -math.inf))):
            new = junk.clone().requires_grad_(True)
            loss = loss_of(values, new, objective=objective).loss
            loss.backward()
            results.append((loss.item(), new.grad))
        assert results[0][0] == results[1][0]
        assert torch.equal(results[0][1], results[1][1])


def test_weighted_cross_entropy() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 0.2, 0.0])
    loss = weighted_cross_entropy(logprobs, weights, batch_weight=1.2)
    loss.backward()
    assert loss.item() == pytest.approx((1.0 + 0.4) / 1.2)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1 / 1.2, -0.2 / 1.2, 0.0])
