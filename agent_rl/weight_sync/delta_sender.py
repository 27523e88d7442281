"""The sender of weight updates as deltas (``engine.weight_sync: delta``), in the trainer's rank 0.

::

    stage      gather the weights ─ pack what changed ─ send it to engines that hold the weights before, which prove it
    publish    pause ─ those engines load it; all others receive all weights ─ checksums ─ resume

An engine holds the weights before if it confirmed them in the last update of this sender. An engine loads a delta only
in the publish that follows its staging, so every retry sends all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from agent_rl.engine.server.delta_codec import DeltaWriter, state_digest, tensor_digest, words_of
from agent_rl.errors import WeightSyncError
from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import fill_buckets, joined_tensors
from agent_rl.weight_sync.bucket_sender import PhaseTimer
from agent_rl.weight_sync.buckets import sent_dtype
from agent_rl.weight_sync.digests import Digests
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.requests import PublishReport, PublishRequest


@dataclass(frozen=True, slots=True)
class StagedDelta:
    """A delta of ``size`` bytes that the engines at ``urls`` have proved; ``digests``: the checksums after loading
    it."""

    urls: tuple[str, ...]
    size: int
    digests: Digests
    timer: PhaseTimer


class DeltaSender:
    """Publishes the weights as deltas where it can.

    ``connect`` returns the connection to the engines of a request, and closes one to other engines. The sender keeps a
    copy of the weights in host memory, as they are sent.
    """

    def __init__(self, model_spec: ModelSpec, connect: Callable[[PublishRequest], WeightPublisher]) -> None:
        self._joined, self._connect = joined_tensors(model_spec), connect
        self._weights: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._held: dict[str, str] = {}
        """The state that each engine confirmed, by URL."""
        self._staged: StagedDelta | None = None

    def stage(self, request: PublishRequest, weights: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Take ``weights`` (Hugging Face names), and send what changed to those engines of ``request`` that hold the
        weights before. Returns the reason by URL of each that refused it and will receive all weights."""
        self._staged, timer, base = None, PhaseTimer(), state_digest(self._digests)
        urls = tuple(url for url in request.urls if self._held.get(url) == base)
        with timer.phase("prepare"):
            delta = self._take(weights, base, getattr(torch, request.config.dtype))
        if not urls:
            return {}
        try:
            refusals, digests = self._connect(replace(request, urls=urls)).stage(delta, self._weights.items(), timer)
        except WeightSyncError as error:
            return dict.fromkeys(urls, str(error))
        accepted = tuple(url for url in urls if url not in refusals)
        self._staged = StagedDelta(accepted, len(delta), digests, timer)
        return refusals

    def publish(self, request: PublishRequest) -> PublishReport:
        """Bring the engines of ``request`` to the weights taken last."""
        staged, self._staged = self._staged, None
        by_delta = tuple(url for url in request.urls if staged is not None and url in staged.urls)
        in_full = tuple(url for url in request.urls if url not in by_delta)
        state, reports = state_digest(self._digests), []
        for url in request.urls:
            self._held.pop(url, None)
        if staged is not None and by_delta:
            publisher = self._connect(replace(request, urls=by_delta))
            report = publisher.load_staged(state, staged.size, request.version, staged.digests, staged.timer)
            reports.append((len(by_delta), report))
        if in_full:
            publisher = self._connect(replace(request, urls=in_full))
            reports.append((len(in_full), publisher.publish(self._weights.items(), request.version)))
        report = _combined(reports)
        self._held |= dict.fromkeys([url for url in request.urls if url not in report.failures], state)
        return replace(report, full_bytes=sum(tensor.nbytes for tensor in self._weights.values()))

    def _take(self, weights: Iterable[tuple[str, Tensor]], base: str, dtype: torch.dtype) -> bytes:
        """Replace the copy of the weights. Returns the packed difference."""
        writer, load = DeltaWriter(), list[str]()
        for unit, _ in fill_buckets(weights, itemgetter(0), lambda item: 1, limit=0, joined=self._joined):
            changed = [self._replace(writer, name, tensor.to(sent_dtype(name, dtype))) for name, tensor in unit]
            load += [name for name, _ in unit] if any(changed) else []
        return writer.finish(base, state_digest(self._digests), load)

    def _replace(self, writer: DeltaWriter, name: str, tensor: Tensor) -> bool:
        """Replace one tensor of the copy, and add its changes to ``writer``. Returns whether it changed."""
        new = tensor.detach().cpu().contiguous()
        data = new.view(-1).view(torch.uint8).numpy()
        old = self._weights.get(name)
        if old is None:
            self._weights[name], self._digests[name] = new.clone(), tensor_digest(data)
            return False
        old_data = old.view(-1).view(torch.uint8).numpy()
        if not writer.add(name, words_of(old_data, new.itemsize), words_of(data, new.itemsize)):
            return False
        old_data[:] = data
        self._digests[name] = writer.digests[name]
        return True


def _combined(reports: Sequence[tuple[int, PublishReport]]) -> PublishReport:
    """One report of several, each with its number of engines; bytes are the mean over the engines."""
    total, seconds = sum(count for count, _ in reports), dict[str, float]()
    for _, report in reports:
        for stage, value in report.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + value
    return PublishReport(
        failures={url: reason for _, report in reports for url, reason in report.failures.items()},
        digests={kind: ranks for _, report in reports for kind, ranks in report.digests.items()},
        verified=sum(count * report.verified for count, report in reports) / total,
        stale_caches=sum(report.stale_caches for _, report in reports),
        seconds=seconds,
        bytes=round(sum(count * report.bytes for count, report in reports) / total),
    )
