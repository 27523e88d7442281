"""The HTTP side of a weight update, used by the trainer's rank 0: blocking calls to the engines, no asyncio.

SGLang receives weights through a process group in which rank 0 is the trainer and the engines are the next ranks::

    with receivers.joining(address, port, ...) as joining:       every engine blocks until rank 0 joins ...
        group = <rank 0 joins>                                   ... so the caller joins inside the context
    receivers.begin_paused(mode).wait()
    receiving = receivers.receive(names, dtypes, shapes, version)
    <rank 0 broadcasts one flattened bucket; receiving.check() raises at once if an engine refused>
    receiving.wait()
    receivers.end()

A server that refuses never joins the broadcast, and the sender would wait forever. So calls run in threads, every reply
is checked, and :meth:`PendingReplies.check` is cheap enough to poll during a broadcast.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson

from agent_rl.engine.admission_checks import replicas
from agent_rl.engine.server.delta_codec import STAGED
from agent_rl.errors import EngineError, WeightSyncError
from agent_rl.utils.http import BlockingHttp, check, server_message


@dataclass(frozen=True, slots=True)
class Checksums:
    """An engine's checksums: ``combined`` of all weights, ``ranks[i]`` by parameter on its rank i."""

    combined: str
    ranks: tuple[Mapping[str, str], ...]


class PendingReplies:
    """Outstanding replies, one per engine."""

    def __init__(self, futures: Sequence[Future[bytes]], timeout: float, operation: str) -> None:
        self._futures = futures
        self._timeout = timeout
        self._operation = operation

    def check(self) -> None:
        """Raises WeightSyncError if an engine has refused or died; returns at once otherwise."""
        for future in self._futures:
            if future.done():
                future.result()

    def wait_quietly(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the replies and ignore them."""
        wait(self._futures, timeout=seconds)

    def wait(self) -> list[bytes]:
        """Every engine's reply, in order. Raises WeightSyncError for a refusal or after the timeout."""
        _, late = wait(self._futures, timeout=self._timeout, return_when=FIRST_EXCEPTION)
        self.check()
        if late:
            raise WeightSyncError(
                f"{self._operation}: {len(late)} of {len(self._futures)} engines did not reply in time"
            )
        return [future.result() for future in self._futures]


class WeightReceivers:
    """The engines of a weight update, in rank order: each has one rank per GPU, after the trainer's rank 0.

    ``ranks[i]``: number of ranks of engine i; 1 until :meth:`query_info`. ``timeout`` limits each call, in seconds.
    ``headers`` go with each call. Every method raises WeightSyncError with the engine's message when an engine refuses.
    A context manager; close it after use.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout: float = 300.0, headers: Mapping[str, str] | None = None
    ) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.ranks = (1,) * len(self.urls)
        self._timeout = timeout
        self._http = BlockingHttp(timeout, headers=headers)
        # Two threads per engine: a bucket is announced while a thread still waits for the reply to the previous one.
        self._threads = ThreadPoolExecutor(max_workers=2 * max(1, len(self.urls)), thread_name_prefix="weight-receiver")

    @property
    def world_size(self) -> int:
        """The size of the update group: the trainer's rank and all engine ranks."""
        return 1 + sum(self.ranks)

    def __enter__(self) -> WeightReceivers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def joining(self, address: str, port: int, *, backend: str, group: str) -> Iterator[PendingReplies]:
        """Let every engine join the group with its store at ``address:port``; the caller joins as rank 0 inside."""
        bodies = [
            {
                "master_address": address,
                "master_port": port,
                "rank_offset": 1 + sum(self.ranks[:index]),  # SGLang adds each process's tensor rank
                "world_size": self.world_size,
                "group_name": group,
                "backend": backend,
            }
            for index in range(len(self.urls))
        ]
        pending = self._post("init_weights_update_group", bodies)
        yield pending
        pending.wait()

    def leave(self, group: str) -> PendingReplies:
        """Let every engine leave the group, without waiting: an engine that refused a broadcast frees the others by
        leaving, and those that wait for it cannot reply."""
        return self._post("destroy_weights_update_group", [{"group_name": group}] * len(self.urls))

    def begin_paused(self, mode: str) -> PendingReplies:
        """Pause every engine and begin an update there, without waiting. An engine with an open update (of a dead
        sender) closes that one first."""

        def open_one(url: str) -> bytes:
            self._call(url, "pause_generation", {"mode": mode})
            return self._begin(url)

        return self._each(open_one, "begin_weight_update")

    def _begin(self, url: str) -> bytes:
        try:
            return self._call(url, "begin_weight_update", {})
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
        self._abandon(url)
        return self._call(url, "begin_weight_update", {})

    def _abandon(self, url: str) -> bytes:
        """End an open update, if there is one. Its weights stay."""
        try:
            return self._call(url, "end_weight_update", {})
        except WeightSyncError as error:
            if "no weight-update session" not in str(error):
                raise
        return b""

    def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        weight_version: str,
        flush_cache: bool = True,
        group: str,
    ) -> PendingReplies:
        """Announce one bucket to every engine. The caller then broadcasts it from rank 0 and waits for the replies,
        which arrive after loading.

        The bucket is one uint8 tensor: the bytes of the tensors, concatenated in the order of ``names`` (Hugging Face
        names), each at an offset that its dtype divides. ``dtypes`` are names such as ``bfloat16``. The engine reports
        ``weight_version`` from then on; ``flush_cache`` drops prefixes computed with the old weights.
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
        return self._post("update_weights_from_distributed", [body] * len(self.urls))

    def load_shared(
        self, handles: Sequence[Sequence[bytes]], *, weight_version: str, flush_cache: bool = True
    ) -> PendingReplies:
        """Let every engine load a bucket in memory that it shares with the trainer, by the handle for each of its
        ranks; needs no group."""
        body = {"load_format": "flattened_bucket", "weight_version": weight_version, "flush_cache": flush_cache}
        texts = [[b64encode(handle).decode() for handle in own] for own in handles]
        return self._post("update_weights_from_tensor", [{**body, "serialized_named_tensors": own} for own in texts])

    def stage(self, delta: bytes) -> dict[str, str]:
        """Send a packed delta to the first engine, which relays it to the next, and so on. Returns the reason by URL of
        each engine that refused it; those are as before, and the others can load it (:meth:`load_staged`)."""
        first, *further = self.urls
        query = urlencode([("next", url) for url in further])
        try:
            response = self._call(first, f"stage_weight_delta?{query}", delta)
        except WeightSyncError as error:
            return dict.fromkeys(self.urls, str(error))
        refusals = zip(self.urls, orjson.loads(response)["refusals"], strict=True)
        return {url: reason for url, reason in refusals if reason}

    def load_staged(self, state: str, *, weight_version: str, flush_cache: bool = True) -> PendingReplies:
        """Let every engine load the staged delta that makes the state with this digest; needs no group."""
        return self.receive(
            [], [], [], weight_version=weight_version, flush_cache=flush_cache, group=f"{STAGED}{state}"
        )  # fmt: skip

    def end(self) -> None:
        """End the update: the engines sample with the new weights from now on."""
        self._all("end_weight_update", {})

    def pause(self, mode: str = "abort") -> None:
        """Pause sampling on every engine. ``mode``: what happens to running requests (SGLang's
        ``pause_generation``)."""
        self._all("pause_generation", {"mode": mode})

    def resume(self, urls: Sequence[str] | None = None) -> None:
        """Resume sampling on the engines at ``urls`` (None: all)."""
        self._post("continue_generation", [{}] * len(self.urls if urls is None else urls), urls).wait()

    def stop_requests(self) -> None:
        """Abort all running requests on every engine."""
        self._all("abort_request", {"abort_all": True})

    def flush(self) -> list[str]:
        """Drop cached prefixes. Returns the URLs of engines that could not, because running requests use theirs."""

        def flush_one(url: str) -> bytes:
            with _as_weight_sync_error():
                response = self._http.exchange(f"{url}/flush_cache", {})
                if response.status == HTTPStatus.BAD_REQUEST:
                    return b"stale"
                check(response)
            return b""

        responses = self._each(flush_one, "flush_cache").wait()
        return [url for url, response in zip(self.urls, responses, strict=True) if response]

    def load_from_disk(self, model: Path, weight_version: str, *, flush_cache: bool = True) -> None:
        """Let every engine load the checkpoint in directory ``model``; needs no group, begin or end.

        Ends an open update first. SGLang replies to a request before its scheduler frees the batch, and refuses to drop
        prefixes until then; the reply to the ending call shows that the scheduler has freed it.
        """
        self._each(self._abandon, "end_weight_update").wait()
        body = {"model_path": str(model.resolve()), "weight_version": weight_version, "flush_cache": flush_cache}
        body["load_format"] = "auto"  # the server may have started without weights
        self._all("update_weights_from_disk", body)

    def checksums(self) -> list[Checksums]:
        """Every engine's checksums of its weights."""
        responses = [orjson.loads(body) for body in self._all("weights_checker", {"action": "checksum"})]
        return [
            Checksums(response["per_engine_checksum"], tuple(rank["checksums"] for rank in response["ranks"]))
            for response in responses
        ]

    def query_info(self) -> list[dict[str, Any]]:
        """Query every engine's ``/server_info`` and set :attr:`ranks`. Raises WeightSyncError also for an engine whose
        ranks would not all receive the weights."""
        infos = list(self._threads.map(self._info, self.urls))
        self.ranks = tuple(_ranks(url, info) for url, info in zip(self.urls, infos, strict=True))
        return infos

    def _info(self, url: str) -> dict[str, Any]:
        with _as_weight_sync_error():
            return self._http.get_json(f"{url}/server_info")

    def _all(self, endpoint: str, body: Mapping[str, Any]) -> list[bytes]:
        return self._post(endpoint, [body] * len(self.urls)).wait()

    def _post(
        self, path: str, bodies: Sequence[Mapping[str, Any]], urls: Sequence[str] | None = None
    ) -> PendingReplies:
        targets = self.urls if urls is None else urls
        futures = [self._threads.submit(self._call, url, path, body) for url, body in zip(targets, bodies, strict=True)]
        return PendingReplies(futures, self._timeout, path)

    def _each(self, call: Callable[[str], bytes], operation: str) -> PendingReplies:
        """Run ``call`` with every engine's URL in parallel."""
        return PendingReplies([self._threads.submit(call, url) for url in self.urls], self._timeout, operation)

    def _call(self, url: str, endpoint: str, body: Mapping[str, Any] | bytes) -> bytes:
        """POST ``body`` and return the response. Raises WeightSyncError."""
        with _as_weight_sync_error():
            response = self._http.post(f"{url}/{endpoint}", body)
        if _is_refusal(response):
            raise WeightSyncError(f"{url}/{endpoint} refused: {server_message(response)}")
        return response


def _ranks(url: str, info: Mapping[str, Any]) -> int:
    """The number of an engine's processes that take part in an update."""
    for option, size in (("pp_size", int(info.get("pp_size") or 1)), ("dp_size", replicas(info))):
        if size > 1:
            raise WeightSyncError(
                f"{url} runs with {option} {size}, whose ranks would not all receive the weights: start it with only "
                "tensor parallelism (--tp-size), and more engines for throughput"
            )
    return int(info.get("tp_size") or 1)


@contextmanager
def _as_weight_sync_error() -> Iterator[None]:
    """Convert EngineError to WeightSyncError."""
    try:
        yield
    except EngineError as error:
        raise WeightSyncError(str(error)) from error


def _is_refusal(body: bytes) -> bool:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(data, dict) and data.get("success") is False
