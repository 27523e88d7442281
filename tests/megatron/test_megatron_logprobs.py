"""Log-probs in chunks: gradients are summed in float32. test_megatron_model.py compares chunks with the whole."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from torch import Tensor

from agent_rl.train.megatron.logprobs import CHUNK_LOGITS

pytestmark = pytest.mark.megatron
TOKENS, HIDDEN, VOCAB = 4096, 16, 32


def weight_gradient(dtype: torch.dtype) -> Tensor:
    """The gradient of the output weight, where most tokens pull in one direction, as in training."""
    from agent_rl.train.megatron.logprobs import token_logprobs

    draw = torch.Generator().manual_seed(0)
    hidden = (torch.randn(TOKENS, HIDDEN, generator=draw) + 0.5).bfloat16().to(dtype)
    weight = (torch.randn(VOCAB, HIDDEN, generator=draw) * 0.3).bfloat16().to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=draw)
    logprobs, _ = token_logprobs(hidden, weight, targets, temperature=0.8, entropy=False, entropy_gradient=False)
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    return gradient


def test_a_gradient_of_many_chunks_is_summed_in_float32(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 chunks in bfloat16 against float32. A sum in bfloat16 is wrong by some percent."""
    exact = weight_gradient(torch.float32)
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 8 * VOCAB)
    found = weight_gradient(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert (found.float() - exact).norm() < 4e-3 * exact.norm()
