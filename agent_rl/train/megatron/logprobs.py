"""Log-probs and entropy of packed tokens, in chunks, so that the logits of a whole micro-batch never exist at once.

Axes: T tokens, H hidden, V this rank's share of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agent_rl.train.megatron.entropy import vocab_parallel_entropy

_CHUNK_LOGITS = 1 << 24  # logits of a chunk: 64 MiB in float32


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
    rows = max(1, _CHUNK_LOGITS // len(weight_VH))
    chunks = zip(hidden_TH.split(rows), targets_T.split(rows), strict=True)
    recompute = len(targets_T) > rows and torch.is_grad_enabled()
    parts = []
    for hidden, targets in chunks:
        arguments = (hidden, weight_VH, targets, temperature, entropy, entropy_gradient)
        parts.append(
            checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _chunk(*arguments)
        )
    logprobs = torch.cat([logprob for logprob, _ in parts])
    return logprobs, torch.cat([part for _, part in parts]) if entropy else None


def _chunk(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = F.linear(hidden, weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    # The cross entropy overwrites its logits, so the entropy comes first.
    spread = vocab_parallel_entropy(logits, gradient=entropy_gradient) if entropy else logits.new_zeros(0)
    return -vocab_parallel_cross_entropy(logits[:, None, :], targets[:, None])[:, 0], spread
