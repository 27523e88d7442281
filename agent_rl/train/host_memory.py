"""Host memory: how much is free, and tensors that a GPU copies to and from directly. Imports torch for
tensors only.

torch's own pinned memory is allocated in powers of two: 42.7 GiB take 64. :func:`host_tensor` pins ordinary memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from agent_rl.errors import TrainerError
from sandbox.cgroup import cgroup_directories

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of control groups, versions 2 and 1: the limit, the usage, and its part that the kernel can reclaim."""


def free_memory() -> int:
    """Free bytes: of the node, or of the most limited control group of this process."""
    groups = [group for directory in cgroup_directories("self").values() for group in (directory, *directory.parents)]
    return min([_node(), *(free for group in groups for free in _group_limits(group))])


def _node() -> int:
    return 1024 * _field(Path("/proc/meminfo"), "MemAvailable:")


def _group_limits(group: Path) -> Iterator[int]:
    """The free bytes under a control group's limit; nothing where it has none or cannot be read."""
    for limit, used, cache in _FILES:
        with contextlib.suppress(OSError, ValueError):  # version 2 writes "max" for no limit
            unused = int((group / limit).read_text()) - int((group / used).read_text())
            yield unused + _field(group / "memory.stat", cache)


def _field(path: Path, name: str) -> int:
    """The number after ``name`` in a file with a name and a number per line; 0 where it is missing."""
    lines = (line.split() for line in path.read_text().splitlines())
    return next((int(fields[1]) for fields in lines if fields[0] == name), 0)


def host_tensor(count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """``count`` uninitialized elements on the host. ``pinned``: locked for a GPU while the memory lives.

    Raises TrainerError where CUDA cannot lock it.
    """
    import torch

    tensor = torch.empty(count, dtype=dtype, device="cpu")
    if pinned and tensor.nbytes:
        cuda, start = torch.cuda.cudart(), tensor.data_ptr()
        if error := int(cuda.cudaHostRegister(start, tensor.nbytes, 0)):
            raise TrainerError(
                f"CUDA could not lock {tensor.nbytes / 2**30:.1f} GiB of host memory (error {error}): free some, or "
                "raise the limit of locked memory (ulimit -l)"
            )
        weakref.finalize(tensor.untyped_storage(), cuda.cudaHostUnregister, start)
    return tensor
