"""SGLang servers as a weight sync sees them, in the place of real ones: they hold no weights and check what is asked.

Each answers by HTTP on the loopback, under a path of its own. What SGLang, or NCCL between it and the trainer, would
not take is refused: ranks that are taken twice or lie beyond the group, calls out of order, tensors that the model does
not have, of another shape or precision, and bytes that were not announced. A broadcast waits, as NCCL's does, until all
engines have heard of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from agent_rl.planner.memory_model import BYTES
from agent_rl.train.hf_index import Shapes
from agent_rl.weight_sync.adapters import SUFFIX

_POLL_SECONDS = 0.02


@dataclass
class _Bucket:
    """An announced bucket: its bytes, the weights' version that it brings, whether it came."""

    size: int
    version: str
    came: bool = False


@dataclass
class _Engine:
    """One server: ``state`` of its sampling, its ``ranks`` in the group, the tensors it has got, and the bucket that it
    waits for."""

    state: str = "sampling"
    version: str = "start"
    ranks: range = range(0)
    taken: set[str] = field(default_factory=set)
    waits_for: _Bucket | None = None

    def take(self) -> int:
        """The bucket came; its bytes."""
        bucket, self.waits_for = self.waits_for, None
        assert bucket is not None
        bucket.came, self.version = True, bucket.version
        return bucket.size


class StandInEngines:
    """``count`` servers of ``ranks`` GPUs each, of a model that has the tensors ``expected``, in precision ``dtype``.

    ``colocated``: they have the trainer's GPUs. ``refusing``: the first of them refuses each bucket. ``seconds``: how
    long a broadcast waits for engines. ``complaints``: what NCCL would not have survived. A context manager, inside
    which they answer at ``urls``.
    """

    def __init__(
        self, count: int, ranks: int, expected: Shapes, dtype: str, *, colocated: bool = False, seconds: float = 10.0
    ) -> None:
        self._engines = [_Engine() for _ in range(count)]
        self._ranks, self._expected, self._dtype, self._seconds = ranks, expected, dtype, seconds
        self._colocated, self._changed = colocated, threading.Condition()
        self.refusing, self._under_way = False, False
        self.complaints: list[str] = []
        engines = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(orjson.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _answer(self, body: Mapping[str, Any]) -> None:
                _, number, endpoint = self.path.split("/")
                try:
                    status, answer = 200, engines.asked(int(number), endpoint, body)
                except ValueError as error:
                    status, answer = 400, {"error": {"message": str(error)}}
                data = orjson.dumps(answer)
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{self._server.server_port}/{number}" for number in range(len(self._engines)))

    def __enter__(self) -> StandInEngines:
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(_POLL_SECONDS,), name="stand-in-engines", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def asked(self, number: int, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A server's answer. Raises ValueError for what SGLang would refuse."""
        handlers: dict[str, Callable[[int, _Engine, Mapping[str, Any]], dict[str, Any]]] = {
            "server_info": self._info,
            "weights_checker": self._checksums,
            "init_weights_update_group": self._join,
            "destroy_weights_update_group": self._leave,
            "pause_generation": self._moves(("sampling", "paused"), "paused"),
            "begin_weight_update": self._moves(("paused",), "open"),
            "update_weights_from_distributed": self._bucket,
            "end_weight_update": self._end,
            "continue_generation": self._moves(("paused",), "sampling"),
            "flush_cache": self._moves(("paused",), "paused"),
        }
        return handlers[endpoint](number, self._engines[number], body)

    def take(self, size: int) -> None:
        """A broadcast of ``size`` bytes from the trainer. Returns when all engines wait for it. Raises RuntimeError
        where one waits for other bytes, and, after some seconds or an abort, where one does not come."""
        with self._changed:
            self._under_way = True
            ready = self._changed.wait_for(lambda: not self._under_way or self._all_wait, self._seconds)
            if not (ready and self._under_way):
                raise RuntimeError(f"a broadcast waited {self._seconds:g} s for engines that did not join it")
            self._under_way = False
            sizes = {engine.take() for engine in self._engines}
            self._changed.notify_all()
        if sizes != {size}:
            raise RuntimeError(f"a broadcast of {size} bytes, and engines wait for {sizes}")

    @property
    def _all_wait(self) -> bool:
        return all(engine.waits_for is not None for engine in self._engines)

    def left(self, *, aborted: bool) -> None:
        """The trainer has left the group. NCCL ends the process of one that leaves a broadcast without an abort."""
        with self._changed:
            if self._under_way and not (aborted or self._colocated):
                self.complaints.append("the group of a weight sync was destroyed, not aborted, within a broadcast")
            self._under_way = False
            self._changed.notify_all()

    def _info(self, _number: int, _engine: _Engine, _body: Mapping[str, Any]) -> dict[str, Any]:
        return {"device": "cuda", "dtype": self._dtype, "tp_size": self._ranks}

    def _checksums(self, _number: int, engine: _Engine, _body: Mapping[str, Any]) -> dict[str, Any]:
        ranks = [{"checksums": {"weights": engine.version}}] * self._ranks
        return {"per_engine_checksum": engine.version, "ranks": ranks}

    def _join(self, number: int, engine: _Engine, body: Mapping[str, Any]) -> dict[str, Any]:
        """SGLang's process of tensor rank i takes rank ``rank_offset + i``; 0 is the trainer's."""
        ranks = range(body["rank_offset"], body["rank_offset"] + self._ranks)
        with self._changed:
            if self._colocated and body["backend"] != "gloo":
                raise ValueError(f"engine {number}: NCCL takes each GPU once in a group, and it has a trainer rank's")
            if ranks[0] < 1 or ranks[-1] >= body["world_size"]:
                raise ValueError(f"engine {number}: ranks {[*ranks]} of a group of {body['world_size']}")
            for other, held in enumerate(self._engines):
                if other != number and (both := {*ranks} & {*held.ranks}):
                    raise ValueError(f"engine {number}: rank {min(both)} is taken by engine {other}")
            engine.ranks = ranks
        return {"success": True}

    def _leave(self, _number: int, engine: _Engine, _body: Mapping[str, Any]) -> dict[str, Any]:
        with self._changed:
            engine.ranks = range(0)
            self._changed.notify_all()
        return {"success": True}

    def _moves(
        self, before: tuple[str, ...], after: str
    ) -> Callable[[int, _Engine, Mapping[str, Any]], dict[str, Any]]:
        def move(number: int, engine: _Engine, _body: Mapping[str, Any]) -> dict[str, Any]:
            if engine.state not in before:
                raise ValueError(f"engine {number} is {engine.state}, not {' or '.join(before)}")
            engine.state = after
            return {"success": True}

        return move

    def _bucket(self, number: int, engine: _Engine, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.refusing and number == 0:
            raise ValueError("it refuses all buckets")
        if engine.state != "open" or not engine.ranks:
            raise ValueError(f"engine {number}: a bucket, and it is {engine.state}")
        tensors = zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        size = sum(self._size(number, engine, *tensor) for tensor in tensors)
        bucket = _Bucket(size, body["weight_version"])
        with self._changed:
            self._changed.wait_for(lambda: engine.waits_for is None, self._seconds)
            engine.waits_for = bucket
            self._changed.notify_all()
            self._changed.wait_for(lambda: bucket.came or not engine.ranks, self._seconds)
            if not bucket.came:
                engine.waits_for = None
                raise ValueError(f"engine {number}: a bucket was announced and did not come")
        return {"success": True}

    def _size(self, number: int, engine: _Engine, name: str, dtype: str, shape: list[int]) -> int:
        """A tensor's bytes; adapters come in float32."""
        precision = "float32" if name.endswith(SUFFIX) else self._dtype
        if name not in self._expected or tuple(shape) != self._expected[name] or dtype != precision:
            wanted = f"{precision} {list(self._expected[name])}" if name in self._expected else "no such tensor"
            raise ValueError(f"engine {number}: {name} is {dtype} {shape}, and the model has {wanted}")
        if name in engine.taken:
            raise ValueError(f"engine {number}: {name} came twice")
        engine.taken.add(name)
        return math.prod(shape) * BYTES[dtype]

    def _end(self, number: int, engine: _Engine, body: Mapping[str, Any]) -> dict[str, Any]:
        lacking = sorted(self._expected.keys() - engine.taken)
        engine.taken.clear()
        answer = self._moves(("open",), "paused")(number, engine, body)
        if lacking:
            raise ValueError(f"engine {number}: {len(lacking)} tensors did not come, first {lacking[0]}")
        return answer
