"""Tiny checkpoints as they are published in float8 and mxfp4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.family_models import write_model

BLOCK = 16


def write_float8_model(directory: Path, kind: str, **changes: Any) -> Path:
    """As ``write_model``, with the projections in float8 and a scale for each block of 16 x 16."""
    import torch
    from safetensors.torch import load_file, save_file

    model = write_model(directory, kind, seed=0, torch_dtype="bfloat16", **changes)
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        sizes = [-(-size // BLOCK) for size in tensor.shape]
        tensors[name] = (tensor * 100).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.linspace(0.008, 0.012, sizes[0] * sizes[1]).view(sizes)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return _quantized(model, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})


def write_mxfp4_model(directory: Path, kind: str, **changes: Any) -> Path:
    """As ``write_model`` of a family with clamped experts, whose weights are 4-bit numbers with a scale for every 32
    inputs."""
    import torch
    from safetensors.torch import load_file, save_file

    model = write_model(directory, kind, seed=0, torch_dtype="bfloat16", intermediate_size=64, **changes)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        sizes = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*sizes, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 123, sizes, generator=generator, dtype=torch.uint8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return _quantized(model, {"quant_method": "mxfp4"})


def _quantized(model: Path, settings: dict[str, Any]) -> Path:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return model
