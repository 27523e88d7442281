"""Pack samples into micro-batches: sequences concatenated without padding. numpy only.

A worked example: samples of 3 and 2 tokens in one micro-batch (``T`` = 5)::

    tokens_T    a b c | d e        cu_seqlens 0 3 5

Axes: ``T`` packed tokens, ``n`` sequences. The log-prob of token i comes from the logits at position i - 1, so the
first token of a sequence has none and is never trained on. Routes travel separately, sharded for each rank
(:mod:`agent_rl.train.route_sharding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent_rl.errors import TrainerError
from agent_rl.types import Sample, TopTokens, drawn_mask
from r3.kept_tokens import KeptTokens, KeptTokensError


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Sequences packed for one forward pass.

    ``sample_ids``: each sequence's index in the global batch. ``tokens_T`` int64, ``cu_seqlens`` int32 ``[n + 1]``,
    ``mask_T`` bool (sampled, and not a sequence's first token), ``drawn_T`` bool (those that a loss counts,
    :func:`agent_rl.types.drawn_mask`), ``logprobs_T`` float32 (the rollout's),
    ``advantages_T`` and ``weights_T`` float32. ``old_logprobs_T`` float32: the samples' ``old_logprobs``, or None.
    ``lag_T`` int32: their ``lag``, or 0. ``teacher_T`` float32: their ``teacher_logprobs``, or None. ``kept_T``: their
    kept tokens, one row per token, or None. ``teacher_top_T``: their ``teacher_top``, one row per token, or None.
    ``observed_T`` bool: their ``observed``, without a sequence's first token, or None.
    """

    sample_ids: tuple[int, ...]
    tokens_T: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    mask_T: NDArray[np.bool_]
    drawn_T: NDArray[np.bool_]
    logprobs_T: NDArray[np.float32]
    advantages_T: NDArray[np.float32]
    weights_T: NDArray[np.float32]
    lag_T: NDArray[np.int32]
    old_logprobs_T: NDArray[np.float32] | None = None
    kept_T: KeptTokens | None = None
    teacher_T: NDArray[np.float32] | None = None
    teacher_top_T: TopTokens | None = None
    observed_T: NDArray[np.bool_] | None = None

    @property
    def tokens(self) -> int:
        return int(self.tokens_T.shape[0])

    @property
    def sampled_tokens(self) -> int:
        return int(self.mask_T.sum())


def pack(samples: Mapping[int, Sample] | Sequence[Sample], ids: Sequence[int]) -> MicroBatch:
    """Pack ``samples[i] for i in ids``. Raises TrainerError where a sample's arrays have different lengths."""
    members = [samples[i] for i in ids]
    for index, sample in zip(ids, members, strict=True):
        _check_sample(index, sample)
    lengths = [len(sample.tokens) for sample in members]
    kept = [_kept(index, sample) for index, sample in zip(ids, members, strict=True)]
    return MicroBatch(
        sample_ids=tuple(ids),
        tokens_T=np.concatenate([sample.tokens for sample in members]).astype(np.int64),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        mask_T=np.concatenate([_trainable(sample) for sample in members]),
        drawn_T=np.concatenate([drawn_mask(sample) for sample in members]),
        logprobs_T=np.concatenate([sample.logprobs for sample in members]).astype(np.float32),
        advantages_T=np.concatenate([_advantages(sample) for sample in members]),
        weights_T=np.repeat([sample.weight for sample in members], lengths).astype(np.float32),
        lag_T=np.concatenate([_lag(sample) for sample in members]),
        old_logprobs_T=_of_all(ids, [sample.old_logprobs for sample in members], "old log-probs"),
        teacher_T=_of_all(ids, [sample.teacher_logprobs for sample in members], "log-probs of the teacher"),
        teacher_top_T=_teacher_top(ids, members),
        observed_T=_observed(ids, members),
        kept_T=KeptTokens.join(kept),
    )


def _observed(ids: Sequence[int], members: Sequence[Sample]) -> NDArray[np.bool_] | None:
    masks = [None if sample.observed is None else sample.observed.astype(np.float32) for sample in members]
    observed = _of_all(ids, masks, "observations")
    return None if observed is None else observed.astype(np.bool_)


def _teacher_top(ids: Sequence[int], members: Sequence[Sample]) -> TopTokens | None:
    """One row per token of all samples, or None. Raises TrainerError for rows of other tokens."""
    if all(sample.teacher_top is None for sample in members):
        return None
    rows = []
    for index, sample in zip(ids, members, strict=True):
        top, mask = sample.teacher_top, np.asarray(sample.loss_mask, bool)
        if top is None or len(top) != mask.sum():
            rows_of = "no" if top is None else str(len(top))
            raise TrainerError(f"sample {index} has {mask.sum()} sampled tokens and {rows_of} rows of the teacher")
        ids_Sk = np.zeros((len(mask), top.ids.shape[1]), np.int32)
        logprobs_Sk = np.zeros(ids_Sk.shape, np.float32)
        ids_Sk[mask], logprobs_Sk[mask] = top.ids, top.logprobs
        rows.append(TopTokens(ids_Sk, logprobs_Sk))
    return TopTokens.join(rows)


def _kept(index: int, sample: Sample) -> tuple[int, KeptTokens | None]:
    """A sample's length, and one row of kept tokens per token. Raises TrainerError for rows of other tokens."""
    if sample.kept is None:
        return len(sample.tokens), None
    try:
        kept = sample.kept.spread(sample.loss_mask)
        kept.check(sample.tokens)
    except KeptTokensError as error:
        raise TrainerError(f"sample {index}: {error}") from None
    return len(sample.tokens), kept


def _of_all(ids: Sequence[int], values: Sequence[NDArray[np.float32] | None], name: str) -> NDArray[np.float32] | None:
    """The values ``name`` of all samples, or None. A mixture is an error, because a loss has one source of them."""
    available = [each for each in values if each is not None]
    if available and len(available) != len(values):
        missing = next(i for i, each in zip(ids, values, strict=True) if each is None)
        raise TrainerError(f"sample {missing} has no {name}, and others of its micro-batch have some")
    return np.concatenate(available).astype(np.float32) if available else None


def pack_weighted(sequences: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]], ids: Sequence[int]) -> MicroBatch:
    """Pack supervised sequences of ``(tokens, loss weights)``; the weight of a sequence's first token becomes 0."""
    members = [sequences[i] for i in ids]
    for index, (tokens, weights) in zip(ids, members, strict=True):
        if len(tokens) != len(weights):
            raise TrainerError(f"sequence {index} has {len(tokens)} tokens and {len(weights)} loss weights")
    weights_T = np.concatenate([weights for _, weights in members]).astype(np.float32)
    weights_T[np.cumsum([0, *(len(tokens) for tokens, _ in members[:-1])])] = 0.0
    zeros_T = np.zeros(len(weights_T), np.float32)
    return MicroBatch(
        sample_ids=tuple(ids),
        tokens_T=np.concatenate([tokens for tokens, _ in members]).astype(np.int64),
        cu_seqlens=np.cumsum([0, *(len(tokens) for tokens, _ in members)]).astype(np.int32),
        mask_T=weights_T != 0,
        drawn_T=weights_T != 0,
        logprobs_T=zeros_T,
        advantages_T=zeros_T,
        weights_T=weights_T,
        lag_T=np.zeros(len(weights_T), np.int32),
    )


def _advantages(sample: Sample) -> NDArray[np.float32]:
    return np.full(len(sample.tokens), sample.advantage, np.float32) if sample.advantages is None else sample.advantages


def _lag(sample: Sample) -> NDArray[np.int32]:
    return np.zeros(len(sample.tokens), np.int32) if sample.lag is None else sample.lag


def _trainable(sample: Sample) -> NDArray[np.bool_]:
    mask = np.array(sample.loss_mask, dtype=bool)
    mask[0] = False
    return mask


def _check_sample(index: int, sample: Sample) -> None:
    tokens = len(sample.tokens)
    arrays = (("loss_mask", sample.loss_mask), ("logprobs", sample.logprobs), ("advantages", _advantages(sample)))
    for name, array in arrays:
        if len(array) != tokens:
            raise TrainerError(f"sample {index} has {tokens} tokens and {len(array)} entries of {name}")
    if not np.isfinite(sample.logprobs[np.asarray(sample.loss_mask, bool)]).all():
        raise TrainerError(f"sample {index} has a rollout log-prob of a sampled token that is not a finite number")
    for name, values in (("old log-probs", sample.old_logprobs), ("log-probs of the teacher", sample.teacher_logprobs)):
        if values is not None and len(values) != tokens:
            raise TrainerError(f"sample {index} has {tokens} tokens and {len(values)} {name}")
