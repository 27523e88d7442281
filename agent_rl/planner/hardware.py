"""What a GPU can do at best, by its maker's data sheet: the one table of such facts. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agent_rl.config.run import GpuName


@dataclass(frozen=True, slots=True)
class Gpu:
    """``flops``: a second of dense matrix products (no sparsity), by precision. Bytes a second: ``memory`` to and from
    the GPU's own; ``link``, what leaves it for a GPU of its host (NVLink, one direction); ``network``, for another host
    (assumed: a network card for each GPU, of 200 Gbit/s with an A100, 400 with the others); ``host``, for the memory of
    its host (PCIe, one direction)."""

    flops: Mapping[str, float]
    memory: float
    link: float
    network: float
    host: float


GPUS: Mapping[GpuName, Gpu] = MappingProxyType(
    {
        "A100 SXM": Gpu({"bfloat16": 312e12, "float32": 19.5e12}, 2.039e12, 300e9, 25e9, 32e9),
        "H100 SXM": Gpu({"bfloat16": 989e12, "float32": 67e12}, 3.35e12, 450e9, 50e9, 64e9),
        "H200 SXM": Gpu({"bfloat16": 989e12, "float32": 67e12}, 4.8e12, 450e9, 50e9, 64e9),
        "B200 SXM": Gpu({"bfloat16": 2250e12, "float32": 80e12}, 8e12, 900e9, 50e9, 64e9),
    }
)
