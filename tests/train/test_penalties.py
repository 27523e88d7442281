"""KL penalties: the gradient of each estimator in the loss and in the reward, the penalized advantages, their
normalization."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.train.loss.objectives import (  # noqa: E402
    advantage_moments,
    kl_estimate,
    penalized_advantages,
)
from agent_rl.train.loss.objectives import normalized_advantages as normalized  # noqa: E402

LENGTHS = (7, 1, 12, 5)


def draw(lengths: tuple[int, ...] | list[int] = LENGTHS, seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    total = sum(lengths)
    return {
        "advantages": torch.tensor(np.repeat(generator.normal(size=len(lengths)), lengths)),
        "kl": torch.tensor(generator.normal(size=total)),
        "mask": torch.tensor(generator.random(total) < 0.7),
        "sequence": torch.tensor(np.repeat(np.arange(len(lengths)), lengths)),
    }


def penalized(data: dict[str, Any], beta: float = 0.3) -> Any:
    return penalized_advantages(data["advantages"], data["kl"], data["mask"], data["sequence"], beta)


def test_a_tokens_penalty_is_the_sum_of_the_kl_from_it_to_the_end() -> None:
    data = draw()
    found = penalized(data)
    for t in range(sum(LENGTHS)):
        rest = data["mask"] & (data["sequence"] == data["sequence"][t]) & (torch.arange(sum(LENGTHS)) >= t)
        to_come = data["kl"][rest].sum().item()
        assert found[t].item() == pytest.approx(data["advantages"][t].item() - 0.3 * to_come, rel=1e-12)
    assert torch.equal(penalized(data, beta=0.0), data["advantages"])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_penalties_do_not_depend_on_the_packing(lengths: list[int], seed: int, random: Any) -> None:
    """Nor on the values at tokens that were not sampled."""
    data = draw(lengths, seed)
    whole = penalized(data)
    data["kl"][~data["mask"]] = torch.nan
    order = list(range(len(lengths)))
    random.shuffle(order)
    rows = [torch.nonzero(data["sequence"] == sequence)[:, 0] for sequence in order]
    shuffled = {name: values[torch.cat(rows)] for name, values in data.items()}
    shuffled["sequence"] = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(r) for r in rows]))
    torch.testing.assert_close(penalized(shuffled), whole[torch.cat(rows)], rtol=1e-12, atol=1e-12)


def test_penalties_of_a_long_sequence_are_precise_in_float32() -> None:
    """65,536 tokens packed behind others: the last token's penalty is its own KL alone."""
    kl = torch.rand(3 * 65_536, generator=torch.Generator().manual_seed(0))
    mask, sequence = torch.ones_like(kl, dtype=torch.bool), torch.arange(3).repeat_interleave(65_536)
    found = penalized_advantages(torch.zeros_like(kl), kl, mask, sequence, 1.0)
    torch.testing.assert_close(found[65_535::65_536], -kl[65_535::65_536], rtol=1e-6, atol=0)


@pytest.mark.parametrize("huge", [2e17, -2e17, math.inf, math.nan])
def test_a_huge_kl_of_a_neighbour_changes_no_penalty(huge: float) -> None:
    kl, sequence = torch.tensor([huge, 0.4, 0.6, huge], dtype=torch.float64), torch.tensor([0, 1, 1, 2])
    found = penalized_advantages(torch.ones_like(kl), kl, torch.ones_like(kl, dtype=torch.bool), sequence, 0.5)
    assert found[1:3].tolist() == pytest.approx([0.5, 0.7])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**31))
def test_advantages_are_normalized_over_all_sampled_tokens(lengths: list[int], seed: int) -> None:
    """By moments that are summed up by sequence, as those of micro-batches and ranks are."""
    data = draw(lengths, seed)
    values = penalized(data)
    groups = [data["sequence"] == sequence for sequence in range(len(lengths))]
    parts = [advantage_moments(values[own], data["mask"][own]) for own in groups]
    found = normalized(values, torch.stack(parts).sum(0)).numpy()
    sampled = values[data["mask"]].numpy()
    if len(sampled):
        np.testing.assert_allclose(found, (values.numpy() - sampled.mean()) / (sampled.std() + 1e-6), rtol=1e-6)


def expected_slope(weights: Any, logits: Any, terms: Any) -> Any:
    """The gradient in the logits of ``sum weights * terms``; the ``weights`` (chances of outcomes) are constants."""
    (slope,) = torch.autograd.grad((weights.detach() * terms).sum(), logits, retain_graph=True)
    return slope


def test_gradient_of_each_estimator_in_the_loss_and_in_the_reward() -> None:
    """The exact expectation over all outcomes of one choice, as docs/reference/objectives.md states it."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)

    def own() -> Any:
        return logits.log_softmax(-1)

    p = own().exp()
    (reverse,) = torch.autograd.grad((own().exp() * (own() - reference)).sum(), logits)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - own())).sum(), logits)
    estimates = {k: kl_estimate(k, own(), reference) for k in ("k1", "k2", "k3")}
    in_loss = {k: expected_slope(p, logits, estimate) for k, estimate in estimates.items()}
    in_reward = {k: expected_slope(p, logits, estimate.detach() * own()) for k, estimate in estimates.items()}
    close = {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(in_loss["k1"], torch.zeros_like(reverse), **close)
    torch.testing.assert_close(in_loss["k2"], reverse, **close)
    torch.testing.assert_close(in_loss["k3"], forward, **close)
    torch.testing.assert_close(in_reward["k1"], reverse, **close)
    torch.testing.assert_close(in_reward["k3"], reverse - forward, **close)
    (squares,) = torch.autograd.grad((own().exp() * (own() - reference).square() / 2).sum(), logits)
    torch.testing.assert_close(in_reward["k2"], squares - reverse, **close)
