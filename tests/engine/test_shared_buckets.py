"""Handles of buckets on GPUs that trainer and engine share, as far as no GPU is needed."""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the trainer environment")

from agent_rl.errors import WeightSyncError  # noqa: E402
from agent_rl.weight_sync import shared_buckets  # noqa: E402
from agent_rl.weight_sync.shared_buckets import SharedBuckets  # noqa: E402


def test_each_tensor_rank_gets_the_handle_of_its_own_gpu() -> None:
    shared = SharedBuckets(lambda item: ["3", "2", "1", "0"], "3")
    assert shared.positions(["a", "b"], [["0", "1"], ["2", "3"]], [2, 2]) == [[3, 2], [1, 0]]
    with pytest.raises(WeightSyncError, match="a has 1 ranks on GPUs 4, the trainer has GPUs 3, 2, 1, 0"):
        shared.positions(["a"], [["4"]], [1])
    with pytest.raises(WeightSyncError, match="a has 2 ranks on GPUs 0"):
        shared.positions(["a"], [["0"]], [2])


def test_a_handle_names_the_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's ``patch_torch`` finds the GPU by it: argument 6 of ``rebuild_cuda_tensor``."""
    rebuild = torch.multiprocessing.reductions.rebuild_cuda_tensor
    names = rebuild.__code__.co_varnames[: rebuild.__code__.co_argcount]
    assert names[shared_buckets._REDUCED_DEVICE] == "storage_device"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(shared_buckets.reductions, "reduce_tensor", lambda item: (rebuild, tuple(range(15))))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    buffer = io.BytesIO()
    shared_buckets._Pickler(buffer).dump(torch.zeros(1))
    monkeypatch.setattr(torch.multiprocessing.reductions, "rebuild_cuda_tensor", lambda *arguments: arguments)
    assert pickle.loads(buffer.getvalue()) == (*range(6), "GPU-7", *range(7, 15))


@pytest.mark.parametrize(
    ("settings", "applied"),
    [
        ("", []),
        ("expandable_segments:False", []),
        (
            "expandable_segments:True,max_split_size_mb:64",
            ["expandable_segments:False,max_split_size_mb:64", "expandable_segments:True,max_split_size_mb:64"],
        ),
    ],
)
def test_buckets_lie_outside_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, settings: str, applied: list[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", calls.append)
    with shared_buckets._outside_expandable_segments():
        assert calls == applied[:1]
    assert calls == applied


def test_two_buckets_exist_at_a_time() -> None:
    shared = SharedBuckets(lambda item: [item], "0")
    for _ in range(3):
        shared.allocate(8, torch.device("cpu"))
    assert len(shared._held) == 2
    shared.close()
    assert not shared._held
