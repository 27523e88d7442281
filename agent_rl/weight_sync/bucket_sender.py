"""Sends buckets of weights from one rank of the trainer to engines, through a process group that includes both.

::

    join (once)    engines receive the address of the rendezvous ── the rank meets them there
    send           [announce bucket ─ broadcast] ...    every reply checked

Each further bucket is prepared while the one before is broadcast, and announced while that one is loaded. A thread
hashes the buckets.

An engine that refuses never joins the collective. So the rank checks the replies during a rendezvous or broadcast, and
one time limit applies to every wait.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import free_port
from agent_rl.errors import WeightSyncError
from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import joined_tensors
from agent_rl.utils.sockets import LOOPBACK, address_towards, is_loopback, listen_at
from agent_rl.weight_sync.buckets import Bucket, buckets
from agent_rl.weight_sync.digests import DigestKind, Digests, RankDigests
from agent_rl.weight_sync.receivers import PendingReplies, WeightReceivers
from agent_rl.weight_sync.requests import PublishRequest
from agent_rl.weight_sync.stage_turns import StageTurns

_POLL_SECONDS = 0.0005
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class InFlightBucket:
    """A bucket in transfer: the collective's ``work`` (None where engines share its memory), and the engines'
    ``replies`` after loading."""

    work: Any
    replies: PendingReplies


class PhaseTimer:
    """Adds up seconds by phase of an update."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)


@dataclass
class UpdateProgress:
    """Bytes that this rank has sent in one update, and the checksums that engines will have of them, in progress."""

    digests: Digests
    bytes: int = 0
    hashing: list[Future[None]] = field(default_factory=list)

    def expected(self) -> Mapping[DigestKind, RankDigests]:
        """The checksums, when all buckets are hashed."""
        for future in self.hashing:
            future.result()
        return self.digests.expected()


class BucketSender:
    """One rank's connection to a set of engines; all its updates use one process group.

    ``model_spec``: the architecture, needed for checksums and for the tensors that must share a bucket. Settings in
    ``config``: the weights are sent in ``dtype``, in buckets of about ``weight_bucket_mb``; ``pause_mode`` says what
    happens to running requests; ``weight_sync_timeout`` limits each call, rendezvous and broadcast; with ``colocate`` a
    group goes through host memory by gloo, because NCCL accepts each GPU once per group. ``headers`` go with each call.
    Close it after an update that an engine did not take.
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
        self._group: Any = None

    def serves(self, request: PublishRequest) -> bool:
        """Whether this connection has the engines and settings of ``request``."""
        return (self.urls, self._config) == (request.urls, request.config)

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

    def _join(self) -> None:
        host = _rendezvous_host(self.urls)
        port = free_port(host)
        with self._receivers.joining(host, port, backend=self._backend, group=self._name) as joining:
            join = _in_background(
                lambda: join_group(host, port, 0, self._receivers.world_size, self._name, self._backend, self._timeout)
            )
            self._wait(join.done, joining, "the rendezvous")
            self._group = join.result()

    def _weight_buckets(
        self, weights: Iterable[tuple[str, Tensor]], progress: UpdateProgress, turns: StageTurns
    ) -> Iterator[Bucket]:
        """Buckets of ``weights``, counted and hashed; only the last stage has the last one of the update."""
        made = buckets(weights, self._dtype, limit=self._bucket_bytes, joined=self._joined)
        return self._hashed((replace(bucket, last=bucket.last and turns.last) for bucket in made), progress)

    def _hashed(self, weight_buckets: Iterable[Bucket], progress: UpdateProgress) -> Iterator[Bucket]:
        """The buckets, counted and (for engines with predictable checksums) hashed in a thread."""
        for bucket in weight_buckets:
            progress.bytes += bucket.data.nbytes
            if progress.digests.kinds:
                # Hashing releases the lock of Python, so its thread does not delay the update.
                progress.hashing.append(self._hashing.submit(_hash, bucket, progress.digests))
            yield bucket

    def _send_in_turn(
        self,
        weight_buckets: Iterator[Bucket],
        version: str,
        timer: PhaseTimer,
        turns: StageTurns,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the first bucket, ``begin`` when it is this stage's turn, and send all buckets. Returns when the
        engines have loaded those of every stage. Raises WeightSyncError where an engine refuses one of any stage."""
        preparing = timer if turns.stage == 0 else PhaseTimer()  # later stages prepare while others send
        prepared = [self._next(weight_buckets, preparing)]

        def send() -> PendingReplies:
            begin()
            return self._send_all(prepared, weight_buckets, version, timer)

        loading = turns.run(send)
        with timer.phase("load") if turns.stage == 0 else nullcontext():
            turns.together(loading.wait)

    def _send_all(
        self, prepared: list[Bucket | None], further: Iterator[Bucket], version: str, timer: PhaseTimer
    ) -> PendingReplies:
        """Send the ``prepared`` bucket, which is taken from the list so that its memory is freed early, and all
        ``further`` ones. Returns when the engines have received them, with the replies to the last one, which come when
        it is loaded."""
        bucket = prepared.pop()
        previous: InFlightBucket | None = None
        while bucket is not None:
            with timer.phase("broadcast"):
                sending = self._send(bucket, version)
            bucket = self._next(further, timer)
            with timer.phase("broadcast"):
                self._wait_received(sending)
                if previous is not None:
                    previous.replies.wait()  # an engine accepts a bucket after loading the previous one
            previous = sending
        assert previous is not None, "buckets() yields at least one"
        return previous.replies

    @staticmethod
    def _next(weight_buckets: Iterator[Bucket], timer: PhaseTimer) -> Bucket | None:
        with timer.phase("prepare"):
            return next(weight_buckets, None)

    def _send(self, bucket: Bucket, version: str) -> InFlightBucket:
        """Announce one bucket and start its broadcast. Replies arrive when the engines have loaded it."""
        data = bucket.data.to(self._device)
        replies = self._receivers.receive(
            bucket.names,
            [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
            bucket.shapes,
            **self._version_of(bucket, version),
            group=self._name,
        )
        # In the first broadcast NCCL creates its communicator and blocks for engines that may have refused.
        begin = _in_background(lambda: torch.distributed.broadcast(data, group=self._group, group_src=0, async_op=True))
        self._wait(begin.done, replies, "the broadcast")
        return InFlightBucket(begin.result(), replies)

    def _version_of(self, bucket: Bucket, version: str) -> dict[str, Any]:
        """The options of a bucket's announcement. An engine with a part of the weights must not report the version."""
        flush = bucket.last and self._config.pause_mode != "in_place"
        return {"weight_version": version if bucket.last else f"{version}-partial", "flush_cache": flush}

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


def _hash(bucket: Bucket, digests: Digests) -> None:
    data, start = bucket.data.cpu().numpy(), 0
    for name, shape, dtype in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
        stop = start + math.prod(shape) * dtype.itemsize
        digests.add([name], [shape], dtype.itemsize, data[start:stop])
        start = stop


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
