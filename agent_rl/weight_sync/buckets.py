"""The buckets of a weight update: several tensors in one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from agent_rl.errors import WeightSyncError
from agent_rl.models.families import keeps_float32
from agent_rl.models.tensors import fill_buckets


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Tensors sent together: ``data`` uint8 is the concatenation of their bytes, in the order of ``names``. Those of
    wider dtypes come first, so that every offset is a multiple of its tensor's element size. ``handles``: of this
    bucket on every rank of the trainer, where engines share its memory (:mod:`.shared_buckets`)."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    data: Tensor
    last: bool
    handles: Sequence[bytes] = ()


def _allocate(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def buckets(
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    limit: int,
    joined: Collection[str] = (),
    allocate: Callable[[int, torch.device], Tensor] = _allocate,
) -> Iterator[Bucket]:
    """Group ``weights`` into buckets of about ``limit`` bytes (:func:`agent_rl.models.tensors.fill_buckets`),
    converted to ``dtype`` except those that stay float32 (:func:`agent_rl.models.families.keeps_float32`). The last
    bucket is marked. ``allocate`` makes the memory of a bucket."""

    def size(item: tuple[str, Tensor]) -> int:
        return item[1].numel() * sent_dtype(item[0], dtype).itemsize

    items = ((name, tensor.detach()) for name, tensor in weights)
    for tensors, last in fill_buckets(items, itemgetter(0), size, limit=limit, joined=joined):
        if not tensors:
            raise WeightSyncError("the model has no weights to send")
        yield _bucket(tensors, dtype, allocate, last=last)


def _bucket(
    tensors: Sequence[tuple[str, Tensor]],
    dtype: torch.dtype,
    allocate: Callable[[int, torch.device], Tensor],
    *,
    last: bool,
) -> Bucket:
    """Concatenate ``tensors``; each is converted while it is copied."""
    tensors = sorted(tensors, key=lambda item: -sent_dtype(item[0], dtype).itemsize)
    dtypes = tuple(sent_dtype(name, dtype) for name, _ in tensors)
    sizes = [tensor.numel() * kind.itemsize for (_, tensor), kind in zip(tensors, dtypes, strict=True)]
    data = allocate(sum(sizes), tensors[0][1].device)
    for (_, tensor), kind, target in zip(tensors, dtypes, data.split(sizes), strict=True):
        target.view(kind).view(tensor.shape).copy_(tensor)
    return Bucket(
        names=tuple(name for name, _ in tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
        dtypes=dtypes,
        data=data,
        last=last,
    )


def sent_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if keeps_float32(name) else dtype
