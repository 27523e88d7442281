"""Log-probs in chunks: gradients are summed in float32, and kept tokens against loops over floats.
test_megatron_model.py compares chunks with the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.train.megatron.logprobs import CHUNK_LOGITS
from r3.kept_tokens import KeptTokens

pytestmark = pytest.mark.megatron
TOKENS, HIDDEN, VOCAB = 4096, 16, 32


def weight_gradient(dtype: torch.dtype) -> Tensor:
    """The gradient of the output weight, where most tokens pull in one direction, as in training."""
    from agent_rl.train.megatron.logprobs import token_logprobs

    draw = torch.Generator().manual_seed(0)
    hidden = (torch.randn(TOKENS, HIDDEN, generator=draw) + 0.5).bfloat16().to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=draw) * 0.3).bfloat16().to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    logprobs, *_ = token_logprobs(hidden, weight, targets, temperature=0.8, entropy=False, entropy_gradient=False)
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    return gradient


def test_a_gradient_of_many_chunks_is_summed_in_float32(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 chunks in bfloat16 against float32. A sum in bfloat16 is wrong by some percent."""
    exact = weight_gradient(torch.float32)
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 8 * VOCAB)
    found = weight_gradient(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.parametrize("chunk", [3, 100])
def test_candidates_equal_loops_over_floats(world: Any, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    from agent_rl.train.megatron.logprobs import token_logprobs

    monkeypatch.setitem(CHUNK_LOGITS, "cpu", chunk * 9)
    draw = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(10, 4, generator=draw), torch.randn(9, 4, generator=draw).requires_grad_()
    targets = torch.randint(0, 9, (10,), generator=draw)
    ids = torch.stack([torch.randperm(9, generator=draw)[:3] for _ in range(10)]).int()
    slopes = torch.randn(10, 3, generator=draw)
    logprobs, _, found = token_logprobs(hidden, weight, targets, temperature=1.5, candidates_Tk=ids)
    assert found is not None
    (gradient,) = torch.autograd.grad(logprobs.sum() + (found * slopes).sum(), weight)
    expected, pulls = torch.zeros(10, 3), torch.zeros(10, 9)
    for t, row in enumerate((hidden.double() @ weight.detach().double().T / 1.5).tolist()):
        total = math.log(sum(math.exp(value) for value in row))
        for v, value in enumerate(row):
            pulls[t, v] = (v == int(targets[t])) - math.exp(value - total) * (1 + float(slopes[t].sum()))
        for j, v in enumerate(ids[t].tolist()):
            expected[t, j] = row[v] - total
            pulls[t, v] += slopes[t, j]
    torch.testing.assert_close(found.detach(), expected)
    torch.testing.assert_close(gradient, pulls.T @ hidden / 1.5, rtol=1e-4, atol=1e-5)


def masked_by_loops(row: list[float], target: int, kept: list[int]) -> tuple[float, float, list[float]]:
    """The log-prob of ``target`` over ``kept`` (empty: all), the entropy, and the gradient of their sum."""
    ids = kept or list(range(len(row)))
    total = math.log(sum(math.exp(row[v]) for v in ids))
    share = {v: math.exp(row[v] - total) for v in ids}
    entropy = -sum(p * math.log(p) for p in share.values())
    gradient = [0.0] * len(row)
    for v, p in share.items():
        gradient[v] = (v == target) - p - p * (math.log(p) + entropy)
    return row[target] - total, entropy, gradient


@pytest.mark.parametrize("chunk", [3, 100])
def test_kept_tokens_equal_loops_over_floats(world: Any, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Log-probs, entropy and gradient over the kept ids; rows without ids use the whole vocabulary."""
    from agent_rl.train.megatron.logprobs import token_logprobs

    monkeypatch.setitem(CHUNK_LOGITS, "cpu", chunk * 9)
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(10, 4, generator=draw)
    weight = torch.randn(9, 4, generator=draw).requires_grad_()
    kept = [[3, 1, 8], [], [0], [2, 4], list(range(9)), [], [7, 8], [5, 6, 0, 1], [8], []]
    targets = torch.tensor([1, 5, 0, 4, 3, 8, 7, 0, 8, 2])
    arguments = {"temperature": 1.5, "entropy": True, "entropy_gradient": True, "kept": KeptTokens.from_rows(kept)}
    logprobs, entropy, _ = token_logprobs(hidden, weight, targets, **arguments)
    (gradient,) = torch.autograd.grad((logprobs + entropy).sum(), weight)
    rows = (hidden.double() @ weight.detach().double().T / 1.5).tolist()
    expected = [masked_by_loops(*given) for given in zip(rows, targets.tolist(), kept, strict=True)]
    torch.testing.assert_close(logprobs.detach(), torch.tensor([e[0] for e in expected]))
    torch.testing.assert_close(entropy.detach(), torch.tensor([e[1] for e in expected]), rtol=1e-5, atol=1e-6)
    slopes = torch.tensor([e[2] for e in expected])
    torch.testing.assert_close(gradient, slopes.T @ hidden / 1.5, rtol=1e-4, atol=1e-5)
    assert logprobs[2] == entropy[2] == 0, "one id was kept"
