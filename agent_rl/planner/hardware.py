"""Peak speeds of GPUs from the vendor's data sheets. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agent_rl.config.run import GpuName


@dataclass(frozen=True, slots=True)
class Gpu:
    """``flops``: FLOP/s of dense matrix products (no sparsity), by precision. In bytes/s: ``memory`` bandwidth of the
    GPU; ``link`` to a GPU of the same node (NVLink, one direction); ``network`` to another node (assumes one network
    card per GPU: 200 Gbit/s for an A100, 400 Gbit/s for the others); ``host`` to host memory (PCIe, one direction)."""

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
