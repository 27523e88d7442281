"""Trainer ranks that are no processes: they store nothing and answer a step at once, so all that runs is the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from agent_rl.train.batching.partition import MiniStepShare
from agent_rl.train.ray_trainer import WorkerStepResult
from agent_rl.train.reports import RankReport, RouteDifferences, Update, UpdateSums
from agent_rl.train.route_sharding import WorkerInfo
from agent_rl.types import Sample
from r3.shard import ShardSpec


class FakeWorkers:
    """``count`` data ranks that hold all ``layers``; every row of theirs that is present differs in half its layers."""

    def __init__(self, samples: Sequence[Sample], count: int, layers: int) -> None:
        self.infos = [
            WorkerInfo(rank, rank, count, True, ShardSpec(tuple(range(layers))), layers) for rank in range(count)
        ]
        self._samples, self._layers = samples, layers
        row = np.packbits(np.arange(layers) % 2 == 0)
        self._bits = np.tile(row, (max(len(sample.tokens) for sample in samples), 1))

    def check_running(self) -> None:
        """They always run."""

    def put(self, value: object) -> None:
        """Nothing is kept."""

    async def call_each(self, call: Callable[[Any, WorkerInfo], WorkerStepResult]) -> list[WorkerStepResult]:
        actor = SimpleNamespace(grpo=SimpleNamespace(remote=self._grpo))
        return [call(actor, info) for info in self.infos]

    def _grpo(
        self, samples: object, shares: Sequence[MiniStepShare], order: object, routes: Mapping[int, object]
    ) -> WorkerStepResult:
        batches = [ids for share in shares for ids in share.micro_batches]
        sampled = sum(int(self._samples[index].loss_mask.sum()) for ids in batches for index in ids)
        logprobs = np.full(sampled, -0.5, np.float32)
        sums = [
            UpdateSums(share.sampled_tokens, 0.1, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0, Update(1.0, 1e-5)) for share in shares
        ]
        differs = tuple(np.concatenate([self._of(self._samples[index]) for index in ids]) for ids in batches)
        report = RankReport(logprobs, logprobs, logprobs, np.zeros(len(logprobs), np.int32), tuple(sums), 1.0, 1.0, 1.0)
        return report, RouteDifferences(self._layers, differs, differs), None

    def _of(self, sample: Sample) -> np.ndarray:
        return self._bits[: len(sample.tokens)] * sample.routing.present[:, None]
