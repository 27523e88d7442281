"""The engine's side of a weight update, as the trainer's publishing rank sees it: plain blocking calls, no asyncio.

SGLang takes new weights by a process group in which rank 0 is the trainer and each engine one of the next ranks::

    with receivers.joining(address, port, backend) as joining:   every engine blocks until rank 0 joins ...
        group = <rank 0 joins>                                   ... so the caller joins inside the context
    receivers.begin()
    receiving = receivers.receive(names, dtypes, shapes, version)
    <rank 0 broadcasts one flattened bucket; receiving.check() says at once if an engine refused>
    receiving.wait()
    receivers.end()

A server that refuses never joins the broadcast, and a sender that does not look would wait for ever: so the calls run
on threads, each reply is checked, and :meth:`Pending.check` is cheap enough to poll while a broadcast is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from agent_rl.errors import EngineError, WeightSyncError
from agent_rl.utils.http import BlockingHttp, server_message

GROUP_NAME = "agent-rl"


@dataclass(frozen=True, slots=True)
class Checksums:
    """An engine's checksums: ``whole`` of all its weights, ``ranks[i]`` by parameter of its rank i."""

    whole: str
    ranks: tuple[Mapping[str, str], ...]


class Pending:
    """Replies on their way, one an engine."""

    def __init__(self, futures: Sequence[Future[bytes]], timeout: float, what: str) -> None:
        self._futures = futures
        self._timeout = timeout
        self._what = what

    def check(self) -> None:
        """Raise WeightSyncError if an engine has already refused or died; return at once otherwise."""
        for future in self._futures:
            if future.done():
                future.result()

    def linger(self, seconds: float) -> None:
        """Give the replies so much time, whatever they are."""
        wait(self._futures, timeout=seconds)

    def wait(self) -> list[bytes]:
        """Every engine's reply, in order. Raises WeightSyncError for a refusal or when the time is up."""
        _, late = wait(self._futures, timeout=self._timeout, return_when=FIRST_EXCEPTION)
        self.check()
        if late:
            raise WeightSyncError(f"{self._what}: {len(late)} of {len(self._futures)} engines did not answer in time")
        return [future.result() for future in self._futures]


class WeightReceivers:
    """The engines that take weights, in rank order: each has as many ranks as GPUs, behind the trainer's one.

    ``ranks[i]`` is how many engine i has: 1, until :meth:`look` has asked. ``timeout`` bounds each call in seconds;
    ``headers`` go with each.
    Every method raises WeightSyncError, with the engine's own words, when an engine does not take what it is sent.
    Close it after use; a context manager does.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout: float = 300.0, headers: Mapping[str, str] | None = None
    ) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.ranks = (1,) * len(self.urls)
        self._timeout = timeout
        self._http = BlockingHttp(timeout, headers=headers)
        # Two an engine: a bucket may be announced while the reply to the one before is still awaited by a thread.
        self._threads = ThreadPoolExecutor(max_workers=2 * max(1, len(self.urls)), thread_name_prefix="weight-receiver")

    @property
    def world_size(self) -> int:
        """Ranks of the update group: the trainer's one and all of the engines'."""
        return 1 + sum(self.ranks)

    def __enter__(self) -> WeightReceivers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections. Idempotent."""
        self._http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def joining(self, address: str, port: int, *, backend: str, group: str = GROUP_NAME) -> Iterator[Pending]:
        """Tell every engine to join the group whose store is at ``address:port``; the caller joins as rank 0 inside."""
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

    def leave(self, group: str = GROUP_NAME, *, within: float | None = None) -> None:
        """Tell every engine to leave the group. With ``within`` seconds to do so nothing is raised: one that refused a
        broadcast sets the others free by leaving, and those that wait for it cannot answer."""
        pending = self._post("destroy_weights_update_group", [{"group_name": group}] * len(self.urls))
        if within is None:
            pending.wait()
        else:
            pending.linger(within)

    def opening(self, mode: str) -> Pending:
        """Pause every engine and open an update there, without waiting for it."""

        def open_one(url: str) -> bytes:
            self._call(url, "pause_generation", {"mode": mode})
            return self._begin(url)

        return self._each(open_one, "begin_weight_update")

    def begin(self) -> None:
        """Open an update. An engine that has one open already (of a sender that died) is made to close it first."""
        self._each(self._begin, "begin_weight_update").wait()

    def _begin(self, url: str) -> bytes:
        try:
            return self._call(url, "begin_weight_update", {})
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
        self._abandon(url)
        return self._call(url, "begin_weight_update", {})

    def _abandon(self, url: str) -> bytes:
        """Close an update that was left open, where there is one. What it brought stays."""
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
        group: str = GROUP_NAME,
    ) -> Pending:
        """Tell every engine that one bucket is coming; the caller then broadcasts it from rank 0 and waits for the
        replies, which come when the engines have loaded it.

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
        return self._post("update_weights_from_distributed", [body] * len(self.urls))

    def end(self) -> None:
        """Close the update: from here on the engines sample with the new weights."""
        self._all("end_weight_update", {})

    def pause(self, mode: str = "abort") -> None:
        """Pause sampling on every engine; docs/weight-sync.md says what each ``mode`` does to running requests."""
        self._all("pause_generation", {"mode": mode})

    def resume(self, urls: Sequence[str] | None = None) -> None:
        """Let the engines at ``urls`` (None: all) go on sampling."""
        self._post("continue_generation", [{}] * len(self.urls if urls is None else urls), urls).wait()

    def stop_requests(self) -> None:
        """Abort whatever every engine is still to sample."""
        self._all("abort_request", {"abort_all": True})

    def flush(self) -> list[str]:
        """Forget the cached prefixes; the engines that did not, because requests hold theirs."""

        def flush_one(url: str) -> bytes:
            try:
                self._call(url, "flush_cache", {})
            except WeightSyncError as error:
                if "answered 400" not in str(error):
                    raise
                return b"stale"
            return b""

        answers = self._each(flush_one, "flush_cache").wait()
        return [url for url, answer in zip(self.urls, answers, strict=True) if answer]

    def load_from_disk(self, model: Path, weight_version: str, *, flush_cache: bool = True) -> None:
        """Make every engine load the checkpoint in directory ``model``; needs no group and no begin or end.

        An update that was left open is closed. SGLang answers a request before its scheduler puts the batch away, and
        refuses to forget prefixes until then; by answering the call that closes, the scheduler shows that it has.
        """
        self._each(self._abandon, "end_weight_update").wait()
        body = {"model_path": str(model.resolve()), "weight_version": weight_version, "flush_cache": flush_cache}
        self._all("update_weights_from_disk", body)

    def checksums(self) -> list[Checksums]:
        """Every engine's checksums of the weights it holds."""
        answers = [orjson.loads(body) for body in self._all("weights_checker", {"action": "checksum"})]
        return [
            Checksums(answer["per_engine_checksum"], tuple(rank["checksums"] for rank in answer["ranks"]))
            for answer in answers
        ]

    def look(self) -> list[dict[str, Any]]:
        """What every engine says of itself; from here on :attr:`ranks` are theirs. Raises WeightSyncError also for an
        engine whose ranks would not all get the weights."""
        infos = self._threads.map(self._info, self.urls)
        found = list(infos)
        self.ranks = tuple(_ranks(url, info) for url, info in zip(self.urls, found, strict=True))
        return found

    def _info(self, url: str) -> dict[str, Any]:
        with _not_taken():
            return self._http.get_json(f"{url}/server_info")

    def _all(self, endpoint: str, body: Mapping[str, Any]) -> list[bytes]:
        return self._post(endpoint, [body] * len(self.urls)).wait()

    def _post(self, endpoint: str, bodies: Sequence[Mapping[str, Any]], urls: Sequence[str] | None = None) -> Pending:
        to = self.urls if urls is None else urls
        futures = [self._threads.submit(self._call, url, endpoint, body) for url, body in zip(to, bodies, strict=True)]
        return Pending(futures, self._timeout, endpoint)

    def _each(self, call: Callable[[str], bytes], what: str) -> Pending:
        """``call`` with every engine's URL, side by side."""
        return Pending([self._threads.submit(call, url) for url in self.urls], self._timeout, what)

    def _call(self, url: str, endpoint: str, body: Mapping[str, Any]) -> bytes:
        """POST ``body``; the answer. Raises WeightSyncError."""
        with _not_taken():
            answer = self._http.post(f"{url}/{endpoint}", body)
        if _refused(answer):
            raise WeightSyncError(f"{url}/{endpoint} refused: {server_message(answer)}")
        return answer


def _ranks(url: str, info: Mapping[str, Any]) -> int:
    """How many processes of an engine take part in an update."""
    for option in ("pp_size", "dp_size"):
        if (size := int(info.get(option) or 1)) > 1:
            raise WeightSyncError(
                f"{url} runs with {option} {size}, whose ranks would not all get the weights: start it with tensor "
                "parallelism alone (--tp-size), and further engines for more throughput"
            )
    return int(info.get("tp_size") or 1)


@contextmanager
def _not_taken() -> Iterator[None]:
    """Turn engine errors into the one of weight updates."""
    try:
        yield
    except EngineError as error:
        raise WeightSyncError(str(error)) from error


def _refused(body: bytes) -> bool:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(data, dict) and data.get("success") is False
