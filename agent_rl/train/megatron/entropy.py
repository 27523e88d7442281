"""The entropy of a softmax whose vocabulary may be cut over tensor ranks, with its exact gradient.

With z the logits, p their softmax and log Z the log-partition::

    H = -sum_v p_v log p_v = log Z - sum_v p_v z_v            dH / dz_v = -p_v (log p_v + H)

Forward two sums (and a maximum) go over the ranks; backward none, since H and p are known on each of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def vocab_parallel_entropy(logits_TV: Tensor, *, gradient: bool) -> Tensor:
    """Entropy in nats, ``[T]``, from this tensor rank's logits ``[T, V]``; the same on every tensor rank.

    Collective over the tensor ranks. Without ``gradient`` it is detached, and nothing is kept for a backward pass; with
    it p is (as much memory as the logits).
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
        # entr(p) is -p log p, and 0 where p has underflowed to 0, as its limit is.
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
    sums = torch.stack((weights.sum(-1), torch.einsum("tv,tv->t", weights, shifted)))
    if group.size() > 1:
        torch.distributed.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0], weights, sums[0]
