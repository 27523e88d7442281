"""What trainer workers return after a step: sums and per-token values, merged over ranks. numpy only.

Axes: ``T`` packed tokens, ``L`` MoE layers; ``R`` rows and ``C`` columns of a rank, ``K`` experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import TrainerError
from r3.shard import RouteShard

WeightedSequences = Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]]
"""Sequences of supervised training: tokens ``[S]`` and a loss weight per token ``[S]``."""

ForwardResult = tuple[dict[int, NDArray[np.float32]], list[NDArray[np.unsignedinteger]]]
"""A worker's result of a pass without gradients: log-probs by sample, experts used ``[R, C, K]`` by micro-batch."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update: the gradient norm before clipping, and its learning rate.

    ``finite``: loss and norm were finite on all ranks. ``spike``: the norm was above the spike limit. ``taken``: the
    weights changed. ``held``: the policy waits for its critic. The same on every rank.
    """

    grad_norm: float
    lr: float
    finite: bool = True
    spike: bool = False
    taken: bool = True
    held: bool = False


@dataclass(frozen=True, slots=True)
class UpdateSums:
    """One optimizer update on one rank: sums over its sampled tokens. ``loss`` is already divided by ``tokens``, the
    sampled tokens of all ranks. ``observed``: observed tokens of all ranks; ``observation``: the sum of their loss."""

    tokens: int
    loss: float
    clipped: float
    entropy: float
    kl: float
    correction: float
    dropped: float
    kl_reference: float
    update: Update
    distill: float = 0.0
    observed: int = 0
    observation: float = 0.0
    router_shift: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RouteCounts:
    """Compares the experts of a pass with the rollout's, as sets, in rows that the rollout recorded.

    ``needed``: rows of all tokens except each sequence's last, which predicts nothing. ``present``: those that the
    rollout recorded. ``routers``: compared (token, layer) pairs, ``routers_differ``: those that differ.
    ``tokens_differ``: tokens with a differing layer. ``sequence_layers``: the mean number of differing layers per
    token, summed over sequences. ``layers_differ`` ``[L]``: ``routers_differ`` by layer.
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
    layers_differ: NDArray[np.int64]

    @classmethod
    def none(cls, layers: int) -> RouteCounts:
        return cls(0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, np.zeros(layers, np.int64))

    def __add__(self, other: RouteCounts) -> RouteCounts:
        return RouteCounts(*(getattr(self, name) + getattr(other, name) for name in RouteCounts.__slots__))


@dataclass(frozen=True, slots=True)
class ReferenceReport:
    """The KL penalty of a step: the sum taken from advantages over sampled tokens, and the seconds of the pass."""

    taken: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """An update of the value head. ``steps`` and the gradient norm are of all ranks; ``loss``, already divided by
    ``steps``, and the number of ``clipped`` steps are of one."""

    steps: int
    loss: float = 0.0
    clipped: float = 0.0
    grad_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class CriticReport:
    """The critic in a step. ``moments`` over the steps of one rank: their count, and the sums of V, R, R^2, R - V and
    (R - V)^2, of values V before the updates and returns R."""

    moments: tuple[float, ...]
    updates: tuple[CriticUpdate, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """The ``n`` sampled tokens: ``entropy`` float16 ``[n]`` in the first epoch, ``flags`` uint8 ``[n]``
    (:class:`agent_rl.types.TokenFlag`) over all epochs."""

    entropy: NDArray[np.float16]
    flags: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class RankReport:
    """One data rank's share of a step. Log-probs are concatenated over the sampled tokens, in the same order for
    rollout, trainer (with the configured replay), without replay and ``sampled``. ``lag`` int32: the age of the weights
    that sampled a token, in updates, relative to those before this step. ``trainer_logprobs``: None without the pass
    before the update. ``teacher_logprobs``: None without a teacher."""

    rollout_logprobs: NDArray[np.float32]
    trainer_logprobs: NDArray[np.float32] | None
    logprobs_without_replay: NDArray[np.float32] | None
    lag: NDArray[np.int32]
    updates: tuple[UpdateSums, ...]
    old_logprob_seconds: float
    seconds_without_replay: float
    update_seconds: float
    reference: ReferenceReport | None = None
    sampled: SampledTokens | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    critic: CriticReport | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RouteDifferences:
    """Where one rank's routers used other experts than the rollout, bool ``[R, C]`` per micro-batch, packed into bits:
    in the pass with the configured replay, and in the pass without replay (None where it did not run)."""

    columns: int
    replayed: tuple[NDArray[np.uint8], ...]
    without_replay: tuple[NDArray[np.uint8], ...] | None

    @classmethod
    def of(
        cls, columns: int, replayed: Sequence[NDArray[np.bool_]], without_replay: Sequence[NDArray[np.bool_]] | None
    ) -> RouteDifferences:
        return cls(columns, _to_bits(replayed), None if without_replay is None else _to_bits(without_replay))

    def unpacked(self, bits: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.bool_]]:
        """Unpack ``replayed`` or ``without_replay`` to bool ``[R, C]``."""
        return [np.unpackbits(part, axis=1, count=self.columns).view(np.bool_) for part in bits]


def _to_bits(parts: Sequence[NDArray[np.bool_]]) -> tuple[NDArray[np.uint8], ...]:
    return tuple(np.packbits(part, axis=1) for part in parts)


def route_differences(shard: RouteShard, used_RCK: NDArray[np.integer]) -> NDArray[np.bool_]:
    """bool ``[R, C]``: where the used experts differ as a set from the rollout's, in the rows that it recorded."""
    if shard.experts.shape != used_RCK.shape:
        raise TrainerError(f"the pass recorded routes {used_RCK.shape} and the rollout has {shard.experts.shape}")
    unequal = (np.sort(shard.experts, axis=-1) != np.sort(used_RCK, axis=-1)).any(axis=-1)
    result: NDArray[np.bool_] = unequal & shard.present[:, None]
    return result


def count_routes(
    differs_TL: NDArray[np.bool_], present_T: NDArray[np.bool_], cu_seqlens: NDArray[np.int32], *, stored_bytes: int
) -> RouteCounts:
    """The counts of one packed micro-batch. ``differs_TL`` is False in rows without ``present_T``."""
    counted_TL = differs_TL.view(np.uint8)  # summed in a third of the time of bool
    layers_T, layers_differ = (np.einsum(f"tl->{axis}", counted_TL, dtype=np.int64) for axis in "tl")
    bounds = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
    means = [layers_T[a:b].sum() / present_T[a:b].sum() for a, b in bounds if present_T[a:b].any()]
    last_T = np.zeros(len(present_T), bool)
    last_T[cu_seqlens[1:] - 1] = True
    return RouteCounts(
        needed=int((~last_T).sum()),
        present=int((present_T & ~last_T).sum()),
        routers=int(present_T.sum()) * differs_TL.shape[1],
        routers_differ=int(layers_differ.sum()),
        tokens=int(present_T.sum()),
        tokens_differ=int((layers_T > 0).sum()),
        sequences=len(means),
        sequence_layers=float(sum(means)),
        stored_bytes=stored_bytes,
        stored_tokens=len(present_T),
        layers_differ=layers_differ,
    )
