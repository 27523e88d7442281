"""Host memory that a GPU copies to and from directly, of exactly the size that is asked for. Needs torch.

torch's own pinned memory comes in powers of two: 42.7 GiB take 64. Here ordinary memory is locked instead.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from agent_rl.errors import TrainerError


def host_tensor(count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """``count`` elements on the host, not initialised; ``pinned``: locked for a GPU as long as their memory is there.

    Raises TrainerError where CUDA can't lock it.
    """
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
