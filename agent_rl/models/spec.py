"""What a checkpoint's ``config.json`` says of its model: read once, and passed on to all that needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.models.families import FAMILIES, Family, is_moe, read_config
from r3.payload import RouteLayout


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the engine, the trainer and the plan know it; after ``kind``, the ``model_type``, come its sizes.

    ``moe[i]``: layer i is a mixture of experts. ``hidden`` is the width of the residual stream, ``inner`` that of a
    dense layer's MLP, ``expert_inner`` of an expert's and ``shared_inner`` of a shared expert's (0: it has none).
    ``max_positions`` is the context's length in tokens. ``rope_scaling`` is None or YaRN's settings as
    :func:`agent_rl.models.families.read_config` checks them. What has a default decides nothing about sizes.
    """

    kind: str
    moe: tuple[bool, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int
    max_positions: int
    num_experts: int = 0
    top_k: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    tied: bool = False
    qkv_bias: bool = False
    norm_topk_prob: bool = True
    norm_eps: float = 1e-6
    init_std: float = 0.02
    rope_theta: float = 1e6
    rope_scaling: Mapping[str, float] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSpec:
        """From a config under Qwen3-MoE's key names, as :func:`agent_rl.models.families.read_config` gives it."""
        experts = FAMILIES[config["model_type"]].experts
        moe = tuple(experts and is_moe(config, layer) for layer in range(config["num_hidden_layers"]))
        values = {name: config[key] for name, key in _KEYS.items() if config.get(key) is not None}
        values |= {name: config[key] for name, key in _EXPERT_KEYS.items() if any(moe)}
        values.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        return cls(moe=moe, **values)

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    @property
    def num_layers(self) -> int:
        return len(self.moe)

    @property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """The layers with experts, from 0; the others are dense."""
        return tuple(layer for layer, moe in enumerate(self.moe) if moe)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layout(self) -> RouteLayout | None:
        """The shape of its routes as an engine sends them; None for a dense model, which has none."""
        if not any(self.moe):
            return None
        return RouteLayout(self.num_layers, self.moe_layer_ids, self.num_experts, self.top_k)


_KEYS = {
    "kind": "model_type",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "inner": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "shared_inner": "shared_expert_intermediate_size",
    "tied": "tie_word_embeddings",
    "qkv_bias": "qkv_bias",
    "norm_topk_prob": "norm_topk_prob",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
}
_EXPERT_KEYS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_inner": "moe_intermediate_size",
}


def read_model_spec(directory: Path) -> ModelSpec:
    """The facts of the checkpoint in ``directory``. Raises ConfigError, one line, for one that we do not compute."""
    return ModelSpec.of(read_config(directory))


def read_moe_spec(directory: Path) -> ModelSpec:
    """As :func:`read_model_spec`, of a model that an engine gives routes of. Raises ConfigError for one without
    experts."""
    facts = read_model_spec(directory)
    refuse_dense(facts, directory)
    return facts


def refuse_dense(facts: ModelSpec, directory: Path) -> None:
    """Raises ConfigError for a model without an MoE layer, of which an engine has no routes."""
    if not any(facts.moe):
        raise ConfigError(
            f"model: {directory} has no MoE layer (model_type {facts.kind}), so it has no routes to replay"
        )


def difference(facts: ModelSpec, others: ModelSpec) -> str | None:
    """What first tells ``others`` from ``facts``, as "num_experts 64, not 128"; None where they differ in no more than
    their weights."""
    compared = [field.name for field in fields(ModelSpec) if field.name != "init_std"]
    name = next((name for name in compared if getattr(facts, name) != getattr(others, name)), None)
    if name is None:
        return None
    named = _KEYS.get(name) or _EXPERT_KEYS.get(name) or "layers with experts"
    return f"{named} {getattr(others, name)!r}, not {getattr(facts, name)!r}"


def check_alike(facts: ModelSpec, directory: Path, other: Path, key: str) -> None:
    """Refuse a checkpoint ``other`` of another architecture than ``facts``, those of the checkpoint in ``directory``.

    Raises ConfigError, which names the config key ``key``.
    """
    if (found := difference(facts, read_model_spec(other))) is not None:
        raise ConfigError(f"{key}: {other} has {found} as {directory}: name a checkpoint of the same architecture")
