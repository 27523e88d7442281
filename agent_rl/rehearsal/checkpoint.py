"""Which tensors a model's Hugging Face checkpoint has, and of what shapes: said by its config, and by its files' heads.
Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from agent_rl.errors import ConfigError
from agent_rl.model_facts import ModelFacts

Shapes = dict[str, tuple[int, ...]]


def check_checkpoint(folder: Path, facts: ModelFacts) -> None:
    """Raises ConfigError, one line, for a shard that is missing, or a tensor that is or has another shape than
    ``facts`` say. Reads the files' heads alone."""
    held = _held(folder)
    for name, shape in expected_shapes(facts).items():
        if name not in held:
            raise ConfigError(f"model: {folder}: the checkpoint has no tensor {name}, of shape {list(shape)}")
        if held[name] != shape:
            raise ConfigError(
                f"model: {folder}: {name} is {list(held[name])} in the checkpoint and {list(shape)} by config.json"
            )


def expected_shapes(facts: ModelFacts) -> Shapes:
    """Every tensor by its Hugging Face name."""
    shapes: Shapes = {"model.embed_tokens.weight": (facts.vocab_size, facts.hidden)}
    for layer in range(facts.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(facts, facts.moe[layer])}
    shapes["model.norm.weight"] = (facts.hidden,)
    if not facts.tied:
        shapes["lm_head.weight"] = (facts.vocab_size, facts.hidden)
    return shapes


def _layer(facts: ModelFacts, moe: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
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


def _held(folder: Path) -> Shapes:
    """What the files in ``folder`` hold."""
    files, index = sorted(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(named - {file.name for file in files}):
            raise ConfigError(f"model: {folder}: {len(missing)} of {len(named)} shards are missing, first {missing[0]}")
    return {name: shape for file in files for name, shape in _head(file)}


def _head(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > file.stat().st_size:
                raise ValueError("its head is longer than the file")
            entries = json.loads(opened.read(size))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {file}: no safetensors file: {error}") from None
    yield from ((name, tuple(entry["shape"])) for name, entry in entries.items() if name != "__metadata__")
