"""The engine's side of a weight update, as the trainer's publishing rank sees it: plain blocking calls, no asyncio.

SGLang takes new weights by a process group in which rank 0 is the trainer and each engine one of the next ranks::

    with receivers.joining(address, port, backend) as joining:   every engine blocks until rank 0 joins ...
        group = <rank 0 joins>                                   ... so the caller joins inside the context
    receivers.begin()
    with receivers.receiving(names, dtypes, shapes, version) as receiving:
        <rank 0 broadcasts one flattened bucket; receiving.check() says at once if an engine refused>
    receivers.end()

A server that refuses never joins the broadcast, and a sender that does not look would wait for ever: so the calls run
on threads, each reply is checked, and :meth:`Pending.check` is cheap enough to poll while a broadcast is under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import orjson

from agent_rl.engine.http import server_message
from agent_rl.errors import WeightSyncError

GROUP_NAME = "agent-rl"


class Pending:
    """Replies on their way, one an engine."""

    def __init__(self, futures: Sequence[Future[None]], timeout: float, what: str) -> None:
        self._futures = futures
        self._timeout = timeout
        self._what = what

    def check(self) -> None:
        """Raise WeightSyncError if an engine has already refused or died; return at once otherwise."""
        for future in self._futures:
            if future.done():
                future.result()

    def wait(self) -> None:
        """Wait for every engine's reply. Raises WeightSyncError for a refusal or when the time is up."""
        _, late = wait(self._futures, timeout=self._timeout, return_when=FIRST_EXCEPTION)
        self.check()
        if late:
            raise WeightSyncError(f"{self._what}: {len(late)} of {len(self._futures)} engines did not answer in time")


class WeightReceivers:
    """The engines that take weights, in rank order: engine i of ``tensor_parallel`` ranks has ranks 1 + i * tp onwards.

    ``timeout`` bounds each call in seconds. Every method raises WeightSyncError, with the engine's own words, when an
    engine does not take what it is told. Close it after use; a context manager does.
    """

    def __init__(self, urls: Sequence[str], *, tensor_parallel: int = 1, timeout: float = 300.0) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self._tensor_parallel = tensor_parallel
        self._timeout = timeout
        self._client = httpx.Client(timeout=timeout, trust_env=False)
        self._threads = ThreadPoolExecutor(max_workers=max(1, len(self.urls)), thread_name_prefix="weight-receiver")

    @property
    def world_size(self) -> int:
        """Ranks of the update group: the trainer's one and all of the engines'."""
        return 1 + len(self.urls) * self._tensor_parallel

    def __enter__(self) -> WeightReceivers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections. Idempotent."""
        self._client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def joining(self, address: str, port: int, *, backend: str, group: str = GROUP_NAME) -> Iterator[Pending]:
        """Tell every engine to join the group whose store is at ``address:port``; the caller joins as rank 0 inside."""
        bodies = [
            {
                "master_address": address,
                "master_port": port,
                "rank_offset": 1 + index * self._tensor_parallel,
                "world_size": self.world_size,
                "group_name": group,
                "backend": backend,
            }
            for index in range(len(self.urls))
        ]
        with self._pending("init_weights_update_group", bodies) as pending:
            yield pending

    def leave(self, group: str = GROUP_NAME) -> None:
        """Tell every engine to leave the group."""
        self._all("destroy_weights_update_group", {"group_name": group})

    def begin(self) -> None:
        """Open an update. An engine that has one open already (of a sender that died) is made to close it first."""
        try:
            self._all("begin_weight_update", {})
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
            self._each_end()
            self._all("begin_weight_update", {})

    def _each_end(self) -> None:
        for url in self.urls:
            try:
                self._call(url, "end_weight_update", {})
            except WeightSyncError as error:
                if "no weight-update session" not in str(error):
                    raise

    @contextmanager
    def receiving(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        weight_version: str,
        flush_cache: bool = True,
        group: str = GROUP_NAME,
    ) -> Iterator[Pending]:
        """Tell every engine that one bucket is coming; the caller broadcasts it from rank 0 inside.

        The bucket is one uint8 tensor: the tensors' bytes one after the other in the order of ``names`` (Hugging Face
        names), each at a byte offset that its dtype divides. ``dtypes`` are names such as ``bfloat16``. From the bucket
        on the engine reports ``weight_version``; ``flush_cache`` forgets prefixes computed with the old weights.
        """
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": "flattened_bucket",
            "weight_version": weight_version,
            "flush_cache": flush_cache,
        }
        with self._pending("update_weights_from_distributed", [body] * len(self.urls)) as pending:
            yield pending

    def end(self) -> None:
        """Close the update: from here on the engines sample with the new weights."""
        self._all("end_weight_update", {})

    def pause(self, mode: str = "retract") -> None:
        """Pause sampling on every engine; running requests are put back and go on later with the new weights."""
        self._all("pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Let every engine go on sampling."""
        self._all("continue_generation", {})

    def load_from_disk(self, model: Path, weight_version: str) -> None:
        """Make every engine load the checkpoint in folder ``model``; needs no group and no begin or end."""
        body = {"model_path": str(model.resolve()), "weight_version": weight_version, "flush_cache": True}
        self._all("update_weights_from_disk", body)

    def _all(self, endpoint: str, body: Mapping[str, Any]) -> None:
        with self._pending(endpoint, [body] * len(self.urls)):
            pass

    @contextmanager
    def _pending(self, endpoint: str, bodies: Sequence[Mapping[str, Any]]) -> Iterator[Pending]:
        futures = [
            self._threads.submit(self._call, url, endpoint, body) for url, body in zip(self.urls, bodies, strict=True)
        ]
        pending = Pending(futures, self._timeout, endpoint)
        yield pending
        pending.wait()

    def _call(self, url: str, endpoint: str, body: Mapping[str, Any]) -> None:
        try:
            response = self._client.post(f"{url}/{endpoint}", json=body)
        except httpx.TransportError as error:
            raise WeightSyncError(f"{url}/{endpoint}: no answer ({type(error).__name__}: {error})") from error
        said = server_message(response.content)
        if not response.is_success:
            raise WeightSyncError(f"{url}/{endpoint} answered {response.status_code}: {said}")
        if _refused(response.content):
            raise WeightSyncError(f"{url}/{endpoint} refused: {said}")


def _refused(body: bytes) -> bool:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(data, dict) and data.get("success") is False
