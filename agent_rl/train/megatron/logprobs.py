"""Log-probs and entropy of packed tokens, in chunks, so that the logits of a whole micro-batch never exist at once.

Axes: T tokens, H hidden, V this rank's share of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_LOGITS = 1 << 24  # logits of a chunk: 64 MiB in float32


def token_logprobs(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *, temperature: float = 1.0, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target under ``softmax(hidden @ weight.T / temperature)``, and the (detached) entropy.

    The vocabulary may be cut over tensor ranks; every rank gets the same float32 ``[T]``. Chunks are recomputed in the
    backward pass where there is more than one.
    """
    rows = max(1, _CHUNK_LOGITS // len(weight_VH))
    chunks = zip(hidden_TH.split(rows), targets_T.split(rows), strict=True)
    recompute = len(targets_T) > rows and torch.is_grad_enabled()
    parts = []
    for hidden, targets in chunks:
        arguments = (hidden, weight_VH, targets, temperature, entropy)
        parts.append(
            checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _chunk(*arguments)
        )
    logprobs = torch.cat([logprob for logprob, _ in parts])
    return logprobs, torch.cat([part for _, part in parts]) if entropy else None


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = F.linear(hidden, weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    # The cross entropy overwrites its logits, so the entropy comes first.
    spread = _entropy(logits.detach()) if entropy else logits.new_zeros(0)
    return -vocab_parallel_cross_entropy(logits[:, None, :], targets[:, None])[:, 0], spread


@torch.no_grad()
def _entropy(logits_TV: Tensor) -> Tensor:
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
    return sums[0].log() - sums[1] / sums[0]
