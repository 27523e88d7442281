"""A worker's part in weight updates: which ranks send which weights, and how.

By process group, the first rank of each pipeline stage sends the weights of its stage
(:mod:`agent_rl.weight_sync.stage_turns`). Rank 0 alone sends adapters and deltas. On GPUs that engines share with the
trainer, every rank shares all weights with them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from agent_rl.train.requests import WorkerRequest
from agent_rl.weight_sync.adapters import BaseWeights
from agent_rl.weight_sync.bucket_sender import BucketSender
from agent_rl.weight_sync.delta_sender import DeltaSender
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.requests import PUBLISH_SECONDS, PublishReport, PublishRequest
from agent_rl.weight_sync.shared_buckets import SharedBuckets, shared_buckets
from agent_rl.weight_sync.stage_sender import StageSender
from agent_rl.weight_sync.stage_turns import ALONE, StageTurns

if TYPE_CHECKING:
    from agent_rl.train.megatron.model import PolicyModel

Sender = TypeVar("Sender", bound=BucketSender)


class WeightSenders:
    """Sends the weights of ``model`` to engines; ``request``: the worker's. Methods but :meth:`close` are collective
    over all ranks of the trainer."""

    def __init__(self, model: PolicyModel, request: WorkerRequest) -> None:
        self._model, self._ranks, self._request = model, model.ranks, request
        self._sender: BucketSender | None = None
        self._delta = DeltaSender(model.model_spec, partial(self._open, WeightPublisher))
        self._staged_version: str | None = None
        self._host_group: Any = None
        self._stage_group: Any = None

    def stage(self, request: PublishRequest) -> Mapping[str, str] | None:
        """Send the changes of the weights to the engines before an update by deltas. Rank 0 returns the reason by URL
        of each engine that needs all weights instead. Collective."""
        weights = self._model.export_weights()
        try:
            return self._delta.stage(request, weights) if self._ranks.rank == 0 else None
        finally:
            for _ in weights:
                pass
            self._staged_version = request.version

    def publish(self, request: PublishRequest) -> PublishReport | None:
        """Send the weights to the engines. Rank 0 returns the report. Collective."""
        if request.config.weight_sync == "delta":
            return self._publish_delta(request)
        publish = self._publish_shared if request.gpus else self._publish_stages
        try:
            return publish(request)
        finally:
            self.release_gpu_cache()

    def _publish_delta(self, request: PublishRequest) -> PublishReport | None:
        if self._staged_version != request.version:
            self.stage(replace(request, urls=()))
        self._staged_version = None
        if self._ranks.rank != 0:
            return None
        report = self._delta.publish(request)
        self._close_after(report.failures)
        return report

    def _publish_stages(self, request: PublishRequest) -> PublishReport | None:
        """Send the weights, or adapters, by process group."""
        base = BaseWeights(self._request.model) if self._model.lora and request.config.merges_adapters else None
        weights = self._model.export_weights("stage leaders") if base is None else self._model.export_changes()
        turns, report = self._stage_turns(), None
        try:
            if self._ranks.rank == 0:
                publisher = self._open(WeightPublisher, request)
                report = publisher.publish(weights, request.version, base, turns=turns)
                self._close_after(report.failures)
            elif self._ranks.rank in self._ranks.stage_leaders:
                self._close_after(self._open(StageSender, request).publish(weights, request.version, turns))
        finally:
            # Gathering a tensor is collective: finish the iterator also after an engine refused the update.
            for _ in weights:
                pass
        return report

    def _publish_shared(self, request: PublishRequest) -> PublishReport | None:
        """Share the weights with engines on the ranks' GPUs."""
        if self._host_group is None:  # waits as long as an engine may take to load a bucket
            limit = timedelta(seconds=2 * request.config.weight_sync_timeout + 60)
            self._host_group = torch.distributed.new_group(backend="gloo", timeout=limit)
        gather = partial(_gather, self._host_group)
        shared = SharedBuckets(gather, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        weights, report = self._model.export_weights("every rank"), None
        if self._ranks.rank == 0:
            publisher = self._open(WeightPublisher, request)
            report = publisher.publish(weights, request.version, shared=shared, gpus=request.gpus)
            self._close_after(report.failures)
        else:
            deque(shared_buckets(weights, self._model.model_spec, request.config, self._model.device, shared), maxlen=0)
        shared.close()
        return report

    def release_gpu_cache(self) -> None:
        """Return torch's cached GPU memory, which an engine on the same GPU needs (``engine.colocate``)."""
        if self._request.config.engine.colocate:
            torch.cuda.empty_cache()

    def _stage_turns(self) -> StageTurns:
        """The turns of the first ranks of the pipeline stages. Collective."""
        if self._ranks.pipeline_size == 1:
            return ALONE
        if self._stage_group is None:
            limit = timedelta(seconds=PUBLISH_SECONDS)
            self._stage_group = torch.distributed.new_group([*self._ranks.stage_leaders], backend="gloo", timeout=limit)
        gather = partial(_gather, self._stage_group)
        return StageTurns(gather, self._ranks.pipeline_rank, self._ranks.pipeline_size)

    def _open(self, kind: type[Sender], request: PublishRequest) -> Sender:
        """The connection to the engines of ``request``; closes one to others."""
        if isinstance(self._sender, kind) and self._sender.serves(request):
            return self._sender
        self.close()
        model = self._model
        self._sender = sender = kind(
            request.urls, model.device, model.model_spec, request.config, headers=request.headers
        )
        return sender

    def _close_after(self, failures: Mapping[str, str]) -> None:
        if failures:
            self.close()

    def close(self) -> None:
        """Close the connection to engines. Idempotent."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


def _gather(group: Any, item: Any) -> list[Any]:
    """What all ranks of ``group`` gave, by rank. Collective."""
    items: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(items, item, group=group)
    return items
