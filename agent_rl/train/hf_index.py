"""The tensors of a Hugging Face checkpoint: expected by the config, and present by the headers of its files. Imports no
torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.models.files import read_object
from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import OUTPUT, embedding_tensor, model_parameters
from agent_rl.train.quantized.formats import Entry, Weight, weights
from r3.shard import stage_layers

Shapes = dict[str, tuple[int, ...]]

DTYPES: Mapping[str, str] = MappingProxyType({"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"})
"""The supported dtypes: safetensors' name to torch's."""


_DERIVED = ".rotary_emb.inv_freq"
"""Tensors that old checkpoints have and every program computes."""
_FURTHER_LAYERS = 3
"""The most layers for multi-token prediction that a published config has (``num_mtp_modules`` of MiniMax-M2)."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


@dataclass(slots=True)
class LoadProgress:
    """Bytes of weights that a rank needs and has read; grows while it reads."""

    needed: int = 0
    read: int = 0


def check_checkpoint(directory: Path, model_spec: ModelSpec, key: str = "model") -> None:
    """Raises ConfigError for a missing shard, for a tensor that is missing or has another shape than ``model_spec`` or
    an unsupported dtype, and for tensors that the model does not have. ``key``: the config key of the checkpoint. Reads
    only the headers of the files."""
    present, expected = read_weights(directory, key), expected_shapes(model_spec)
    for name, shape in expected.items():
        check_tensor(present, name, shape, f"{key}: {directory}")
    further = range(model_spec.num_layers, model_spec.num_layers + _FURTHER_LAYERS)
    known = tuple(prefix.format(layers=layer) for prefix in model_spec.family.untrained for layer in further)
    others = present.keys() - expected.keys() - {OUTPUT}  # a tied output layer may be saved too
    unknown = sorted(name for name in others if not name.startswith(known) and not name.endswith(_DERIVED))
    if unknown:
        raise ConfigError(
            f"{key}: {directory}: the checkpoint has {len(unknown)} tensors that a {model_spec.kind} model with its "
            f"config.json does not have, first {unknown[0][:200]!r}"
        )


def check_tensor(present: Mapping[str, Weight], name: str, shape: tuple[int, ...], context: str) -> None:
    """Raises ConfigError unless ``present`` has the tensor ``name`` with this shape and a supported dtype. The message
    begins with ``context``."""
    if name not in present:
        raise ConfigError(f"{context}: the checkpoint has no tensor {name}, of shape {list(shape)}")
    if present[name].shape != shape:
        actual = list(present[name].shape)
        raise ConfigError(f"{context}: {name} is {actual} in the checkpoint and {list(shape)} by config.json")
    if present[name].dtype not in DTYPES:
        raise ConfigError(f"{context}: {name} is {present[name].dtype}; supported: {', '.join(DTYPES)}")


def expected_shapes(model_spec: ModelSpec) -> Shapes:
    """The shape of every tensor by its Hugging Face name."""
    return {tensor.name: tensor.shape for _, parameter in model_parameters(model_spec) for tensor in parameter.tensors}


def sent_shapes(model_spec: ModelSpec, stage: int = 0, stages: int = 1, chunks: int = 1) -> Shapes:
    """The shape of every tensor that the sender of pipeline stage ``stage`` of ``stages``, with ``chunks`` model chunks
    each, sends to engines, in order. A tied output layer is sent after the embedding."""
    layers = [layer - 1 for chunk in stage_layers(model_spec.num_layers, stages, chunks)[stage] for layer in chunk]
    parameters = model_parameters(model_spec, layers, first=stage == 0, last=stage == stages - 1)
    sent = {tensor.name: tensor.shape for _, each in parameters if not each.copied for tensor in each.tensors}
    embedding = embedding_tensor(model_spec)
    return {embedding.name: embedding.shape, OUTPUT: embedding.shape} | sent if model_spec.tied and stage == 0 else sent


def adapter_update_shapes(model_spec: ModelSpec, rank: int) -> Shapes:
    """The tensors of an adapter update by the weight that each changes, for adapters of ``rank``: A beside the
    transpose of B (:mod:`agent_rl.engine.server.lora_merge`)."""
    return {
        tensor.name: (rank, sum(tensor.shape))
        for _, parameter in model_parameters(model_spec)
        if parameter.adapted
        for tensor in parameter.tensors
    }


def read_weights(directory: Path, key: str = "model") -> dict[str, Weight]:
    """As :func:`read_headers`, with a quantized tensor and its scales as one weight. Raises ConfigError also where
    these do not fit each other."""
    return {weight.name: weight for weight in weights(read_headers(directory, key), directory)}


def read_headers(directory: Path, key: str = "model") -> dict[str, Entry]:
    """Every tensor of the checkpoint in ``directory`` by name, of the files that its index names, if there is one.
    Raises ConfigError where a shard is missing, truncated or not a safetensors file."""
    files, index = sorted(directory.glob("*.safetensors")), directory / "model.safetensors.index.json"
    if not files:
        raise ConfigError(f"{key}: {directory}: holds no *.safetensors file")
    if index.is_file():
        named = _named_files(index)
        if missing := sorted(named - {file.name for file in files}):
            raise ConfigError(
                f"{key}: {directory}: {len(missing)} of {len(named)} shards are missing, first {missing[0]}"
            )
        files = [file for file in files if file.name in named]
    return {name: entry for file in files for name, entry in _entries(file)}


def _named_files(index: Path) -> set[str]:
    try:
        return set(read_object(index)["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index}: not a checkpoint index: {error}") from None


def _entries(file: Path) -> Iterator[tuple[str, Entry]]:
    header, begin = _header(file)
    for name, entry in header.items():
        yield name, Entry(file, entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0])


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the offset of its data."""
    try:
        with file.open("rb") as opened:
            size, length = int.from_bytes(opened.read(8), "little"), file.stat().st_size
            if size > min(length, _MAX_HEADER_BYTES):
                raise ValueError("its header is longer than the file, or than safetensors allows")
            header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            end = 8 + size + max((_checked_end(entry) for entry in header.values()), default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from None
    if length < end:
        raise ConfigError(f"{file}: truncated: {length} bytes, and its header describes {end}")
    return header, 8 + size


def _checked_end(entry: Mapping[str, Any]) -> int:
    """Where the data of a header's entry end. Raises ValueError, LookupError or TypeError for an invalid entry."""
    begin, end = entry["data_offsets"]
    numbers = (begin, end, *entry["shape"])
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(entry["dtype"], str):
        raise ValueError(f"an entry {str(entry)[:80]}")
    return int(end)
