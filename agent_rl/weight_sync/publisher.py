"""Weights from the trainer's rank 0 into running engines, through a process group that spans both.

::

    join (once)    engines are told where to meet ── rank 0 meets them there
    publish        pause ─ begin ─ [announce bucket ─ broadcast] ... ─ end ─ checksums ─ resume    every reply checked

The first bucket is prepared while the engines pause, each further one while the one before is broadcast, and announced
while that is loaded. A thread hashes what goes out.

Neither side may be left waiting: an engine that refuses never joins the collective, so rank 0 looks at the replies
while a rendezvous or a broadcast is under way, and everything is bounded by one time limit.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from agent_rl.config import EngineConfig
from agent_rl.engine.server.lora_merge import BaseWeights
from agent_rl.errors import WeightSyncError
from agent_rl.weight_sync.adapters import add_merged
from agent_rl.weight_sync.digests import DigestKind, Digests, differing, left_behind, outvoted, predictable
from agent_rl.weight_sync.order import PublishReport, PublishRequest
from agent_rl.weight_sync.receivers import Checksums, Pending, WeightReceivers

_POLL_SECONDS = 0.0005
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Tensors of one dtype sent as one: ``data`` uint8 holds their bytes one after the other, as ``names`` go."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    data: Tensor
    last: bool


def buckets(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, limit: int) -> Iterator[Bucket]:
    """Gather ``weights`` into buckets of about ``limit`` bytes, converted to ``dtype``; the last one says so."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        more = tensor.numel() * dtype.itemsize
        if held and size + more > limit:
            yield _bucket(held, dtype, last=False)
            held, size = [], 0
        held.append((name, tensor.detach()))
        size += more
    if not held:
        raise WeightSyncError("the model has no weights to send")
    yield _bucket(held, dtype, last=True)


def _bucket(held: Sequence[tuple[str, Tensor]], dtype: torch.dtype, *, last: bool) -> Bucket:
    """``held`` as one: a tensor is converted as it is copied to its place."""
    sizes = [tensor.numel() for _, tensor in held]
    data = torch.empty(sum(sizes), dtype=dtype, device=held[0][1].device)
    for (_, tensor), place in zip(held, data.split(sizes), strict=True):
        place.view(tensor.shape).copy_(tensor)
    return Bucket(
        names=tuple(name for name, _ in held),
        shapes=tuple(tuple(tensor.shape) for _, tensor in held),
        dtype=str(dtype).removeprefix("torch."),
        data=data.view(torch.uint8),
        last=last,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """A bucket on its way: the collective's ``work``, and the engines' ``replies`` once they have loaded it."""

    work: Any
    replies: Pending


class Stages:
    """Seconds by stage, summed."""

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
class Sent:
    """What went out in one update."""

    bytes: int = 0
    hashing: list[Future[None]] = field(default_factory=list)

    def hashed(self) -> None:
        """Wait until all of it is hashed."""
        for part in self.hashing:
            part.result()


class WeightPublisher:
    """Rank 0's link to a set of engines; the group is made once and used for every update.

    ``kv_heads`` is the model's, by which engines of several ranks are checked. Of ``config``, ``dtype`` is what the
    weights are sent in, ``server_pause`` is SGLang's, the weights travel in pieces of about ``weight_bucket_mb``, and
    ``weight_sync_timeout`` bounds each call, rendezvous and broadcast. With ``colocate`` the weights go through host
    memory, by gloo: NCCL takes each GPU once in a group. ``headers`` go with each call. After an update that an engine
    did not take it must be closed.
    """

    def __init__(
        self,
        urls: Sequence[str],
        device: torch.device,
        kv_heads: int,
        config: EngineConfig,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.urls = tuple(urls)
        self._device, self._config = device, config
        self._backend = "nccl" if device.type == "cuda" and not config.colocate else "gloo"
        self._dtype, self._timeout = getattr(torch, config.dtype), config.weight_sync_timeout
        self._name = f"agent-rl-{uuid.uuid4().hex[:8]}"  # an engine may still hold the group of a trainer that died
        self._receivers = WeightReceivers(urls, timeout=self._timeout, headers=headers)
        self._hashing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-digests")
        self._kv_heads, self._limit = kv_heads, int(config.weight_bucket_mb * 2**20)
        self._predictable = frozenset[str]()
        self._held: Mapping[str, Checksums] = {}
        self._group: Any = None

    def serves(self, order: PublishRequest) -> bool:
        """Whether this link is the one that ``order`` asks for."""
        return (self.urls, self._config) == (order.urls, order.config)

    def publish(
        self, weights: Iterable[tuple[str, Tensor]], version: str, base: BaseWeights | None = None
    ) -> PublishReport:
        """Send all ``weights`` (Hugging Face names) as ``version`` and compare what the engines then hold.

        With ``base``, the checkpoint that all engines were started with, ``weights`` are changes of it
        (:mod:`agent_rl.engine.server.lora_merge`), and everything else stays.
        What an engine does not take is in the report, with a reason of one line.
        """
        clock, sent = Stages(), Sent()
        refusal = self._met(clock)
        digests = Digests(self._kv_heads, {DigestKind.of(self._held[url].ranks) for url in self._predictable})
        parts = self._weights(weights, digests, sent) if base is None else self._changes(weights, base, digests, sent)
        stale = 0
        try:
            if refusal is not None:
                raise refusal
            stale = self._update(parts, version, clock)
            with clock.stage("check"):
                failures = self._check(version, sent, digests)
                self._receivers.resume([url for url in self.urls if url not in failures])
        except WeightSyncError as error:
            failures = dict.fromkeys(self.urls, str(error))
            for _ in parts:  # the checksums of what was not sent any more are wanted for a load from disk
                pass
            sent.hashed()
        return PublishReport(
            failures=failures,
            digests=digests.found(),
            verified=len(self._predictable) / len(self.urls),
            stale_caches=stale,
            seconds=clock.seconds,
            bytes=sent.bytes,
        )

    def _met(self, clock: Stages) -> WeightSyncError | None:
        """Make the group with the engines unless it stands; what came in the way."""
        if self._group is None:
            try:
                with clock.stage("join"):
                    self._meet()
            except WeightSyncError as error:
                return error
        return None

    def _sizes(self) -> Iterator[tuple[str, int]]:
        return zip(self.urls, self._receivers.ranks, strict=True)

    def _update(self, parts: Iterator[Bucket], version: str, clock: Stages) -> int:
        """Pause, begin, every bucket, end. Returns how many engines kept old prefixes."""
        opening = self._receivers.opening(self._config.server_pause)
        bucket = self._next(parts, clock)
        with clock.stage("pause"):  # what is left of it: the first bucket was prepared meanwhile
            opening.wait()
        before: Sending | None = None
        while bucket is not None:
            with clock.stage("broadcast"):
                sending = self._send(bucket, version)
            bucket = self._next(parts, clock)
            with clock.stage("broadcast"):
                self._arrived(sending)
                if before is not None:
                    before.replies.wait()  # an engine takes a bucket when it has loaded the one before
            before = sending
        assert before is not None, "buckets() gives at least one"
        with clock.stage("load"):
            before.replies.wait()
            self._receivers.end()
            return len(self._receivers.flush()) if self._config.pause_mode == "in_place" else 0

    @staticmethod
    def _next(parts: Iterator[Bucket], clock: Stages) -> Bucket | None:
        with clock.stage("prepare"):
            return next(parts, None)

    def _weights(self, weights: Iterable[tuple[str, Tensor]], digests: Digests, sent: Sent) -> Iterator[Bucket]:
        """Buckets, counted and (where it is of use) hashed on a thread of their own."""
        for bucket in buckets(weights, self._dtype, limit=self._limit):
            sent.bytes += bucket.data.nbytes
            if self._predictable:
                # Hashing lets other threads run, so a thread of its own costs an update next to nothing.
                sent.hashing.append(self._hashing.submit(self._hash, bucket, digests))
            yield bucket

    def _changes(
        self, changes: Iterable[tuple[str, Tensor]], base: BaseWeights, digests: Digests, sent: Sent
    ) -> Iterator[Bucket]:
        """Buckets in float32; what the engines make of them is hashed instead."""
        all_of_them = dict(changes)
        if self._predictable:
            sent.hashing.append(self._hashing.submit(add_merged, digests, base, all_of_them, self._dtype))
        for bucket in buckets(all_of_them.items(), torch.float32, limit=self._limit):
            sent.bytes += bucket.data.nbytes
            yield bucket

    def _hash(self, bucket: Bucket, digests: Digests) -> None:
        digests.add(bucket.names, bucket.shapes, self._dtype.itemsize, bucket.data.cpu().numpy())

    def _check(self, version: str, sent: Sent, digests: Digests) -> dict[str, str]:
        """Why, by URL, an engine does not hold what was sent."""
        held = dict(zip(self.urls, self._receivers.checksums(), strict=True))
        sent.hashed()
        expected = digests.found()
        wrong: dict[str, str | None] = {}
        for url in self.urls:
            if url in self._predictable:
                wrong[url] = differing(expected[DigestKind.of(self._held[url].ranks)], held[url].ranks)
            else:
                wrong[url] = left_behind(self._held[url].ranks, held[url].ranks)
        for size in set(self._receivers.ranks):
            alike = [url for url, other in self._sizes() if other == size and url not in self._predictable]
            odd = outvoted({url: held[url].whole for url in alike}) if alike else []
            wrong |= dict.fromkeys(odd, "does not hold the weights that the other engines hold")
        self._held = held
        return {url: f"{url}, updated to version {version}, {reason}" for url, reason in wrong.items() if reason}

    def close(self) -> None:
        """Drop the group and the connections. Idempotent."""
        if self._group is not None:
            self._receivers.leave(self._name, within=_LEAVE_SECONDS)
            # A broadcast that an engine never joined keeps gloo's destructor waiting until it times out: the thread
            # has the last reference, and is not waited for.
            last, self._group = [self._group], None
            destroying = threading.Thread(target=lambda: self._destroy(last.pop()), name="weight-group", daemon=True)
            destroying.start()
            destroying.join(_LEAVE_SECONDS)
        self._receivers.close()
        self._hashing.shutdown(wait=False, cancel_futures=True)

    def _destroy(self, group: Any) -> None:
        if self._backend == "nccl":  # else NCCL's watchdog would end this process over a broadcast nobody joined
            torch.distributed.distributed_c10d._abort_process_group(group)
        else:
            torch.distributed.destroy_process_group(group)

    def _meet(self) -> None:
        """Look at the engines and make the group with them."""
        infos = self._receivers.look()
        wanted = self._config.dtype
        for url, info in zip(self.urls, infos, strict=True):
            if info.get("dtype") not in (None, "auto", wanted):
                raise WeightSyncError(f"{url} holds its weights in {info['dtype']}, not in {wanted}: set engine.dtype")
        self._predictable = frozenset(url for url, info in zip(self.urls, infos, strict=True) if predictable(info))
        self._held = dict(zip(self.urls, self._receivers.checksums(), strict=True))
        self._join()

    def _join(self) -> None:
        host = _meeting_host(self.urls)
        port = free_port()
        with self._receivers.joining(host, port, backend=self._backend, group=self._name) as joining:
            join = _Threaded(
                lambda: join_group(host, port, 0, self._receivers.world_size, self._name, self._backend, self._timeout)
            )
            self._wait(join.done, joining, "the rendezvous")
            self._group = join.result()

    def _send(self, bucket: Bucket, version: str) -> Sending:
        """Announce one bucket and begin to send it; the replies come when the engines have loaded it."""
        data = bucket.data.to(self._device)
        replies = self._receivers.receive(
            bucket.names,
            [bucket.dtype] * len(bucket.names),
            bucket.shapes,
            # An engine that has got only a part of the weights shall not claim to have the version.
            weight_version=version if bucket.last else f"{version}-partial",
            flush_cache=bucket.last and self._config.pause_mode != "in_place",
            group=self._name,
        )
        # NCCL makes its communicator in the first broadcast, and waits there for engines that may have refused.
        begin = _Threaded(lambda: torch.distributed.broadcast(data, group=self._group, group_src=0, async_op=True))
        self._wait(begin.done, replies, "the broadcast")
        return Sending(begin.result(), replies)

    def _arrived(self, sending: Sending) -> None:
        """Wait until the engines have a bucket, which they then load."""
        self._wait(sending.work.is_completed, sending.replies, "the broadcast")
        try:
            sending.work.wait()
        except RuntimeError as error:  # an engine died with its end of the connection
            reason = str(error).splitlines()[0]
            raise WeightSyncError(f"the broadcast to {', '.join(self.urls)} broke off: {reason}") from error

    def _wait(self, done: Callable[[], bool], replies: Pending, what: str) -> None:
        deadline = time.monotonic() + self._timeout
        while not done():
            replies.check()
            if time.monotonic() > deadline:
                raise WeightSyncError(f"{what} with {', '.join(self.urls)} took more than {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)


class _Threaded:
    """A blocking call on a daemon thread, so that its caller can look elsewhere meanwhile and give it up."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._answer: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weight-rendezvous", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except (RuntimeError, OSError, ValueError) as error:
            self._error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        if self._error is not None:
            raise WeightSyncError(f"no process group with the engines: {self._error}") from self._error
        return self._answer


def free_port() -> int:
    """A port that nothing listens on now."""
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def join_group(host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout: float) -> Any:
    """A process group beside the default one, met at ``host:port``; made exactly as SGLang's other end makes it
    (``sglang.srt.utils.init_custom_process_group``). Blocks until all ``world_size`` ranks are there."""
    from torch.distributed import distributed_c10d as c10d

    limit = timedelta(seconds=timeout)
    store, rank, world_size = next(c10d.rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=limit))
    store.set_timeout(limit)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        backend_options=None,
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


def _meeting_host(urls: Sequence[str]) -> str:
    """Where engines reach this process: the loopback if they are all here, else this node's address."""
    if all(urlsplit(url).hostname in ("127.0.0.1", "localhost") for url in urls):
        return "127.0.0.1"
    import ray

    return str(ray.util.get_node_ip_address())
