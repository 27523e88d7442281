"""Weights from the trainer's rank 0 into running engines, through a process group that spans both.

::

    join (once)    engines are told where to meet ── rank 0 meets them there
    publish        pause ─ begin ─ [announce bucket ─ broadcast] ... ─ end ─ resume        every reply checked

Neither side may be left waiting: an engine that refuses never joins the collective, so rank 0 looks at the replies
while a rendezvous or a broadcast is under way, and everything is bounded by one time limit.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from agent_rl.engine.weights import Pending, WeightReceivers
from agent_rl.errors import WeightSyncError

BUCKET_BYTES = 256 << 20
_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Tensors of one dtype sent as one: ``data`` uint8 holds their bytes one after the other, as ``names`` go."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    data: Tensor
    last: bool


def buckets(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, limit: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Gather ``weights`` into buckets of about ``limit`` bytes, converted to ``dtype``; the last one says so."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        converted = tensor.detach().to(dtype)
        if held and size + converted.nbytes > limit:
            yield _bucket(held, last=False)
            held, size = [], 0
        held.append((name, converted))
        size += converted.nbytes
    if not held:
        raise WeightSyncError("the model has no weights to send")
    yield _bucket(held, last=True)


def _bucket(held: Sequence[tuple[str, Tensor]], *, last: bool) -> Bucket:
    return Bucket(
        names=tuple(name for name, _ in held),
        shapes=tuple(tuple(tensor.shape) for _, tensor in held),
        dtype=str(held[0][1].dtype).removeprefix("torch."),
        data=torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in held]),
        last=last,
    )


class WeightPublisher:
    """Rank 0's link to a set of engines; the group is made once and used for every update.

    ``timeout`` in seconds bounds each rendezvous and each broadcast. After a WeightSyncError it must be closed.
    """

    def __init__(self, urls: Sequence[str], device: torch.device, *, timeout: float = 120.0) -> None:
        self.urls = tuple(urls)
        self._device = device
        self._timeout = timeout
        self._name = f"agent-rl-{uuid.uuid4().hex[:8]}"  # an engine may still hold the group of a trainer that died
        self._receivers = WeightReceivers(urls, timeout=timeout)
        self._group: Any = None

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: str, dtype: torch.dtype) -> None:
        """Send all ``weights`` (Hugging Face names) as ``version``. Raises WeightSyncError where an engine refuses."""
        if self._group is None:
            self._join()
        receivers = self._receivers
        receivers.pause()
        try:
            receivers.begin()
            for bucket in buckets(weights, dtype):
                self._send(bucket, version)
            receivers.end()
        finally:
            receivers.resume()

    def close(self) -> None:
        """Drop the group and the connections. Idempotent."""
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
            self._group = None
        self._receivers.close()

    def _join(self) -> None:
        host = _meeting_host(self.urls)
        with closing(socket.socket()) as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        with self._receivers.joining(host, port, backend=backend, group=self._name) as joining:
            join = _Threaded(
                lambda: join_group(host, port, 0, self._receivers.world_size, self._name, backend, self._timeout)
            )
            self._wait(join.done, joining, "the rendezvous")
            self._group = join.result()

    def _send(self, bucket: Bucket, version: str) -> None:
        data = bucket.data.to(self._device)
        with self._receivers.receiving(
            bucket.names,
            [bucket.dtype] * len(bucket.names),
            bucket.shapes,
            weight_version=version,
            flush_cache=bucket.last,
            group=self._name,
        ) as receiving:
            work = torch.distributed.broadcast(data, group=self._group, group_src=0, async_op=True)
            self._wait(work.is_completed, receiving, "the broadcast")
            work.wait()

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
