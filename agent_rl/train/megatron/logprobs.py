"""Log-probs and entropy of packed tokens. Logits are computed in chunks, never for a full micro-batch at once.

Axes: T tokens, H hidden, V this tensor rank's part of the vocabulary. With z the logits, p their softmax and log Z the
log-partition, the entropy and its gradient are::

    H = -sum_v p_v log p_v = log Z - sum_v p_v z_v            dH / dz_v = -p_v (log p_v + H)

The forward pass reduces two sums and a maximum over the tensor ranks; the backward pass reduces nothing. Where sampling
excluded a part of the vocabulary, the logits of all other than the kept tokens are -inf: p is 0 there, and so are the
terms of H and the gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from r3.kept_tokens import KeptTokens

CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Logits per chunk: 64 MiB of float32 on a CPU, 256 MiB on a GPU, because every chunk reads the full weight."""


def token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = False,
    kept: KeptTokens | None = None,
    candidates_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-prob of each target under ``softmax(hidden @ weight.T / temperature)`` and the entropy, float32 ``[T]`` each,
    and the log-probs ``[T, k]`` of the ids ``candidates_Tk`` in its place (None without them).

    ``kept``: the softmax of target i is over the ids of row i, or over the whole vocabulary if the row is empty. The
    entropy is None without ``entropy``, and detached without ``entropy_gradient``. The vocabulary may be sharded over
    tensor ranks; every rank returns the same values. More than one chunk is recomputed in the backward pass.
    """
    rows = max(1, CHUNK_LOGITS[weight_VH.device.type] // len(weight_VH))
    numbers = np.split(np.arange(len(targets_T)), range(rows, len(targets_T), rows))
    masks = [None if kept is None else kept.take(of_chunk) for of_chunk in numbers]
    others = [None] * len(numbers) if candidates_Tk is None else candidates_Tk.split(rows)
    chunks = zip(hidden_TH.split(rows), targets_T.split(rows), masks, others, strict=True)
    recompute = len(targets_T) > rows and torch.is_grad_enabled()
    total: list[Tensor] = []
    weight = _Summed.apply(weight_VH, total) if recompute else weight_VH
    parts, summed = [], total if recompute else None
    for hidden, targets, mask, candidates in chunks:
        arguments = (hidden, weight, summed, targets, mask, candidates, temperature, entropy, entropy_gradient)
        parts.append(
            checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _chunk(*arguments)
        )
    logprobs, token_entropy, of_candidates = map(torch.cat, zip(*parts, strict=True))
    return logprobs, token_entropy if entropy else None, None if candidates_Tk is None else of_candidates


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    total: list[Tensor] | None,
    targets: Tensor,
    kept: KeptTokens | None,
    candidates: Tensor | None,
    temperature: float,
    entropy: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = (F.linear(hidden, weight) if total is None else _Linear.apply(hidden, weight, total)).float()
    if temperature != 1.0:
        logits = logits / temperature
    if kept is not None:
        logits.masked_fill_(_excluded(kept, logits), -torch.inf)
    # The cross entropy overwrites its logits, so compute the others first.
    token_entropy = vocab_parallel_entropy(logits, gradient=entropy_gradient) if entropy else logits.new_zeros(0)
    ids = targets[:, None] if candidates is None else torch.cat((targets[:, None], candidates), 1)
    picked = None if candidates is None else _logits_of(logits, ids)
    logprobs = -vocab_parallel_cross_entropy(logits[:, None, :], targets[:, None])[:, 0]
    if picked is None:
        return logprobs, token_entropy, logits.new_zeros(0)
    return logprobs, token_entropy, picked[:, 1:] - picked[:, :1] + logprobs[:, None]


def _logits_of(logits_TV: Tensor, ids_Tk: Tensor) -> Tensor:
    """``[T, k]``: the logits of these ids, wherever they are in the vocabulary. Every tensor rank gets the gradient of
    its own logits."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group
    from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

    (rows, width), group = logits_TV.shape, get_tensor_model_parallel_group()
    columns = ids_Tk.long() - group.rank() * width
    own = (columns >= 0) & (columns < width)
    # An index, not gather: autograd must not keep the logits, which the cross entropy overwrites.
    picked = logits_TV[torch.arange(rows, device=columns.device)[:, None], columns.clamp(0, width - 1)]
    total: Tensor = reduce_from_tensor_model_parallel_region(torch.where(own, picked, 0.0), group)
    return total


def _excluded(kept: KeptTokens, logits_TV: Tensor) -> Tensor:
    """bool ``[T, V]``: the tokens outside of each row's ids, in this tensor rank's part of the vocabulary."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    width = logits_TV.shape[1]
    columns = kept.ids.astype(np.int64) - get_tensor_model_parallel_group().rank() * width
    own = (columns >= 0) & (columns < width)
    rows = np.repeat(np.arange(len(kept.counts)), kept.counts)[own]
    masked = torch.from_numpy(kept.counts > 0).to(logits_TV.device)
    excluded = masked[:, None].repeat(1, width)
    excluded[torch.from_numpy(rows).to(masked.device), torch.from_numpy(columns[own]).to(masked.device)] = False
    return excluded


class _Summed(torch.autograd.Function):
    """The identity on the weight. Its gradient is ``total``, in which :class:`_Linear` sums the chunks in float32.

    Autograd would sum the chunks in the weight's dtype: in bfloat16 the gradient of 65,536 tokens in 600 chunks was 5 %
    off (relative norm). Every chunk would also allocate a matrix of the weight's size.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)  # the chunks return no gradient here
        ctx.total, ctx.dtype = total, weight.dtype
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor, None]:
        return ctx.total.pop().to(ctx.dtype), None


class _Linear(torch.autograd.Function):
    """``hidden [T, H] @ weight [V, H].T``, which adds the weight's gradient to ``total`` (at most one float32
    tensor)."""

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


def vocab_parallel_entropy(logits_TV: Tensor, *, gradient: bool) -> Tensor:
    """Entropy in nats ``[T]`` from this tensor rank's logits ``[T, V]``; the same on every tensor rank.

    Collective over the tensor ranks. With ``gradient`` the softmax is kept for the backward pass, which takes as much
    memory as the logits.
    """
    if not gradient:
        with torch.no_grad():
            return _entropy(logits_TV)[0]
    entropy: Tensor = _Entropy.apply(logits_TV)
    return entropy


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor) -> Tensor:
        entropy_T, weights_TV, partition_T = _entropy(logits_TV)
        ctx.save_for_backward(weights_TV.div_(partition_T[:, None]), entropy_T)
        return entropy_T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        probabilities_TV, entropy_T = ctx.saved_tensors
        # entr(p) is -p log p, and its limit 0 where p has underflowed.
        slope_TV = torch.special.entr(probabilities_TV) - probabilities_TV * entropy_T[:, None]
        return slope_TV.mul_(gradients[0][:, None])


def _entropy(logits_TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(H [T], exp(z - max z) [T, V], its sum over the whole vocabulary [T])``."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    group = get_tensor_model_parallel_group()
    highest = logits_TV.amax(dim=-1)
    if group.size() > 1:
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group)
    shifted = logits_TV - highest[:, None]
    weights = shifted.exp()
    shifted.clamp_(min=torch.finfo(shifted.dtype).min)  # 0 times -inf is NaN
    sums = torch.stack((weights.sum(-1), torch.einsum("tv,tv->t", weights, shifted)))
    if group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0], weights, sums[0]
