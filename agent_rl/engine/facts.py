"""What a client has to know of a model, read from its Hugging Face ``config.json``. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.families import Family, family_of, is_moe
from r3.codec import RouteLayout


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The shape of a Mixture-of-Experts model as its routes show it.

    ``moe_layer_ids`` are 0-based; the other ``num_layers`` are dense. ``max_positions`` is the context length.
    """

    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    vocab_size: int
    max_positions: int

    @property
    def layout(self) -> RouteLayout:
        return RouteLayout(self.num_layers, self.moe_layer_ids, self.num_experts, self.top_k)


def read_facts(model: Path) -> ModelFacts:
    """Read the facts of the checkpoint in folder ``model``. Raises ConfigError, one line, for one we can't serve."""
    path = model / "config.json"
    if not model.is_dir():
        raise ConfigError(f"model: {model} is not a folder; name a Hugging Face checkpoint's, with config.json in it")
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"model: {model} has no config.json; name a Hugging Face checkpoint's folder") from None
    except ValueError as error:
        raise ConfigError(f"model: {path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model: {path} holds a {type(config).__name__}, expected an object")
    return _facts(config, family_of(config, path), path)


def _facts(config: Mapping[str, Any], family: Family, path: Path) -> ModelFacts:
    layers = _positive(config, "num_hidden_layers", path)
    moe = tuple(layer for layer in range(layers) if family.experts and is_moe(config, layer))
    if not moe:
        raise ConfigError(
            f"model: {path} has no MoE layer (model_type {config['model_type']}, decoder_sparse_step "
            f"{config.get('decoder_sparse_step', 1)}, mlp_only_layers {config.get('mlp_only_layers') or []})"
        )
    facts = ModelFacts(
        num_layers=layers,
        moe_layer_ids=moe,
        num_experts=_positive(config, family.key("num_experts"), path),
        top_k=_positive(config, "num_experts_per_tok", path),
        vocab_size=_positive(config, "vocab_size", path),
        max_positions=_positive(config, "max_position_embeddings", path),
    )
    if facts.top_k > facts.num_experts:
        raise ConfigError(f"model: {path} takes {facts.top_k} experts a token of {facts.num_experts}")
    return facts


def _positive(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"model: {path}: {key} must be a positive integer, got {value!r}")
    return value
