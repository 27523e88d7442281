"""The reverse KL to a teacher over k ids and the rest: against loops, finite differences and the whole KL."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.config import TrainConfig

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.train.loss.objectives import top_k_divergence  # noqa: E402
from agent_rl.train.loss.policy_loss import LossCounts, PolicyLoss, policy_loss  # noqa: E402


def distributions(seed: int, tokens: int = 6, vocabulary: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of a student and a teacher."""
    logits = np.random.default_rng(seed).normal(size=(2, tokens, vocabulary)) * 2
    student, teacher = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return student, teacher


def by_loops(student: np.ndarray, teacher: np.ndarray, ids: np.ndarray) -> list[float]:
    found = []
    for t, row in enumerate(ids):
        p, q = (np.exp(values[t][row]) for values in (student, teacher))
        inside = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        found.append(inside + (1 - sum(p)) * (math.log(1 - sum(p)) - math.log(1 - sum(q))))
    return found


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 11))
def test_divergence_equals_loops_and_bounds_the_whole_kl(seed: int, k: int) -> None:
    student, teacher = distributions(seed)
    ids = np.argsort(-teacher)[:, :k]
    rows = (torch.tensor(np.take_along_axis(values, ids, 1)) for values in (student, teacher))
    found = top_k_divergence(*rows).numpy()
    np.testing.assert_allclose(found, by_loops(student, teacher, ids), atol=1e-9)
    whole = (np.exp(student) * (student - teacher)).sum(1)
    assert (found <= whole + 1e-9).all()
    assert (found >= -1e-12).all()
    if k == 11:  # the rest is one token
        np.testing.assert_allclose(found, whole, atol=1e-9)


def test_equal_log_probs_have_no_divergence_and_no_gradient_also_of_a_whole_vocabulary() -> None:
    for k in (3, 12):
        rows = torch.tensor(distributions(0)[0][:, :k], dtype=torch.float32).requires_grad_()
        value = top_k_divergence(rows, rows.detach())
        assert value.tolist() == [0.0] * 6
        (gradient,) = torch.autograd.grad(value.sum(), rows)
        assert gradient.isfinite().all()


def test_ids_that_a_grammar_excludes_add_nothing() -> None:
    student, teacher = distributions(1)
    ids = np.argsort(-teacher)[:, :4]
    rows, of_teacher = (torch.tensor(np.take_along_axis(values, ids, 1)) for values in (student, teacher))
    rows[0, 1] = rows[1] = -torch.inf
    rest = [math.log(1 - of_teacher[row].exp().sum().item()) for row in (0, 1)]
    inside = [p * (math.log(p) - q) for p, q in zip(rows[0].exp().tolist(), of_teacher[0].tolist(), strict=True) if p]
    left = 1 - sum(rows[0].exp().tolist())
    value = top_k_divergence(rows.requires_grad_(), of_teacher)
    assert value[:2].tolist() == pytest.approx([sum(inside) + left * (math.log(left) - rest[0]), -rest[1]])
    (gradient,) = torch.autograd.grad(value.sum(), rows)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0
    assert not gradient[1].any()


def test_the_loss_adds_the_divergence_of_sampled_tokens() -> None:
    """L = the objective's loss + coefficient * mean of the divergences; its gradient by finite differences."""
    student, teacher = distributions(3)
    ids = np.argsort(-teacher)[:, :4]
    own, theirs = (torch.tensor(np.take_along_axis(values, ids, 1)) for values in (student, teacher))
    mask = torch.tensor([False, True, True, False, True, True])
    hidden = theirs.clone()
    hidden[~mask] = math.nan
    train = TrainConfig.model_validate({"distill": {"teacher": "t", "coefficient": 0.7, "top_k": 4}})
    ones = torch.ones(6, dtype=torch.float64)

    def result(values: torch.Tensor) -> PolicyLoss:
        return policy_loss(
            -ones, -ones, ones, 0 * ones, mask, torch.zeros(6, dtype=torch.int64), entropy_T=ones, weights_T=ones,
            train=train, length=6, counts=LossCounts(4, 1, 4.0), top_Tk=(values, hidden),
        )  # fmt: skip

    expected = sum(np.array(by_loops(student, teacher, ids))[mask.numpy()])
    assert result(own).distill.item() == pytest.approx(expected)
    assert result(own).loss.item() == pytest.approx(0.7 * expected / 4)
    leaf = own.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(result(leaf).loss, leaf)
    assert not gradient[~mask].any()
    for t, j in ((1, 0), (4, 3)):
        step = torch.zeros_like(own)
        step[t, j] = 1e-6
        slope = (result(own + step).loss - result(own - step).loss) / 2e-6
        assert gradient[t, j].item() == pytest.approx(slope.item(), rel=1e-5)
