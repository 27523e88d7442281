"""Writes Hugging Face checkpoints and adapters. Imports torch, but not Megatron."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.models.families import keeps_float32
from agent_rl.models.files import JSON_BYTES, read_text
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.megatron.safetensors_slices import SliceReader
from agent_rl.train.quantized.formats import without_quantization
from r3.atomic_write import write_atomic

_SHARD_BYTES = 4 << 30


def write_checkpoint(weights: Iterable[tuple[str, Tensor]], source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write ``weights`` as safetensors, with copies of the other files and of the other tensors of ``source`` (a vision
    tower, layers that predict further tokens). The directory appears atomically."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    copy_other_files(source, partial)
    _write_shards(_completed(weights, source, dtype), partial)
    if directory.exists():
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(directory, old)
        os.rename(partial, directory)
        shutil.rmtree(old)
    else:
        os.rename(partial, directory)


def copy_other_files(source: Path, directory: Path) -> None:
    """Copy the files of the checkpoint ``source`` that have no weights. ``config.json`` loses its
    ``quantization_config`` and nothing else."""
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".pt"):
            shutil.copy2(file, directory / file.name)
    text = read_text(source / "config.json", JSON_BYTES)
    if (plain := without_quantization(text)) != text:
        write_atomic(directory / "config.json", plain.encode())


def write_adapter(deltas: Sequence[tuple[str, Tensor, Tensor]], base: Path, directory: Path, lora: LoraConfig) -> None:
    """Write the result of :func:`export_adapters` in PEFT's format, with ``base`` as the base model."""
    tensors: dict[str, Tensor] = {}
    for name, a, b in deltas:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": _stored(a), f"{module}.lora_B.weight": _stored(b)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.rsplit(".", 2)[1] for name, _, _ in deltas}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", copy=True).contiguous()


def _completed(weights: Iterable[tuple[str, Tensor]], source: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """``weights`` on the CPU in the dtype of the checkpoint, then the other tensors of ``source`` as they are, but
    quantized ones in bfloat16."""
    names = set()
    for name, tensor in weights:
        names.add(name)
        kept = torch.float32 if keeps_float32(name) else dtype
        yield name, tensor.to(device="cpu", dtype=kept, copy=True).contiguous()
    with SliceReader(source) as reader:
        for name, weight in reader.weights.items():
            if name not in names:
                yield name, torch.cat(list(reader.parts(name, LoadProgress()))).view(weight.shape)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(pending, directory / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        pending[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        if size >= _SHARD_BYTES:
            flush()
            size = 0
    if pending:
        flush()
    _name_shards(directory, shards, total)


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        os.rename(directory / "part-0.safetensors", directory / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(directory / f"part-{number}.safetensors", directory / file)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (directory / "model.safetensors.index.json").write_text(text)
