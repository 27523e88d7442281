"""Fake SGLang servers for a weight sync: they store no weights and check every request.

Each server has its own path on one local HTTP server. It refuses what SGLang, or NCCL between SGLang and the trainer,
would refuse: ranks that are taken or outside of the group, requests out of order, unknown tensors, tensors of another
shape or precision, unannounced bytes, and handles of a bucket that do not fit its tensors or the engine's ranks. A
broadcast waits, as with NCCL, until all engines have joined it.
"""

from __future__ import annotations

import io
import math
import pickle
import threading
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from agent_rl.models.families import keeps_float32
from agent_rl.planner.memory_model import BYTES
from agent_rl.train.hf_index import Shapes
from agent_rl.weight_sync.adapters import SUFFIX

_POLL_SECONDS = 0.02


@dataclass
class _Bucket:
    """An announced bucket: its bytes, the weight version it brings, and whether it was received."""

    size: int
    version: str
    received: bool = False


@dataclass
class _Engine:
    """One server: ``state`` of its sampling, its ``ranks`` in the group, the tensors ``received`` in this update, and
    the ``pending`` bucket."""

    state: str = "sampling"
    version: str = "start"
    ranks: range = range(0)
    received: set[str] = field(default_factory=set)
    pending: _Bucket | None = None

    def receive(self) -> int:
        """Receive the pending bucket; returns its bytes."""
        bucket, self.pending = self.pending, None
        assert bucket is not None
        bucket.received, self.version = True, bucket.version
        return bucket.size


class _HandleReader(pickle.Unpickler):
    """Reads a handle of :mod:`agent_rl.weight_sync.shared_buckets` without opening memory: the bucket's tensor becomes
    the shape that the handle states for it."""

    def find_class(self, module: str, name: str) -> Any:
        return _stated_shape if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def _stated_shape(_tensor_type: Any, shape: tuple[int, ...], *_: Any) -> tuple[int, ...]:
    return shape


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024  # the trainer calls all engines at once
    daemon_threads = True


class FakeEngines:
    """``count`` servers of ``ranks`` GPUs each, for a model with the tensors ``expected`` in precision ``dtype``.

    ``colocated``: the engines share the trainer's GPUs. ``refuse_buckets``: the first server refuses each bucket.
    ``seconds``: timeout of a broadcast. ``violations``: actions of the trainer that would kill a process with NCCL. A
    context manager, inside which the servers listen at ``urls``.
    """

    def __init__(
        self, count: int, ranks: int, expected: Shapes, dtype: str, *, colocated: bool = False, seconds: float = 10.0
    ) -> None:
        self._engines = [_Engine() for _ in range(count)]
        self._ranks, self._expected, self._dtype, self._seconds = ranks, expected, dtype, seconds
        self._colocated, self._changed = colocated, threading.Condition()
        self.refuse_buckets, self._broadcasting = False, False
        self.violations: list[str] = []
        engines = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._respond({})

            def do_POST(self) -> None:
                self._respond(orjson.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _respond(self, body: Mapping[str, Any]) -> None:
                _, number, endpoint = self.path.split("/")
                try:
                    status, response = 200, engines.handle(int(number), endpoint, body)
                except ValueError as error:
                    status, response = 400, {"error": {"message": str(error)}}
                data = orjson.dumps(response)
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = _Server(("127.0.0.1", 0), Handler)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{self._server.server_port}/{number}" for number in range(len(self._engines)))

    def begin(self) -> None:
        """Another rank of the trainer begins an update."""
        for engine in self._engines:
            engine.state = "open"
            engine.received.clear()

    def __enter__(self) -> FakeEngines:
        serve = self._server.serve_forever
        threading.Thread(target=serve, args=(_POLL_SECONDS,), name="fake-engines", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handle(self, number: int, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a server's response. Raises ValueError for a request that SGLang would refuse."""
        handlers: dict[str, Callable[[int, _Engine, Mapping[str, Any]], dict[str, Any]]] = {
            "server_info": self._info,
            "weights_checker": self._checksums,
            "init_weights_update_group": self._join,
            "destroy_weights_update_group": self._leave,
            "pause_generation": self._transition(("sampling", "paused"), "paused"),
            "begin_weight_update": self._transition(("paused",), "open"),
            "update_weights_from_distributed": self._receive_bucket,
            "update_weights_from_tensor": self._open_bucket,
            "end_weight_update": self._end,
            "continue_generation": self._transition(("paused",), "sampling"),
            "flush_cache": self._transition(("paused",), "paused"),
        }
        return handlers[endpoint](number, self._engines[number], body)

    def broadcast(self, size: int) -> None:
        """A broadcast of ``size`` bytes from the trainer; returns when all engines have joined it.

        Raises RuntimeError if an engine expects another size, and if one does not join before the timeout or an abort.
        """
        with self._changed:
            self._broadcasting = True
            ready = self._changed.wait_for(lambda: not self._broadcasting or self._all_wait, self._seconds)
            if not (ready and self._broadcasting):
                raise RuntimeError(f"a broadcast waited {self._seconds:g} s for engines that did not join it")
            self._broadcasting = False
            sizes = {engine.receive() for engine in self._engines}
            self._changed.notify_all()
        if sizes != {size}:
            raise RuntimeError(f"a broadcast of {size} bytes, but engines expect {sizes}")

    @property
    def _all_wait(self) -> bool:
        return all(engine.pending is not None for engine in self._engines)

    def leave_group(self, *, aborted: bool) -> None:
        """The trainer leaves the group. NCCL kills a process that leaves during a broadcast without an abort."""
        with self._changed:
            if self._broadcasting and not (aborted or self._colocated):
                self.violations.append("the group of a weight sync was destroyed, not aborted, within a broadcast")
            self._broadcasting = False
            self._changed.notify_all()

    def _info(self, _number: int, _engine: _Engine, _body: Mapping[str, Any]) -> dict[str, Any]:
        return {"device": "cuda", "dtype": self._dtype, "tp_size": self._ranks}

    def _checksums(self, _number: int, engine: _Engine, _body: Mapping[str, Any]) -> dict[str, Any]:
        ranks = [{"checksums": {"weights": engine.version}}] * self._ranks
        return {"per_engine_checksum": engine.version, "ranks": ranks}

    def _join(self, number: int, engine: _Engine, body: Mapping[str, Any]) -> dict[str, Any]:
        """SGLang's tensor rank i gets rank ``rank_offset + i`` in the group; rank 0 is the trainer's."""
        ranks = range(body["rank_offset"], body["rank_offset"] + self._ranks)
        with self._changed:
            if self._colocated and body["backend"] != "gloo":
                raise ValueError(
                    f"engine {number}: NCCL allows each GPU once in a group; this engine shares a trainer's GPU"
                )
            if ranks[0] < 1 or ranks[-1] >= body["world_size"]:
                raise ValueError(f"engine {number}: ranks {[*ranks]} of a group of {body['world_size']}")
            for other, engine_of_group in enumerate(self._engines):
                if other != number and (both := {*ranks} & {*engine_of_group.ranks}):
                    raise ValueError(f"engine {number}: rank {min(both)} is taken by engine {other}")
            engine.ranks = ranks
        return {"success": True}

    def _leave(self, _number: int, engine: _Engine, _body: Mapping[str, Any]) -> dict[str, Any]:
        with self._changed:
            engine.ranks = range(0)
            self._changed.notify_all()
        return {"success": True}

    def _transition(
        self, before: tuple[str, ...], after: str
    ) -> Callable[[int, _Engine, Mapping[str, Any]], dict[str, Any]]:
        def move(number: int, engine: _Engine, _body: Mapping[str, Any]) -> dict[str, Any]:
            if engine.state not in before:
                raise ValueError(f"engine {number} is {engine.state}, not {' or '.join(before)}")
            engine.state = after
            return {"success": True}

        return move

    def _open_bucket(self, number: int, engine: _Engine, body: Mapping[str, Any]) -> dict[str, Any]:
        """A bucket in memory that the trainer's ranks share with the engine's: a handle for each of these."""
        self._check_accepts(number, engine)
        handles = [_HandleReader(io.BytesIO(b64decode(each))).load() for each in body["serialized_named_tensors"]]
        if not self._colocated or len(handles) != self._ranks:
            raise ValueError(f"engine {number}: {len(handles)} handles for {self._ranks} ranks")
        tensors = [[(each.name, each.dtype, each.shape) for each in handle["metadata"]] for handle in handles]
        size = self._sizes(
            number, engine, [(name, str(dtype).removeprefix("torch."), [*shape]) for name, dtype, shape in tensors[0]]
        )
        stated = [handle["flattened_tensor"] for handle in handles]
        if tensors != tensors[:1] * len(tensors) or stated != [(size,)] * len(stated):
            raise ValueError(f"engine {number}: handles of one bucket differ, or do not have its {size} bytes")
        engine.version = body["weight_version"]
        return {"success": True}

    def _check_accepts(self, number: int, engine: _Engine) -> None:
        if self.refuse_buckets and number == 0:
            raise ValueError("this engine refuses all buckets")
        if engine.state != "open":
            raise ValueError(f"engine {number}: a bucket came while the engine is {engine.state}")

    def _receive_bucket(self, number: int, engine: _Engine, body: Mapping[str, Any]) -> dict[str, Any]:
        self._check_accepts(number, engine)
        if not engine.ranks:
            raise ValueError(f"engine {number}: a bucket came before the engine joined the group")
        size = self._sizes(number, engine, [*zip(body["names"], body["dtypes"], body["shapes"], strict=True)])
        bucket = _Bucket(size, body["weight_version"])
        with self._changed:
            self._changed.wait_for(lambda: engine.pending is None, self._seconds)
            engine.pending = bucket
            self._changed.notify_all()
            self._changed.wait_for(lambda: bucket.received or not engine.ranks, self._seconds)
            if not bucket.received:
                engine.pending = None
                raise ValueError(f"engine {number}: a bucket was announced and did not come")
        return {"success": True}

    def _sizes(self, number: int, engine: _Engine, tensors: Sequence[tuple[str, str, list[int]]]) -> int:
        """Returns the bytes of a bucket of ``tensors``: names, dtypes, shapes."""
        return sum(self._size(number, engine, *tensor) for tensor in tensors)

    def _size(self, number: int, engine: _Engine, name: str, dtype: str, shape: list[int]) -> int:
        """Returns a tensor's bytes; adapters and some tensors are sent in float32 whatever the model's dtype is."""
        precision = "float32" if name.endswith(SUFFIX) or keeps_float32(name) else self._dtype
        if name not in self._expected or tuple(shape) != self._expected[name] or dtype != precision:
            known = f"{precision} {list(self._expected[name])}" if name in self._expected else "no such tensor"
            raise ValueError(f"engine {number}: {name} is {dtype} {shape}, the model has {known}")
        if name in engine.received:
            raise ValueError(f"engine {number}: {name} came twice")
        engine.received.add(name)
        return math.prod(shape) * BYTES[dtype]

    def _end(self, number: int, engine: _Engine, body: Mapping[str, Any]) -> dict[str, Any]:
        missing = sorted(self._expected.keys() - engine.received)
        engine.received.clear()
        response = self._transition(("open",), "paused")(number, engine, body)
        if missing:
            raise ValueError(f"engine {number}: {len(missing)} tensors did not come, first {missing[0]}")
        return response
