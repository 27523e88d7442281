"""Weights on their way to engines: buckets, and an engine that is not there."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import xxhash

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.errors import WeightSyncError
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Sample

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.weight_sync.digests import DigestKind, Digests  # noqa: E402
from agent_rl.weight_sync.publisher import Bucket, Sending, Stages, WeightPublisher, buckets  # noqa: E402
from agent_rl.weight_sync.receivers import Pending  # noqa: E402

Config = Callable[..., RunConfig]
Make = Callable[..., Sample]


def weights() -> list[tuple[str, torch.Tensor]]:
    sizes = {"a": (3, 4), "b": (5,), "c": (2, 2, 2), "d": (40,)}
    tensors: Iterator[torch.Tensor] = iter(torch.arange(100.0).split([12, 5, 8, 40, 35]))
    return [(name, next(tensors).reshape(size)) for name, size in sizes.items()]


@pytest.mark.parametrize("limit", [1, 48, 60, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_hold_every_tensor_once_in_order(limit: int, dtype: torch.dtype) -> None:
    sent = list(buckets(weights(), dtype, limit=limit))
    assert [bucket.last for bucket in sent] == [False] * (len(sent) - 1) + [True]
    received = {}
    for bucket in sent:
        assert bucket.dtype == str(dtype).removeprefix("torch.")
        assert len(bucket.names) == 1 or bucket.data.nbytes <= limit
        offset = 0
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            size = int(np.prod(shape)) * dtype.itemsize
            received[name] = bucket.data[offset : offset + size].view(dtype).reshape(shape)
            offset += size
        assert offset == bucket.data.nbytes
    assert list(received) == [name for name, _ in weights()]
    for name, tensor in weights():
        torch.testing.assert_close(received[name], tensor.to(dtype), rtol=0, atol=0)


def test_no_weights_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="no weights"):
        list(buckets([], torch.float32, limit=1))


def test_each_kind_of_engine_has_checksums_of_its_own_hash() -> None:
    ((name, tensor),) = [("model.norm.weight", torch.arange(6.0))]
    plain, launched = DigestKind(1), DigestKind(1, "xxh3:")
    digests = Digests(2, {plain, launched})
    digests.add([name], [(6,)], 4, tensor.view(torch.uint8).numpy())
    data = tensor.numpy().tobytes()
    found = digests.found()
    assert found[plain] == ({name: hashlib.sha256(data).hexdigest()[:16]},)
    assert found[launched] == ({name: f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"},)
    assert {DigestKind.of(held) for held in found.values()} == {plain, launched}


class Recording(WeightPublisher):
    """Sends nothing, and notes in which order it would."""

    def __init__(self) -> None:
        super().__init__(["http://127.0.0.1:9"], torch.device("cpu"), 2, EngineConfig())
        self.notes = list[str]()
        self._receivers = self  # type: ignore[assignment]

    def _note(self, what: str) -> Pending:
        self.notes.append(what)
        return Pending(list[Future[bytes]](), 1.0, what)

    def opening(self, mode: str) -> Pending:
        return self._note(f"pause {mode}")

    def _send(self, bucket: Bucket, version: str) -> Sending:
        return Sending(f"{bucket.names[0]}", self._note(f"send {bucket.names[0]}"))

    def _arrived(self, sending: Sending) -> None:
        self._note(f"{sending.work} arrived")

    def end(self) -> None:
        self._note("end")

    def prepared(self) -> Iterator[Any]:
        for bucket in buckets(weights(), torch.float32, limit=48):
            self._note(f"prepare {bucket.names[0]}")
            yield bucket


def test_a_bucket_is_prepared_while_the_one_before_is_on_its_way() -> None:
    link = Recording()
    link._update(link.prepared(), "1", Stages())
    assert link.notes == [
        "pause abort", "prepare a",
        "send a", "prepare b", "a arrived",
        "send b", "prepare c", "b arrived",
        "send c", "prepare d", "c arrived",
        "send d", "d arrived", "end",
    ]  # fmt: skip


def test_an_engine_that_refuses_a_bucket_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's first broadcast returns only when all engines have joined it."""
    joined, refused = threading.Event(), Future[bytes]()

    class Refusing(Recording):
        def receive(self, *_: Any, **__: Any) -> Pending:
            return Pending([refused], 60.0, "update_weights_from_distributed")

        _send = WeightPublisher._send

    def broadcast(*_: Any, **__: Any) -> None:
        refused.set_exception(WeightSyncError("the engine refused"))
        joined.wait()

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    with pytest.raises(WeightSyncError, match="the engine refused"):
        Refusing()._send(next(buckets(weights(), torch.float32, limit=48)), "1")
    joined.set()


@pytest.mark.megatron
@pytest.mark.slow
async def test_an_engine_that_is_not_there_is_told_at_once(run_config: Config, make_sample: Make) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    async with RayTrainer(run_config()) as trainer:
        async with asyncio.timeout(60):
            report = await trainer.publish([f"http://127.0.0.1:{free}"], "1")
        (reason,) = report.failures.values()
        assert re.search(f"127.0.0.1:{free}.*no answer", reason)
        assert await trainer.logprobs([make_sample(9, 1)], replay=True), "the trainer lives on"
