"""The fake engines refuse what SGLang, or NCCL between SGLang and the trainer, would refuse."""

from __future__ import annotations

import pickle
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from agent_rl.dryrun.engines import FakeEngines

SHAPES = {"a": (2, 3), "b": (4,)}
GROUP = {"world_size": 5}


@pytest.fixture
def engines() -> Iterator[FakeEngines]:
    """Two engines of two GPUs that have joined the group and accept buckets."""
    with FakeEngines(2, 2, SHAPES, "bfloat16", seconds=0.2) as fakes:
        for number in range(2):
            fakes.handle(number, "init_weights_update_group", GROUP | {"rank_offset": 1 + 2 * number})
            fakes.handle(number, "pause_generation", {})
            fakes.handle(number, "begin_weight_update", {})
        yield fakes


def bucket(*tensors: tuple[str, list[int]], dtype: str = "bfloat16") -> dict[str, Any]:
    names, shapes = zip(*tensors, strict=True)
    return {"names": names, "shapes": shapes, "dtypes": [dtype] * len(names), "weight_version": "1"}


def send(engines: FakeEngines, size: int, *tensors: tuple[str, list[int]]) -> None:
    """Announce a bucket to both engines and broadcast ``size`` bytes."""
    update = "update_weights_from_distributed", bucket(*tensors)
    with ThreadPoolExecutor(2) as pool:
        responses = [pool.submit(engines.handle, number, *update) for number in (0, 1)]
        engines.broadcast(size)
        assert all(response.result() == {"success": True} for response in responses)


def test_a_complete_update_is_accepted(engines: FakeEngines) -> None:
    send(engines, 12, ("a", [2, 3]))
    send(engines, 8, ("b", [4]))
    for number in range(2):
        engines.handle(number, "end_weight_update", {})
        assert engines.handle(number, "weights_checker", {})["per_engine_checksum"] == "1"
        engines.handle(number, "continue_generation", {})


UPDATE = "update_weights_from_distributed"


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (UPDATE, bucket(("c", [1])), "c is bfloat16 .* the model has no such tensor"),
        (UPDATE, bucket(("a", [3, 2])), r"a is bfloat16 \[3, 2\], .* has bfloat16 \[2, 3\]"),
        (UPDATE, bucket(("a", [2, 3]), dtype="float32"), "a is float32"),
        (UPDATE, bucket(("b", [4]), ("b", [4])), "b came twice"),
        ("end_weight_update", {}, "2 tensors did not come, first a"),
        ("begin_weight_update", {}, "engine 0 is open, not paused"),
        ("continue_generation", {}, "engine 0 is open, not paused"),
        ("init_weights_update_group", {"rank_offset": 3, "world_size": 5}, "rank 3 is taken by engine 1"),
        ("init_weights_update_group", {"rank_offset": 1, "world_size": 2}, r"ranks \[1, 2\] of a group of 2"),
    ],
)
def test_requests_that_sglang_refuses_are_refused(engines: FakeEngines, endpoint: str, body: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        engines.handle(0, endpoint, body)


def test_a_broadcast_of_unannounced_bytes_is_refused(engines: FakeEngines) -> None:
    with pytest.raises(RuntimeError, match=r"a broadcast of 14 bytes, but engines expect \{12\}"):
        send(engines, 14, ("a", [2, 3]))


def test_a_broadcast_without_engines_times_out_and_must_be_aborted(engines: FakeEngines) -> None:
    with pytest.raises(RuntimeError, match=r"waited 0\.2 s for engines that did not join it"):
        engines.broadcast(12)
    assert engines.violations == []
    engines.leave_group(aborted=False)
    assert engines.violations == ["the group of a weight sync was destroyed, not aborted, within a broadcast"]


def test_an_engine_that_leaves_early_does_not_receive_the_bucket(engines: FakeEngines) -> None:
    engines._seconds = 60  # neither may give up before the other waits
    with ThreadPoolExecutor(2) as pool:
        update = ("update_weights_from_distributed", bucket(("a", [2, 3])))
        responses = [pool.submit(engines.handle, number, *update) for number in (0, 1)]
        with engines._changed:
            engines._changed.wait_for(lambda: engines._all_wait)
        for number in (0, 1):
            engines.handle(number, "destroy_weights_update_group", {})
        for number, response in enumerate(responses):
            with pytest.raises(ValueError, match=f"engine {number}: a bucket was announced and did not come"):
                response.result()
    assert not engines._all_wait
    assert engines.handle(0, "weights_checker", {})["per_engine_checksum"] == "start"


def test_colocated_engines_refuse_nccl() -> None:
    with FakeEngines(1, 2, SHAPES, "bfloat16", colocated=True) as fakes:
        with pytest.raises(ValueError, match="NCCL allows each GPU once"):
            fakes.handle(0, "init_weights_update_group", {"world_size": 3, "rank_offset": 1, "backend": "nccl"})
        fakes.handle(0, "init_weights_update_group", {"world_size": 3, "rank_offset": 1, "backend": "gloo"})


@dataclass(frozen=True)
class GpuTensor:
    """Is pickled as a tensor ``[size]`` on a GPU is."""

    size: int

    def __reduce__(self) -> Any:
        return reductions.rebuild_cuda_tensor, (torch.Tensor, (self.size,), (1,), 0)


def handle(size: int, *names: str) -> str:
    metadata = [SimpleNamespace(name=name, shape=torch.Size(SHAPES[name]), dtype=torch.bfloat16) for name in names]
    data = pickle.dumps({"flattened_tensor": GpuTensor(size), "metadata": metadata})
    return b64encode(data).decode()


@pytest.fixture
def colocated() -> Iterator[FakeEngines]:
    """An engine of two GPUs that it shares with the trainer, which accepts buckets."""
    with FakeEngines(1, 2, SHAPES, "bfloat16", colocated=True) as fakes:
        fakes.handle(0, "pause_generation", {})
        fakes.handle(0, "begin_weight_update", {})
        yield fakes


SHARED = "update_weights_from_tensor"


def test_a_complete_update_through_shared_memory_needs_no_group(colocated: FakeEngines) -> None:
    for size, name, version in ((12, "a", "1-partial"), (8, "b", "1")):
        colocated.handle(0, SHARED, {"serialized_named_tensors": [handle(size, name)] * 2, "weight_version": version})
        assert colocated.handle(0, "weights_checker", {})["per_engine_checksum"] == version
    colocated.handle(0, "end_weight_update", {})


@pytest.mark.parametrize(
    ("handles", "reason"),
    [
        ([handle(12, "a")], "1 handles for 2 ranks"),
        ([handle(12, "a"), handle(8, "b")], "handles of one bucket differ, or do not have its 12 bytes"),
        ([handle(14, "a"), handle(14, "a")], "do not have its 12 bytes"),
        ([handle(24, "a", "a")] * 2, "a came twice"),
    ],
)
def test_handles_that_sglang_cannot_load_are_refused(colocated: FakeEngines, handles: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=f"engine 0: .*{reason}"):
        colocated.handle(0, SHARED, {"serialized_named_tensors": handles, "weight_version": "1"})


def test_engines_on_other_gpus_refuse_handles(engines: FakeEngines) -> None:
    with pytest.raises(ValueError, match="handles"):
        engines.handle(0, SHARED, {"serialized_named_tensors": [handle(12, "a")] * 2, "weight_version": "1"})


def test_a_correction_bias_must_come_in_float32() -> None:
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    with FakeEngines(1, 1, {name: (4,)}, "bfloat16") as fakes:
        fakes.handle(0, "init_weights_update_group", {"world_size": 2, "rank_offset": 1})
        fakes.handle(0, "pause_generation", {})
        fakes.handle(0, "begin_weight_update", {})
        with pytest.raises(ValueError, match=r"is bfloat16 \[4\], the model has float32 \[4\]"):
            fakes.handle(0, UPDATE, bucket((name, [4])))
