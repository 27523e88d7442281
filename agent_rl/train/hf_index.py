"""Which tensors a model's Hugging Face checkpoint has, of what shapes and where: by its config, and by its files'
heads. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.models.spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]

DTYPES: Mapping[str, str] = MappingProxyType({"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"})
"""The dtypes that are read, by safetensors' names: torch's."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a safetensors file, row by row from byte ``start`` on; ``dtype`` by safetensors' name."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


@dataclass(slots=True)
class LoadProgress:
    """How far a rank is with reading weights, in bytes; grows while it reads."""

    needed: int = 0
    read: int = 0


def check_checkpoint(directory: Path, facts: ModelSpec, key: str = "model") -> None:
    """Raises ConfigError, one line, for a shard that is missing, and for a tensor that is missing, has another shape
    than ``facts`` say or a dtype that is not read; ``key`` is the config's that names it. Reads the files' heads
    alone."""
    held = read_heads(directory, key)
    for name, shape in expected_shapes(facts).items():
        check_tensor(held, name, shape, f"{key}: {directory}")


def check_tensor(held: Mapping[str, Entry], name: str, shape: tuple[int, ...], where: str) -> None:
    """Raises ConfigError, one line that begins with ``where``, unless ``held`` has the tensor ``name``, of this shape
    and of a dtype that is read."""
    if name not in held:
        raise ConfigError(f"{where}: the checkpoint has no tensor {name}, of shape {list(shape)}")
    if held[name].shape != shape:
        found = list(held[name].shape)
        raise ConfigError(f"{where}: {name} is {found} in the checkpoint and {list(shape)} by config.json")
    if held[name].dtype not in DTYPES:
        raise ConfigError(f"{where}: {name} is {held[name].dtype}; {', '.join(DTYPES)} are read")


def expected_shapes(facts: ModelSpec) -> Shapes:
    """Every tensor by its Hugging Face name."""
    shapes: Shapes = {"model.embed_tokens.weight": (facts.vocab_size, facts.hidden)}
    for layer in range(facts.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(facts, facts.moe[layer])}
    shapes["model.norm.weight"] = (facts.hidden,)
    if not facts.tied:
        shapes["lm_head.weight"] = (facts.vocab_size, facts.hidden)
    return shapes


def change_shapes(facts: ModelSpec, rank: int) -> Shapes:
    """What an engine is sent of adapters of ``rank`` instead of weights, by the weight that each changes: A beside the
    transpose of B (:mod:`agent_rl.engine.server.lora_merge`)."""
    adapted = (".q_proj.weight", ".k_proj.weight", ".v_proj.weight", ".o_proj.weight")
    return {
        name: (rank, sum(shape))
        for name, shape in expected_shapes(facts).items()
        if name.endswith(adapted) or ".experts." in name
    }


def _layer(facts: ModelSpec, moe: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, widths = facts.hidden, {"q": facts.q_width, "k": facts.kv_width, "v": facts.kv_width}
    for part, width in widths.items():
        yield f"self_attn.{part}_proj.weight", (width, hidden)
        if facts.qkv_bias:
            yield f"self_attn.{part}_proj.bias", (width,)
    yield "self_attn.o_proj.weight", (hidden, facts.q_width)
    if facts.family.qk_norm:
        yield "self_attn.q_norm.weight", (facts.head_dim,)
        yield "self_attn.k_norm.weight", (facts.head_dim,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if not moe:
        yield from _mlp("mlp", ("gate_proj", "up_proj", "down_proj"), hidden, facts.inner)
        return
    family = facts.family
    yield family.router, (facts.num_experts, hidden)
    for expert in range(facts.num_experts):
        yield from _mlp(family.expert.format(expert), family.expert_parts, hidden, facts.expert_inner)
    if facts.shared_inner:
        yield from _mlp("mlp.shared_expert", ("gate_proj", "up_proj", "down_proj"), hidden, facts.shared_inner)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _mlp(name: str, parts: tuple[str, ...], hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    gate, up, down = parts
    yield f"{name}.{gate}.weight", (inner, hidden)
    yield f"{name}.{up}.weight", (inner, hidden)
    yield f"{name}.{down}.weight", (hidden, inner)


def read_heads(directory: Path, key: str = "model") -> dict[str, Entry]:
    """Every tensor of the checkpoint in ``directory`` by its name; of the files that its index names, where it has
    one, as the engine does. Raises ConfigError, one line, where a shard is missing, cut short or no safetensors
    file."""
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
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index}: no index of a checkpoint: {error}") from None


def _entries(file: Path) -> Iterator[tuple[str, Entry]]:
    head, begin = _head(file)
    for name, entry in head.items():
        yield name, Entry(file, entry["dtype"], tuple(entry["shape"]), begin + entry["data_offsets"][0])


def _head(file: Path) -> tuple[dict[str, Any], int]:
    """What the file says of its tensors, and where their bytes begin."""
    try:
        with file.open("rb") as opened:
            size, length = int.from_bytes(opened.read(8), "little"), file.stat().st_size
            if size > length:
                raise ValueError("its head is longer than the file")
            head = json.loads(opened.read(size))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: no safetensors file: {error}") from None
    head.pop("__metadata__", None)
    end = 8 + size + max((entry["data_offsets"][1] for entry in head.values()), default=0)
    if length < end:
        raise ConfigError(f"{file}: it is cut short: {length} bytes, and its head names {end}")
    return head, 8 + size
