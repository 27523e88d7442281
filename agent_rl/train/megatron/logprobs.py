"""Log-probs and entropy of packed tokens, in chunks, so that the logits of a whole micro-batch never exist at once.

Axes: T tokens, H hidden, V this rank's share of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agent_rl.train.megatron.entropy import vocab_parallel_entropy

CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits of a chunk, 64 MiB of float32 on a CPU. More on a GPU, since each chunk reads and adds to a whole weight."""


def token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target under ``softmax(hidden @ weight.T / temperature)``, and the entropy, which is detached
    unless ``entropy_gradient``.

    The vocabulary may be cut over tensor ranks; every rank gets the same float32 ``[T]``. Chunks are recomputed in the
    backward pass where there is more than one.
    """
    rows = max(1, CHUNK_LOGITS[weight_VH.device.type] // len(weight_VH))
    chunks = zip(hidden_TH.split(rows), targets_T.split(rows), strict=True)
    recompute = len(targets_T) > rows and torch.is_grad_enabled()
    total: list[Tensor] = []
    weight = _Summed.apply(weight_VH, total) if recompute else weight_VH
    parts = []
    for hidden, targets in chunks:
        arguments = (hidden, weight, total if recompute else None, targets, temperature, entropy, entropy_gradient)
        parts.append(
            checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _chunk(*arguments)
        )
    logprobs = torch.cat([logprob for logprob, _ in parts])
    return logprobs, torch.cat([part for _, part in parts]) if entropy else None


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    total: list[Tensor] | None,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = (F.linear(hidden, weight) if total is None else _Linear.apply(hidden, weight, total)).float()
    if temperature != 1.0:
        logits = logits / temperature
    # The cross entropy overwrites its logits, so the entropy comes first.
    spread = vocab_parallel_entropy(logits, gradient=entropy_gradient) if entropy else logits.new_zeros(0)
    return -vocab_parallel_cross_entropy(logits[:, None, :], targets[:, None])[:, 0], spread


class _Summed(torch.autograd.Function):
    """The weight as it is; its gradient is the chunks' ``total``, which :class:`_Linear` adds up in float32.

    Autograd would add one chunk's to the other's in the weight's dtype: in bfloat16 the gradient of 65,536 tokens in
    600 chunks was 5 % off (relative norm). And every chunk would make a matrix as large as the weight.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)  # the chunks hand on none
        ctx.total, ctx.dtype = total, weight.dtype
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor, None]:
        return ctx.total.pop().to(ctx.dtype), None


class _Linear(torch.autograd.Function):
    """``hidden [T, H] @ weight [V, H].T``, the weight's gradient added to ``total`` (at most one tensor, float32)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, total: list[Tensor]) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.total = total
        return F.linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (hidden, weight), gradient, total = ctx.saved_tensors, gradients[0], ctx.total
        if not ctx.needs_input_grad[1]:  # frozen
            return gradient @ weight, None, None
        if not total:
            total.append(torch.zeros_like(weight, dtype=torch.float32))
        if gradient.dtype == torch.float32:
            total[0].addmm_(gradient.T, hidden)
        else:
            total[0] += gradient.T @ hidden
        return gradient @ weight, None, None
