"""Buckets of weights, and the order in which they are sent to engines."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.fake_sglang import SPEC

from agent_rl.config import EngineConfig
from agent_rl.errors import WeightSyncError
from agent_rl.models.tensors import fill_buckets

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.train.ray_launch import cuda_environment  # noqa: E402
from agent_rl.weight_sync.bucket_sender import InFlightBucket, PhaseTimer, collective_seconds  # noqa: E402
from agent_rl.weight_sync.buckets import Bucket, buckets  # noqa: E402
from agent_rl.weight_sync.digests import DigestKind, Digests, rank_difference  # noqa: E402
from agent_rl.weight_sync.publisher import WeightPublisher  # noqa: E402
from agent_rl.weight_sync.receivers import PendingReplies  # noqa: E402


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
        assert set(bucket.dtypes) == {dtype}
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


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    joined=st.sets(st.integers(0, 11)),
    limit=st.integers(1, 20),
)
def test_no_bucket_boundary_splits_a_group(sizes: list[int], joined: set[int], limit: int) -> None:
    """Groups above the limit have a bucket of their own; other buckets keep the limit and could not take more."""
    items = list(enumerate(sizes))
    groups = [[items[0]]]
    for item in items[1:]:
        if item[0] - 1 in joined:
            groups[-1].append(item)
        else:
            groups.append([item])
    filled = list(fill_buckets(items, itemgetter(0), itemgetter(1), limit=limit, joined=joined - {len(items) - 1}))
    assert [last for _, last in filled] == [False] * (len(filled) - 1) + [True]
    assert [item for bucket, _ in filled for item in bucket] == items
    total = {id(bucket): sum(size for _, size in bucket) for bucket, _ in filled}
    for bucket, _ in filled:
        assert all(set(group) <= set(bucket) or not set(group) & set(bucket) for group in groups)
        assert total[id(bucket)] <= limit or bucket in groups
    for (bucket, _), (following, _) in itertools.pairwise(filled):
        first = next(group for group in groups if group[0] == following[0])
        assert total[id(bucket)] + sum(size for _, size in first) > limit


def test_no_weights_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="no weights"):
        list(buckets([], torch.float32, limit=1))


def test_checksums_use_the_hash_of_each_engine() -> None:
    name, tensor = "model.layers.0.mlp.gate.weight", torch.arange(6.0)
    plain, launched = DigestKind(1), DigestKind(1, "xxh3:")
    digests = Digests(SPEC, {plain, launched})
    digests.add([name], [(6,)], 4, tensor.view(torch.uint8).numpy())
    data = tensor.numpy().tobytes()
    found = digests.expected()
    assert found[plain] == ({name: hashlib.sha256(data).hexdigest()[:16]},)
    assert found[launched] == ({name: f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"},)
    assert {DigestKind.of(held) for held in found.values()} == {plain, launched}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_of_hybrids_are_those_of_the_engines_parameters(dtype: torch.dtype) -> None:
    """Projections are joined, names lose their prefix, and norms have 1 + weight beside them."""
    prefix = "model.language_model.layers.0"
    tensors = {
        f"{prefix}.linear_attn.in_proj_qkv.weight": torch.randn(6, 4),
        f"{prefix}.linear_attn.in_proj_z.weight": torch.randn(2, 4),
        f"{prefix}.self_attn.q_norm.weight": torch.randn(64),
        f"{prefix}.mlp.experts.gate_up_proj": torch.randn(2, 64, 4),
    }
    cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    qkv, z, norm, experts = cast.values()
    digests = Digests(replace(SPEC, zero_centered_norms=True), {DigestKind(1)})
    for name, tensor in cast.items():
        digests.add([name], [tuple(tensor.shape)], dtype.itemsize, tensor.flatten().view(torch.uint8).numpy())
    held = {
        "model.layers.0.linear_attn.in_proj_qkvz.weight": torch.cat((qkv, z)),
        "model.layers.0.q_norm.weight": norm,
        "model.layers.0.q_norm.gemma_weight": norm + 1,
        "model.layers.0.mlp.experts.w13_weight": experts,
    }
    actual = {
        name: hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in held.items()
    }
    (expected,) = digests.expected()[DigestKind(1)]
    assert rank_difference(expected, actual | {"model.layers.0.rotary_emb.axis_map": "constant"}) is None
    actual["model.layers.0.q_norm.gemma_weight"] = "stale"
    assert rank_difference(expected, actual) == (
        "does not hold the bytes that were sent: model.layers.0.q_norm.gemma_weight"
    )


class Recording(WeightPublisher):
    """Sends nothing and records the order of its calls."""

    def __init__(self) -> None:
        super().__init__(["http://127.0.0.1:9"], torch.device("cpu"), SPEC, EngineConfig())
        self.notes = list[str]()
        self._receivers = self  # type: ignore[assignment]

    def _note(self, what: str) -> PendingReplies:
        self.notes.append(what)
        return PendingReplies(list[Future[bytes]](), 1.0, what)

    def begin_paused(self, mode: str) -> PendingReplies:
        return self._note(f"pause {mode}")

    def _send(self, bucket: Bucket, version: str) -> InFlightBucket:
        return InFlightBucket(f"{bucket.names[0]}", self._note(f"send {bucket.names[0]}"))

    def _wait_received(self, sending: InFlightBucket) -> None:
        self._note(f"{sending.work} arrived")

    def end(self) -> None:
        self._note("end")

    def prepared(self) -> Iterator[Any]:
        for bucket in buckets(weights(), torch.float32, limit=48):
            self._note(f"prepare {bucket.names[0]}")
            yield bucket


def test_a_bucket_is_prepared_while_the_previous_one_is_sent() -> None:
    link = Recording()
    link._update(link.prepared(), "1", PhaseTimer())
    assert link.notes == [
        "pause abort", "prepare a",
        "send a", "prepare b", "a arrived",
        "send b", "prepare c", "b arrived",
        "send c", "prepare d", "c arrived",
        "send d", "d arrived", "end",
    ]  # fmt: skip


def test_an_engine_that_refuses_a_bucket_does_not_block_the_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's first broadcast returns only when all engines have joined it."""
    joined, refused = threading.Event(), Future[bytes]()

    class Refusing(Recording):
        def receive(self, *_: Any, **__: Any) -> PendingReplies:
            return PendingReplies([refused], 60.0, "update_weights_from_distributed")

        _send = WeightPublisher._send

    def broadcast(*_: Any, **__: Any) -> None:
        refused.set_exception(WeightSyncError("the engine refused"))
        joined.wait()

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    with pytest.raises(WeightSyncError, match="the engine refused"):
        Refusing()._send(next(buckets(weights(), torch.float32, limit=48)), "1")
    joined.set()


def test_an_engine_whose_first_checksums_fail_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Recording):
        def query_info(self) -> list[dict[str, Any]]:
            return [{"weight_checksum": "sha256"}]

        def checksums(self) -> list[Any]:
            raise WeightSyncError("the engine died")

    monkeypatch.setattr("agent_rl.weight_sync.publisher.predictable", lambda info: True)
    report = Failing().publish(weights(), "1")
    assert report.failures == {"http://127.0.0.1:9": "the engine died"}


def test_nccl_s_watchdog_waits_longer_than_the_publisher() -> None:
    """The watchdog ends the process; the publisher aborts the group and goes on."""
    assert collective_seconds("nccl", 120.0) == 420.0
    assert collective_seconds("gloo", 120.0) == 120.0


def test_ranks_on_gpus_have_the_settings_of_nccl_that_engines_have() -> None:
    assert cuda_environment({"NCCL_NVLS_ENABLE": "1"}) == {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
