"""Buckets that engines read in place, on the GPUs that they share with the trainer (``engine.colocate``).

Every rank of the trainer fills the same buckets on its own GPU, and rank 0 tells each engine where they are::

    rank i    fill a bucket ── its handle ──▶ rank 0
    rank 0    /update_weights_from_tensor ──▶ each engine: one handle for each tensor rank, of the trainer's rank on
                                              the same GPU. The engine copies the weights and replies.

A handle is a pickle in SGLang's format ``flattened_bucket``. On a GPU it holds the CUDA IPC handle, with the GPU by its
UUID, because the processes number their GPUs differently. On a CPU it holds the name of shared memory.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from agent_rl.config import EngineConfig
from agent_rl.errors import WeightSyncError
from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import joined_tensors
from agent_rl.weight_sync.buckets import Bucket, buckets

_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE = "expandable_segments:"
_REDUCED_DEVICE = 6
"""The place of the device among the arguments of torch's ``rebuild_cuda_tensor``."""


class SharedBuckets:
    """The buckets that this rank shares with engines in one update.

    ``gather`` returns what all ranks gave, by rank, when all have called it. ``gpu``: the name of this rank's GPU, as
    in ``CUDA_VISIBLE_DEVICES``. At most two buckets exist at a time: the one that engines load and the next. Methods
    but :meth:`positions` are collective.
    """

    def __init__(self, gather: Callable[[Any], Sequence[Any]], gpu: str) -> None:
        self._gather, self._held = gather, deque[Tensor]()
        self._gpus = gather(gpu)

    def positions(self, urls: Sequence[str], gpus: Sequence[Sequence[str]], ranks: Sequence[int]) -> list[list[int]]:
        """By engine: the trainer's ranks on the GPUs of its tensor ranks. ``ranks``: how many these are. Raises
        WeightSyncError where there is no such rank."""
        for url, names, count in zip(urls, gpus, ranks, strict=True):
            if len(names) != count or not set(names) <= set(self._gpus):
                raise WeightSyncError(
                    f"{url} has {count} ranks on GPUs {', '.join(names)}, the trainer has GPUs {', '.join(self._gpus)}"
                )
        return [[self._gpus.index(name) for name in names] for names in gpus]

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """A uint8 tensor ``[size]`` that engines can open. Rank 0 has the replies to the bucket before the last."""
        self._gather(None)
        if len(self._held) > 1:
            self._held.popleft()
        if device.type == "cuda":
            with _outside_expandable_segments():
                data = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            torch.multiprocessing.set_sharing_strategy("file_system")  # engines are no children of this process
            data = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
        self._held.append(data)
        return data

    def handles(self, bucket: Bucket) -> Sequence[bytes]:
        """By rank: the handle of this bucket there."""
        return self._gather(_handle(bucket))

    def close(self) -> None:
        """Free the buckets, after the last reply."""
        self._gather(None)
        self._held.clear()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def shared_buckets(
    weights: Iterable[tuple[str, Tensor]],
    model_spec: ModelSpec,
    config: EngineConfig,
    device: torch.device,
    shared: SharedBuckets,
) -> Iterator[Bucket]:
    """Buckets of ``weights`` (Hugging Face names) with their handles on all ranks. Collective."""
    limit = int(config.bucket_mb(cuda=device.type == "cuda") * 2**20)
    joined, dtype = joined_tensors(model_spec), getattr(torch, config.dtype)
    for bucket in buckets(weights, dtype, limit=limit, joined=joined, allocate=shared.allocate):
        yield replace(bucket, handles=shared.handles(bucket))


def _handle(bucket: Bucket) -> bytes:
    metadata, start = [], 0
    for name, shape, dtype in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
        size = torch.Size(shape).numel() * dtype.itemsize
        entry = {"name": name, "shape": torch.Size(shape), "dtype": dtype, "numel": size}
        metadata.append(SimpleNamespace(**entry, start_idx=start, end_idx=start + size))
        start += size
    buffer = io.BytesIO()
    _Pickler(buffer).dump({"flattened_tensor": bucket.data, "metadata": metadata})
    return buffer.getvalue()


class _Pickler(ForkingPickler):
    """Pickles tensors by reference, those on a GPU with its UUID, as SGLang's ``patch_torch`` reads it."""

    def reducer_override(self, item: Any) -> Any:
        if not (isinstance(item, Tensor) and item.is_cuda):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(item)
        uuid = str(torch.cuda.get_device_properties(item.device).uuid)
        return rebuild, (*arguments[:_REDUCED_DEVICE], uuid, *arguments[_REDUCED_DEVICE + 1 :])


@contextmanager
def _outside_expandable_segments() -> Iterator[None]:
    """Memory that is allocated inside has a CUDA IPC handle, which that of expandable segments has not."""
    settings = os.environ.get(_ALLOCATOR, "")
    if f"{_EXPANDABLE}True" not in settings:
        yield
        return
    apply = torch.cuda.memory._set_allocator_settings
    apply(settings.replace(f"{_EXPANDABLE}True", f"{_EXPANDABLE}False"))
    try:
        yield
    finally:
        apply(settings)
