"""Send weights from the trainer's rank 0 to running engines, through a process group that includes both.

::

    join (once)    engines receive the address of the rendezvous ── rank 0 meets them there
    publish        pause ─ begin ─ [announce bucket ─ broadcast] ... ─ end ─ checksums ─ resume    every reply checked

The first bucket is prepared while the engines pause. Each further bucket is prepared while the one before is broadcast,
and announced while that one is loaded. A thread hashes the buckets.

An engine that refuses never joins the collective. So rank 0 checks the replies during a rendezvous or broadcast, and
one time limit applies to every wait.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import free_port
from agent_rl.engine.server.lora_merge import SUFFIX, BaseWeights
from agent_rl.errors import WeightSyncError
from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import joined_tensors
from agent_rl.utils.sockets import LOOPBACK, address_towards, is_loopback, listen_at
from agent_rl.weight_sync.adapters import add_merged
from agent_rl.weight_sync.buckets import Bucket, buckets
from agent_rl.weight_sync.digests import (
    DigestKind,
    Digests,
    engine_difference,
    minority_engines,
    predictable,
    unchanged_ranks,
)
from agent_rl.weight_sync.receivers import Checksums, PendingReplies, WeightReceivers
from agent_rl.weight_sync.requests import PublishReport, PublishRequest
from agent_rl.weight_sync.shared_buckets import SharedBuckets, shared_buckets

_POLL_SECONDS = 0.0005
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class InFlightBucket:
    """A bucket in transfer: the collective's ``work`` (None where engines share its memory), and the engines'
    ``replies`` after loading."""

    work: Any
    replies: PendingReplies


class StageTimer:
    """Adds up seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass
class UpdateProgress:
    """Bytes sent in one update, and the hashing in progress."""

    bytes: int = 0
    hashing: list[Future[None]] = field(default_factory=list)

    def wait_hashed(self) -> None:
        """Wait until all buckets are hashed."""
        for future in self.hashing:
            future.result()


class WeightPublisher:
    """Rank 0's connection to a set of engines; all updates use one process group.

    ``model_spec``: the architecture, needed for checksums and for the tensors that must share a bucket. Settings in
    ``config``: the weights are sent in ``dtype``, in buckets of about ``weight_bucket_mb``; ``server_pause`` is
    SGLang's pause mode; ``weight_sync_timeout`` limits each call, rendezvous and broadcast; with ``colocate`` a group
    goes through host memory by gloo, because NCCL accepts each GPU once per group. ``headers`` go with each call. Close
    it after an update that an engine did not take.
    """

    def __init__(
        self,
        urls: Sequence[str],
        device: torch.device,
        model_spec: ModelSpec,
        config: EngineConfig,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.urls, self._joined = tuple(urls), joined_tensors(model_spec)
        self._device, self._config = device, config
        self._backend = "nccl" if device.type == "cuda" and not config.colocate else "gloo"
        self._dtype, self._timeout = getattr(torch, config.dtype), config.weight_sync_timeout
        self._name = f"agent-rl-{uuid.uuid4().hex[:8]}"  # unique: an engine may still have the group of a dead trainer
        self._receivers = WeightReceivers(urls, timeout=self._timeout, headers=headers)
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-digests")
        self._model_spec = model_spec
        self._bucket_bytes = int(config.bucket_mb(cuda=device.type == "cuda") * 2**20)
        self._predictable = frozenset[str]()
        self._checksums: Mapping[str, Checksums] = {}
        self._group: Any = None
        self._positions: Sequence[Sequence[int]] = ()

    def serves(self, request: PublishRequest) -> bool:
        """Whether this connection has the engines and settings of ``request``."""
        return (self.urls, self._config) == (request.urls, request.config)

    def publish(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: str,
        base: BaseWeights | None = None,
        shared: SharedBuckets | None = None,
        gpus: Sequence[Sequence[str]] = (),
    ) -> PublishReport:
        """Send all ``weights`` (Hugging Face names) as ``version`` and compare the engines' checksums.

        With ``base``, the checkpoint that all engines started with, ``weights`` are adapter changes of it
        (:mod:`agent_rl.engine.server.lora_merge`). With ``shared``, the engines read the buckets on the ``gpus`` (names
        by engine) that they share with the trainer, whose other ranks iterate over the same buckets
        (:func:`.shared_buckets.shared_buckets`). The report has a one-line reason for every engine that failed.
        """
        timer, sent = StageTimer(), UpdateProgress()
        failure = self._connect(timer, shared, gpus)
        digests = self._new_digests()
        weight_buckets = (
            self._weight_buckets(weights, digests, sent, shared)
            if base is None
            else self._change_buckets(weights, base, digests, sent)
        )

        def send() -> int:
            if failure is not None:
                raise failure
            return self._update(weight_buckets, version, timer)

        report = self._run(send, version, timer, sent, digests)
        for _ in weight_buckets:  # after a failure: a later load from disk needs the checksums of unsent buckets
            pass
        sent.wait_hashed()
        return replace(report, digests=digests.expected())

    def stage(
        self, delta: bytes, weights: Iterable[tuple[str, Tensor]], timer: StageTimer
    ) -> tuple[dict[str, str], Digests]:
        """Send a packed delta to the engines, which prove it while they sample. Returns the reason by URL of each
        engine that refused it, and the checksums that ``weights``, all as they are sent, will have in the others."""
        with timer.stage("stage"):
            if not self._checksums:
                self._query()
            digests = self._new_digests()
            hashing = self._hashing.submit(_add_weights, digests, weights if self._predictable else ())
            refusals = self._receivers.stage(delta)
            hashing.result()
        return refusals, digests

    def load_staged(self, state: str, size: int, version: str, digests: Digests, timer: StageTimer) -> PublishReport:
        """Let the engines load the staged delta of ``size`` bytes that makes ``state``, as ``version``; compare their
        checksums with ``digests``."""

        def load() -> int:
            with timer.stage("pause"):
                if not self._checksums:
                    self._query()
                self._receivers.begin_paused(self._config.sglang_pause_mode).wait()
            with timer.stage("load"):
                flush = self._config.pause_mode != "in_place"
                self._receivers.load_staged(state, weight_version=version, flush_cache=flush).wait()
                return self._end()

        report = self._run(load, version, timer, UpdateProgress(size), digests)
        return replace(report, digests=digests.expected())

    def _run(
        self, update: Callable[[], int], version: str, timer: StageTimer, sent: UpdateProgress, digests: Digests
    ) -> PublishReport:
        """Run ``update``, which returns the number of engines that kept old prefixes; compare checksums and resume. The
        report lacks ``digests``."""
        stale = 0
        try:
            stale = update()
            with timer.stage("check"):
                failures = self._check(version, sent, digests)
                self._receivers.resume([url for url in self.urls if url not in failures])
        except WeightSyncError as error:
            failures = dict.fromkeys(self.urls, str(error))
        return PublishReport(
            failures=failures,
            verified=len(self._predictable) / len(self.urls),
            stale_caches=stale,
            seconds=timer.seconds,
            bytes=sent.bytes,
        )

    def _new_digests(self) -> Digests:
        return Digests(self._model_spec, {DigestKind.of(self._checksums[url].ranks) for url in self._predictable})

    def _connect(
        self, timer: StageTimer, shared: SharedBuckets | None, gpus: Sequence[Sequence[str]]
    ) -> WeightSyncError | None:
        """Create the process group unless it exists or no one needs it. Returns the failure, if any."""
        try:
            with timer.stage("join"):
                if not self._checksums or (shared is None and self._group is None):
                    self._query()
                if shared is not None:
                    self._positions = shared.positions(self.urls, gpus, self._receivers.ranks)
                elif self._group is None:
                    self._join()
        except WeightSyncError as error:
            return error
        return None

    def _sizes(self) -> Iterator[tuple[str, int]]:
        return zip(self.urls, self._receivers.ranks, strict=True)

    def _update(self, weight_buckets: Iterator[Bucket], version: str, timer: StageTimer) -> int:
        """Pause, begin, send every bucket, end. Returns the number of engines that kept old prefixes."""
        begun = self._receivers.begin_paused(self._config.sglang_pause_mode)
        bucket = self._next(weight_buckets, timer)
        with timer.stage("pause"):  # the rest of the pause, after preparing the first bucket
            begun.wait()
        previous: InFlightBucket | None = None
        while bucket is not None:
            with timer.stage("broadcast"):
                sending = self._send(bucket, version)
            bucket = self._next(weight_buckets, timer)
            with timer.stage("broadcast"):
                self._wait_received(sending)
                if previous is not None:
                    previous.replies.wait()  # an engine accepts a bucket after loading the previous one
            previous = sending
        assert previous is not None, "buckets() yields at least one"
        with timer.stage("load"):
            previous.replies.wait()
            return self._end()

    def _end(self) -> int:
        """End the update. Returns the number of engines that kept old prefixes."""
        self._receivers.end()
        return len(self._receivers.flush()) if self._config.pause_mode == "in_place" else 0

    @staticmethod
    def _next(weight_buckets: Iterator[Bucket], timer: StageTimer) -> Bucket | None:
        with timer.stage("prepare"):
            return next(weight_buckets, None)

    def _weight_buckets(
        self,
        weights: Iterable[tuple[str, Tensor]],
        digests: Digests,
        sent: UpdateProgress,
        shared: SharedBuckets | None,
    ) -> Iterator[Bucket]:
        """Buckets of ``weights``, counted and (for predictable engines) hashed in a thread."""
        made = (
            buckets(weights, self._dtype, limit=self._bucket_bytes, joined=self._joined)
            if shared is None
            else shared_buckets(weights, self._model_spec, self._config, self._device, shared)
        )
        for bucket in made:
            sent.bytes += bucket.data.nbytes
            if self._predictable:
                # Hashing releases the lock of Python, so its thread does not delay the update.
                sent.hashing.append(self._hashing.submit(self._hash, bucket, digests))
            yield bucket

    def _change_buckets(
        self, changes: Iterable[tuple[str, Tensor]], base: BaseWeights, digests: Digests, sent: UpdateProgress
    ) -> Iterator[Bucket]:
        """Buckets of ``changes`` in float32; hashes the merged weights of the engines instead."""
        all_changes = dict(changes)
        if self._predictable:
            sent.hashing.append(self._hashing.submit(add_merged, digests, base, all_changes, self._dtype))
        joined = {name + SUFFIX for name in self._joined}
        for bucket in buckets(all_changes.items(), torch.float32, limit=self._bucket_bytes, joined=joined):
            sent.bytes += bucket.data.nbytes
            yield bucket

    def _hash(self, bucket: Bucket, digests: Digests) -> None:
        data, start = bucket.data.cpu().numpy(), 0
        for name, shape, dtype in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
            stop = start + math.prod(shape) * dtype.itemsize
            digests.add([name], [shape], dtype.itemsize, data[start:stop])
            start = stop

    def _check(self, version: str, sent: UpdateProgress, digests: Digests) -> dict[str, str]:
        """Compare the engines' checksums. Returns reasons by URL."""
        actual = dict(zip(self.urls, self._receivers.checksums(), strict=True))
        sent.wait_hashed()
        expected = digests.expected()
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

    def close(self) -> None:
        """Close group and connections. Idempotent."""
        if self._group is not None:
            self._receivers.leave(self._name).wait_quietly(_LEAVE_SECONDS)
            # After a broadcast that an engine never joined, gloo's destructor blocks until its timeout, so a daemon
            # thread owns the last reference.
            last, self._group = [self._group], None
            destroying = threading.Thread(target=lambda: self._destroy(last.pop()), name="weight-group", daemon=True)
            destroying.start()
            destroying.join(_LEAVE_SECONDS)
        self._receivers.close()
        self._hashing.shutdown(wait=False, cancel_futures=True)

    def _destroy(self, group: Any) -> None:
        if self._backend == "nccl":  # otherwise NCCL's watchdog ends this process after an unjoined broadcast
            torch.distributed.distributed_c10d._abort_process_group(group)
        else:
            torch.distributed.destroy_process_group(group)

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

    def _join(self) -> None:
        host = _rendezvous_host(self.urls)
        port = free_port(host)
        with self._receivers.joining(host, port, backend=self._backend, group=self._name) as joining:
            join = _in_background(
                lambda: join_group(host, port, 0, self._receivers.world_size, self._name, self._backend, self._timeout)
            )
            self._wait(join.done, joining, "the rendezvous")
            self._group = join.result()

    def _send(self, bucket: Bucket, version: str) -> InFlightBucket:
        """Announce one bucket and start its broadcast, if it needs one. Replies arrive when the engines have loaded
        it."""
        # An engine with a part of the weights must not report the version.
        weight_version = version if bucket.last else f"{version}-partial"
        flush = bucket.last and self._config.pause_mode != "in_place"
        if bucket.handles:
            handles = [[bucket.handles[rank] for rank in ranks] for ranks in self._positions]
            loading = self._receivers.load_shared(handles, weight_version=weight_version, flush_cache=flush)
            return InFlightBucket(None, loading)
        data = bucket.data.to(self._device)
        replies = self._receivers.receive(
            bucket.names,
            [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
            bucket.shapes,
            weight_version=weight_version,
            flush_cache=flush,
            group=self._name,
        )
        # In the first broadcast NCCL creates its communicator and blocks for engines that may have refused.
        begin = _in_background(lambda: torch.distributed.broadcast(data, group=self._group, group_src=0, async_op=True))
        self._wait(begin.done, replies, "the broadcast")
        return InFlightBucket(begin.result(), replies)

    def _wait_received(self, sending: InFlightBucket) -> None:
        """Wait until the engines have received a bucket."""
        if sending.work is None:
            sending.replies.wait()
            return
        self._wait(sending.work.is_completed, sending.replies, "the broadcast")
        try:
            sending.work.wait()
        except RuntimeError as error:  # an engine died
            reason = str(error).splitlines()[0]
            raise WeightSyncError(f"the broadcast to {', '.join(self.urls)} broke off: {reason}") from error

    def _wait(self, done: Callable[[], bool], replies: PendingReplies, operation: str) -> None:
        deadline = time.monotonic() + self._timeout
        while not done():
            replies.check()
            if time.monotonic() > deadline:
                raise WeightSyncError(f"{operation} with {', '.join(self.urls)} took more than {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)


def _add_weights(digests: Digests, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Add tensors in host memory."""
    for name, tensor in weights:
        digests.add([name], [tuple(tensor.shape)], tensor.itemsize, tensor.view(-1).view(torch.uint8).numpy())


def _in_background(call: Callable[[], Any]) -> Future[Any]:
    """Run a blocking ``call`` in a daemon thread, which the caller can abandon."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except (RuntimeError, OSError, ValueError) as error:
            reason = WeightSyncError(f"no process group with the engines: {error}")
            reason.__cause__ = error
            future.set_exception(reason)

    threading.Thread(target=run, name="weight-rendezvous", daemon=True).start()
    return future


def join_group(host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout: float) -> Any:
    """A process group beside the default one, with its rendezvous at ``host:port``, where rank 0 listens. Matches
    SGLang's ``sglang.srt.utils.init_custom_process_group``. Blocks until all ``world_size`` ranks have joined."""
    from torch.distributed import distributed_c10d as c10d

    limit = timedelta(seconds=timeout)
    # Without a listener of ours, torch would listen on all interfaces.
    listener = listen_at(host, port).detach() if rank == 0 else None
    store = torch.distributed.TCPStore(
        host, port, world_size, rank == 0, timeout=limit, multi_tenant=True, master_listen_fd=listener
    )
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        backend_options=None,
        timeout=timedelta(seconds=collective_seconds(backend, timeout)),
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def collective_seconds(backend: str, timeout: float) -> float:
    """The limit of a collective whose caller waits ``timeout`` seconds. NCCL's watchdog ends the process when its limit
    is over, so the caller must have aborted the group long before; gloo raises an error that the caller catches."""
    return 3 * timeout + 60 if backend == "nccl" else timeout


def _rendezvous_host(urls: Sequence[str]) -> str:
    """The address at which engines reach this process: loopback if all are local, otherwise this node's address in
    their network. Raises WeightSyncError."""
    remote = [host for url in urls if not is_loopback(host := urlsplit(url).hostname or "")]
    try:
        return address_towards(remote[0]) if remote else LOOPBACK
    except OSError as error:
        raise WeightSyncError(f"no way to the engine {remote[0]}: {error.strerror or error}") from None
