"""What a trainer rank hands back after a step: sums and per-token values that add up over ranks. numpy only.

Axes: ``T`` packed tokens, ``L`` MoE layers, ``K`` experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import TrainerError


@dataclass(frozen=True, slots=True)
class MiniStepShare:
    """A data rank's part of one optimizer update: its micro-batches (sample indices), and the update's sampled tokens
    over *all* ranks, which the loss is divided by."""

    micro_batches: tuple[tuple[int, ...], ...]
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update: the gradient norm before clipping and the learning rate it used."""

    grad_norm: float
    lr: float


@dataclass(frozen=True, slots=True)
class UpdateSums:
    """One optimizer update on one rank: its sums over sampled tokens. ``loss`` is already divided by ``tokens``, the
    sampled tokens of all ranks."""

    tokens: int
    loss: float
    clipped: float
    entropy: float
    kl: float
    update: Update


@dataclass(frozen=True, slots=True)
class RouteCounts:
    """Experts that a pass used against those the rollout used, compared as sets where the rollout's row is present.

    ``needed`` rows are all but each sequence's last (it feeds no prediction); ``present`` of them came with the
    rollout. ``routers``: (token, layer) pairs compared, ``routers_differ`` of them differ. ``tokens_differ``: tokens
    with a differing layer. ``sequence_layers``: the sum over sequences of the mean number of differing layers a token.
    """

    needed: int
    present: int
    routers: int
    routers_differ: int
    tokens: int
    tokens_differ: int
    sequences: int
    sequence_layers: float
    stored_bytes: int
    stored_tokens: int

    def __add__(self, other: RouteCounts) -> RouteCounts:
        return RouteCounts(*(getattr(self, name) + getattr(other, name) for name in RouteCounts.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class RankReport:
    """One data rank's share of a step. Log-probs are those of the sampled tokens, one after another, in the same order
    for rollout, trainer (with the configured replay) and native (without)."""

    rollout_logprobs: NDArray[np.float32]
    trainer_logprobs: NDArray[np.float32]
    native_logprobs: NDArray[np.float32] | None
    routes: RouteCounts | None
    native_routes: RouteCounts | None
    updates: tuple[UpdateSums, ...]
    old_logprob_seconds: float
    native_seconds: float
    update_seconds: float


def count_routes(
    rollout_TLK: NDArray[np.integer],
    present_T: NDArray[np.bool_],
    used_TLK: NDArray[np.integer],
    cu_seqlens: NDArray[np.int32],
) -> RouteCounts:
    """Compare the experts a pass used with the rollout's, as sets, over one packed micro-batch."""
    if rollout_TLK.shape != used_TLK.shape:
        raise TrainerError(f"the pass recorded routes {used_TLK.shape} for the rollout's {rollout_TLK.shape}")
    differ_TL = (np.sort(rollout_TLK, axis=-1) != np.sort(used_TLK, axis=-1)).any(axis=-1) & present_T[:, None]
    layers_T = differ_TL.sum(axis=1)
    bounds = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
    means = [layers_T[a:b].sum() / present_T[a:b].sum() for a, b in bounds if present_T[a:b].any()]
    last_T = np.zeros(len(present_T), bool)
    last_T[cu_seqlens[1:] - 1] = True
    return RouteCounts(
        needed=int((~last_T).sum()),
        present=int((present_T & ~last_T).sum()),
        routers=int(present_T.sum()) * rollout_TLK.shape[1],
        routers_differ=int(differ_TL.sum()),
        tokens=int(present_T.sum()),
        tokens_differ=int((layers_T > 0).sum()),
        sequences=len(means),
        sequence_layers=float(sum(means)),
        stored_bytes=int(rollout_TLK.nbytes),
        stored_tokens=len(present_T),
    )
