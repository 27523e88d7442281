"""Send weights from the trainer's rank 0 to running engines, and check that they arrive.

::

    publish    pause ─ begin ─ send every bucket ─ end ─ checksums ─ resume    every reply checked

The first bucket is prepared while the engines pause. In a trainer with pipeline stages rank 0 sends the weights of its
own stage, and the first rank of each further stage those of that one (:mod:`.stage_turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from agent_rl.engine.server.lora_merge import SUFFIX, BaseWeights
from agent_rl.errors import WeightSyncError
from agent_rl.weight_sync.adapters import add_merged
from agent_rl.weight_sync.bucket_sender import BucketSender, InFlightBucket, PhaseTimer, UpdateProgress
from agent_rl.weight_sync.buckets import Bucket, buckets
from agent_rl.weight_sync.digests import (
    DigestKind,
    Digests,
    engine_difference,
    minority_engines,
    predictable,
    unchanged_ranks,
)
from agent_rl.weight_sync.receivers import Checksums
from agent_rl.weight_sync.requests import PublishReport
from agent_rl.weight_sync.shared_buckets import SharedBuckets, shared_buckets
from agent_rl.weight_sync.stage_turns import ALONE, StagePart, StageTurns


class WeightPublisher(BucketSender):
    """Publishes weights from rank 0. Takes the arguments of :class:`BucketSender`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._predictable = frozenset[str]()
        self._checksums: Mapping[str, Checksums] = {}
        self._positions: Sequence[Sequence[int]] = ()

    def publish(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: str,
        base: BaseWeights | None = None,
        shared: SharedBuckets | None = None,
        gpus: Sequence[Sequence[str]] = (),
        turns: StageTurns = ALONE,
    ) -> PublishReport:
        """Send all ``weights`` (Hugging Face names) as ``version`` and compare the engines' checksums.

        With ``base``, the checkpoint that all engines started with, ``weights`` are adapter changes of it
        (:mod:`agent_rl.engine.server.lora_merge`). With ``shared``, the engines read the buckets on the ``gpus`` (names
        by engine) that they share with the trainer, whose other ranks iterate over the same buckets
        (:func:`.shared_buckets.shared_buckets`). With ``turns``, ``weights`` are those of the first pipeline stage, and
        :class:`.stage_sender.StageSender` sends those of the others. The report has a one-line reason for every engine
        that failed.
        """
        timer = PhaseTimer()
        failure = self._connect(timer, shared, gpus, turns)
        progress = UpdateProgress(self._new_digests())
        turns.gather(progress.digests.kinds)
        if base is not None:
            weight_buckets = self._change_buckets(weights, base, progress)
        elif shared is not None:
            made = shared_buckets(weights, self._model_spec, self._config, self._device, shared)
            weight_buckets = self._hashed(made, progress)
        else:
            weight_buckets = self._weight_buckets(weights, progress, turns)

        def update() -> int:
            if failure is not None:
                raise failure
            return self._update(weight_buckets, version, timer, turns)

        @cache
        def sent() -> StagePart:
            for _ in weight_buckets:  # after a failure: a later load from disk needs the checksums of unsent buckets
                pass
            part = StagePart.sum(turns.gather(StagePart(progress.bytes, progress.expected())))
            for name, seconds in part.seconds.items():
                timer.add(name, seconds)
            return part

        report = self._run(update, version, timer, sent)
        turns.gather(report.failures)
        return report

    def stage(
        self, delta: bytes, weights: Iterable[tuple[str, Tensor]], timer: PhaseTimer
    ) -> tuple[dict[str, str], Digests]:
        """Send a packed delta to the engines, which prove it while they sample. Returns the reason by URL of each
        engine that refused it, and the checksums that ``weights``, all as they are sent, will have in the others."""
        with timer.phase("stage"):
            if not self._checksums:
                self._query()
            digests = self._new_digests()
            hashing = self._hashing.submit(_add_weights, digests, weights if self._predictable else ())
            refusals = self._receivers.stage(delta)
            hashing.result()
        return refusals, digests

    def load_staged(self, state: str, size: int, version: str, digests: Digests, timer: PhaseTimer) -> PublishReport:
        """Let the engines load the staged delta of ``size`` bytes that makes ``state``, as ``version``; compare their
        checksums with ``digests``."""

        def load() -> int:
            with timer.phase("pause"):
                if not self._checksums:
                    self._query()
                self._receivers.begin_paused(self._config.sglang_pause_mode).wait()
            with timer.phase("load"):
                flush = self._config.pause_mode != "in_place"
                self._receivers.load_staged(state, weight_version=version, flush_cache=flush).wait()
                return self._end()

        return self._run(load, version, timer, lambda: StagePart(size, digests.expected()))

    def _run(
        self, update: Callable[[], int], version: str, timer: PhaseTimer, sent: Callable[[], StagePart]
    ) -> PublishReport:
        """Run ``update``, which returns the number of engines that kept old prefixes; compare checksums and resume.
        ``sent``: what all stages sent."""
        stale = 0
        try:
            stale = update()
            with timer.phase("check"):
                failures = self._check(version, sent)
                self._receivers.resume([url for url in self.urls if url not in failures])
        except WeightSyncError as error:
            failures = dict.fromkeys(self.urls, str(error))
        return PublishReport(
            failures=failures,
            digests=sent().digests,
            verified=len(self._predictable) / len(self.urls),
            stale_caches=stale,
            seconds=timer.seconds,
            bytes=sent().bytes,
        )

    def _new_digests(self) -> Digests:
        return Digests(self._model_spec, {DigestKind.of(self._checksums[url].ranks) for url in self._predictable})

    def _connect(
        self, timer: PhaseTimer, shared: SharedBuckets | None, gpus: Sequence[Sequence[str]], turns: StageTurns
    ) -> WeightSyncError | None:
        """Create the process groups unless they exist or no one needs them. Returns the failure, if any."""
        connected = bool(self._checksums) and (shared is not None or self._group is not None)

        def connect() -> None:
            if not connected:
                self._query()
            if shared is None and self._group is None:
                self._join()

        try:
            with timer.phase("join"):
                if not all(turns.gather(connected)):
                    turns.run(connect)
                if shared is not None:
                    self._positions = shared.positions(self.urls, gpus, self._receivers.ranks)
        except WeightSyncError as error:
            return error
        return None

    def _sizes(self) -> Iterator[tuple[str, int]]:
        return zip(self.urls, self._receivers.ranks, strict=True)

    def _update(
        self, weight_buckets: Iterator[Bucket], version: str, timer: PhaseTimer, turns: StageTurns = ALONE
    ) -> int:
        """Pause, begin, send every bucket, end. Returns the number of engines that kept old prefixes."""
        begun = self._receivers.begin_paused(self._config.sglang_pause_mode)

        def begin() -> None:
            with timer.phase("pause"):  # the rest of the pause, after preparing the first bucket
                begun.wait()

        self._send_in_turn(weight_buckets, version, timer, turns, begin)
        with timer.phase("load"):
            return self._end()

    def _end(self) -> int:
        """End the update. Returns the number of engines that kept old prefixes."""
        self._receivers.end()
        return len(self._receivers.flush()) if self._config.pause_mode == "in_place" else 0

    def _change_buckets(
        self, changes: Iterable[tuple[str, Tensor]], base: BaseWeights, progress: UpdateProgress
    ) -> Iterator[Bucket]:
        """Buckets of ``changes`` in float32; hashes the merged weights of the engines instead."""
        all_changes = dict(changes)
        if self._predictable:
            hashing = self._hashing.submit(add_merged, progress.digests, base, all_changes, self._dtype)
            progress.hashing.append(hashing)
        joined = {name + SUFFIX for name in self._joined}
        for bucket in buckets(all_changes.items(), torch.float32, limit=self._bucket_bytes, joined=joined):
            progress.bytes += bucket.data.nbytes
            yield bucket

    def _send(self, bucket: Bucket, version: str) -> InFlightBucket:
        if not bucket.handles:
            return super()._send(bucket, version)
        handles = [[bucket.handles[rank] for rank in ranks] for ranks in self._positions]
        return InFlightBucket(None, self._receivers.load_shared(handles, **self._version_of(bucket, version)))

    def _check(self, version: str, sent: Callable[[], StagePart]) -> dict[str, str]:
        """Compare the engines' checksums. Returns reasons by URL."""
        actual = dict(zip(self.urls, self._receivers.checksums(), strict=True))
        expected = sent().digests
        wrong: dict[str, str | None] = {}
        for url in self.urls:
            if url in self._predictable:
                wrong[url] = engine_difference(expected[DigestKind.of(self._checksums[url].ranks)], actual[url].ranks)
            else:
                wrong[url] = unchanged_ranks(self._checksums[url].ranks, actual[url].ranks)
        for size in set(self._receivers.ranks):
            same_size = [url for url, other in self._sizes() if other == size and url not in self._predictable]
            minority = minority_engines({url: actual[url].combined for url in same_size}) if same_size else []
            wrong |= dict.fromkeys(minority, "does not hold the weights that the other engines hold")
        self._checksums = actual
        return {url: f"{url}, updated to version {version}, {reason}" for url, reason in wrong.items() if reason}

    def _query(self) -> None:
        """Query the engines: their ranks, and what they hold."""
        infos = self._receivers.query_info()
        dtype = self._config.dtype
        for url, info in zip(self.urls, infos, strict=True):
            if info.get("dtype") not in (None, "auto", dtype):
                raise WeightSyncError(f"{url} holds its weights in {info['dtype']}, not in {dtype}: set engine.dtype")
        checksums = self._receivers.checksums()  # may raise: an engine is predictable only with known checksums
        self._predictable = frozenset(url for url, info in zip(self.urls, infos, strict=True) if predictable(info))
        self._checksums = dict(zip(self.urls, checksums, strict=True))


def _add_weights(digests: Digests, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Add tensors in host memory."""
    for name, tensor in weights:
        digests.add([name], [tuple(tensor.shape)], tensor.itemsize, tensor.view(-1).view(torch.uint8).numpy())
