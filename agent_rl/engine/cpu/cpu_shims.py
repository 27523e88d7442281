"""Three shims without which sglang 0.5.23 does not start on a CPU-only torch. Imported before anything of sglang."""

from __future__ import annotations

import importlib
from typing import Any

import torch

_LIBRARIES: list[torch.library.Library] = []  # an operator lives as long as the library object that defined it


def install() -> None:
    """Define torchvision's operators and take the CUDA page locking out of the host buffers."""
    _define_torchvision_operators()
    _skip_page_locking()


def _define_torchvision_operators() -> None:
    # torchvision registers fake kernels for these on import, and its own extension does not load with a CPU torch.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def _skip_page_locking() -> None:
    # The buffer of captured routes always asks for pinned memory, which is a CUDA call.
    common: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.common")

    def no_page_locking(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
        return None

    common._cuda_host_register = no_page_locking
