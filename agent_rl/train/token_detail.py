"""The driver's side of ``monitoring.token_detail``: what the ranks report of a step's tokens, by sample. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agent_rl.train.reports import RankReport
from agent_rl.train.route_sharding import MicroBatches, by_sample
from agent_rl.types import Sample, TokenDetail


class LayerBits:
    """Which MoE layers of each token differ, by sample: bool ``[S, L]`` as bits, eight layers a byte."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self.of: dict[int, NDArray[np.uint8]] = {}

    def take(self, ids: Sequence[int], differs_TL: NDArray[np.bool_]) -> None:
        """Take up a micro-batch's."""
        self.of.update(by_sample(self._samples, ids, np.packbits(differs_TL, axis=1)))


def token_details(
    samples: Sequence[Sample],
    micro_batches: Sequence[MicroBatches],
    reports: Mapping[int, RankReport],
    replayed: LayerBits,
    native: LayerBits,
) -> dict[int, TokenDetail]:
    """The detail of every sample by its index; ``micro_batches`` and ``reports`` by data rank."""
    details: dict[int, TokenDetail] = {}
    for data_rank, report in reports.items():
        ids = [index for batch in micro_batches[data_rank] for index in batch]
        for index, part in zip(ids, _parts(samples, ids), strict=True):
            details[index] = _detail(report, part, samples[index], replayed.of.get(index), native.of.get(index))
    return details


def _parts(samples: Sequence[Sample], ids: Sequence[int]) -> Iterator[slice]:
    """Where each sample's sampled tokens are in a report; a sequence's first token is none of them."""
    end = 0
    for index in ids:
        start, end = end, end + int(samples[index].loss_mask[1:].sum())
        yield slice(start, end)


def _detail(
    report: RankReport,
    part: slice,
    sample: Sample,
    replayed: NDArray[np.uint8] | None,
    native: NDArray[np.uint8] | None,
) -> TokenDetail:
    engine, sampled = report.rollout_logprobs[part], report.sampled
    return TokenDetail(
        gap=report.trainer_logprobs[part] - engine,
        gap_without_replay=None
        if report.logprobs_without_replay is None
        else report.logprobs_without_replay[part] - engine,
        entropy=None if sampled is None else sampled.entropy[part],
        flags=np.zeros(len(engine), np.uint8) if sampled is None else sampled.flags[part],
        layers=0 if sample.routing is None else sample.routing.moe_layers,
        differs=replayed,
        differs_without_replay=native,
    )
