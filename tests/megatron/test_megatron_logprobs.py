"""Log-probs in chunks: the same as in one, and gradients that chunks do not wear down."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.train.megatron.logprobs import CHUNK_LOGITS

pytestmark = pytest.mark.megatron
TOKENS, HIDDEN, VOCAB = 4096, 16, 32


def gradients(dtype: torch.dtype, *, entropy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and the gradients of hidden states and weight; most tokens pull in one direction, as in training."""
    from agent_rl.train.megatron.logprobs import token_logprobs

    draw = torch.Generator().manual_seed(0)
    hidden = (torch.randn(TOKENS, HIDDEN, generator=draw) + 0.5).bfloat16().to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, generator=draw) * 0.3).bfloat16().to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    logprobs, spread = token_logprobs(
        hidden, weight, targets, temperature=0.8, entropy=entropy, entropy_gradient=entropy
    )  # fmt: skip
    (logprobs.sum() + (spread.sum() if spread is not None else 0)).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return logprobs.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("entropy", [False, True])
def test_chunks_equal_the_whole(world: Any, monkeypatch: pytest.MonkeyPatch, entropy: bool) -> None:
    whole = gradients(torch.float32, entropy=entropy)
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 100 * VOCAB)  # the last one is shorter
    for mine, theirs in zip(gradients(torch.float32, entropy=entropy), whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_a_gradient_of_many_chunks_is_summed_in_float32(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 chunks in bfloat16, against float32: summed in bfloat16 the error is some percent."""
    exact = gradients(torch.float32)[2]
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 8 * VOCAB)
    found = gradients(torch.bfloat16)[2]
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).norm() < 4e-3 * exact.norm()
