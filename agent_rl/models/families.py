"""The supported model families, one table entry each. Imports no torch.

:func:`read_config` converts a Hugging Face ``config.json`` to the key names of Qwen3-MoE. Keys that are not in the
tables below may change what the model computes, so they are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.models.files import read_object


@dataclass(frozen=True, slots=True)
class Family:
    """Differences from a plain decoder (pre-norm with RMSNorm, rotary embedding, gated SiLU MLPs).

    ``keys``: the family's config keys that differ from Qwen3-MoE's, by Qwen3-MoE's name. ``defaults``: values of
    missing keys; other missing keys are errors. ``fixed``: values that the family's configs cannot change. ``qk_norm``:
    queries and keys are normalized per head. ``qkv_bias``: the q, k and v projections have a bias. ``experts``: layers
    may be MoE layers. ``shared_expert``: MoE layers have a shared expert with a sigmoid gate. ``windowed``: a
    ``sliding_window`` in the config is active, because the family has no ``use_sliding_window``. ``router``,
    ``expert``, ``expert_parts`` (gate, up, down): Hugging Face names of an MoE layer's tensors.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    experts: bool = False
    shared_expert: bool = False
    windowed: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    router: str = "mlp.gate.weight"
    expert: str = "mlp.experts.{}"
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def key(self, name: str) -> str:
        """The family's config key for Qwen3-MoE's key ``name``."""
        return self.keys.get(name, name)


_MIXED = {"decoder_sparse_step": 1, "mlp_only_layers": ()}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2": Family(qkv_bias=True),
        "qwen3": Family(qk_norm=True),
        "qwen2_moe": Family(qkv_bias=True, experts=True, shared_expert=True, defaults=_MIXED),
        "qwen3_moe": Family(qk_norm=True, experts=True, defaults=_MIXED),
        "mixtral": Family(
            experts=True,
            windowed=True,
            keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            fixed={**_MIXED, "norm_topk_prob": True},
            router="block_sparse_moe.gate.weight",
            expert="block_sparse_moe.experts.{}",
            expert_parts=("w1", "w3", "w2"),
        ),
    }
)

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_REQUIRED = (*_SIZES, "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", *_MIXED)
_OPTIONAL = {"head_dim": None, "tie_word_embeddings": False, "initializer_range": 0.02}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")

# Keys with the only supported values (first one shown in errors). Missing keys are accepted.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, None),
    "router_jitter_noise": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}

# Keys that do not change the logits: special tokens, generation, unused training losses, metadata. ``sliding_window``
# and ``max_window_layers`` matter only with ``use_sliding_window`` (Mixtral: see _check_values).
_IGNORED = frozenset(
    {
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "router_aux_loss_coef",
        "sliding_window",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


_MAX_SIZE = (1 << 31) - 1
_MAX_PARTS = 1 << 18
"""Limit of layers x experts: each has tensors of its own."""


def read_config(directory: Path) -> dict[str, Any]:
    """The config of the checkpoint in ``directory`` with Qwen3-MoE's key names and its ``model_type``, as
    :func:`_checked` returns it."""
    path = directory / "config.json"
    raw = _read(path)
    try:
        return _checked(raw, path)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path}: not a model's config: {error}") from None


def _checked(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """``raw`` with Qwen3-MoE's key names and its ``model_type``.

    ``rope_scaling`` is None or a checked mapping (see :func:`_rope`). Raises ConfigError for a missing file or key, an
    unsupported architecture, and unknown keys or values that may change what the model computes.
    """
    family = _family_of(raw, path)
    _check_keys(raw, family, path)
    _check_values(raw, family, path)
    required = _REQUIRED + (_EXPERTS if family.experts else ())
    config = {"model_type": raw["model_type"], **{name: _value(raw, family, name, path) for name in required}}
    config |= {name: raw.get(name, default) for name, default in _OPTIONAL.items()}
    if family.shared_expert:
        config["shared_expert_intermediate_size"] = _value(raw, family, "shared_expert_intermediate_size", path)
    _check_sizes(config, family, path)
    config["qkv_bias"] = raw.get("qkv_bias", family.qkv_bias)
    config["rope_theta"], config["rope_scaling"] = _rope(raw, path)
    return config


def is_moe(config: Mapping[str, Any], layer: int) -> bool:
    """Whether ``layer`` (from 0) is an MoE layer: every ``decoder_sparse_step``-th except ``mlp_only_layers``."""
    step = config.get("decoder_sparse_step", 1)
    return layer not in (config.get("mlp_only_layers") or ()) and step > 0 and (layer + 1) % step == 0


def _read(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is not a directory; expected a Hugging Face checkpoint with config.json")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a file")
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no config.json; expected a Hugging Face checkpoint") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None


def _family_of(config: Mapping[str, Any], path: Path) -> Family:
    """The family of a config's ``model_type``. Raises ConfigError with the supported values."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"{path}: model_type {kind!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]


def _value(raw: Mapping[str, Any], family: Family, name: str, path: Path) -> Any:
    if name in family.fixed:
        return family.fixed[name]
    key = family.key(name)
    value = raw.get(key)
    if value is None:
        value = family.defaults.get(name)
    if value is None:
        raise ConfigError(f"{path}: {key} is missing; {raw['model_type']} requires it")
    return value


def _check_keys(raw: Mapping[str, Any], family: Family, path: Path) -> None:
    specific = {family.key(name) for name in _EXPERTS if name not in family.fixed} if family.experts else set()
    if family.shared_expert:
        specific.add("shared_expert_intermediate_size")
    if family.qkv_bias:
        specific.add("qkv_bias")
    known = specific | {*_REQUIRED, *_OPTIONAL, *_ROPE, *_SUPPORTED_VALUES, *_IGNORED, "layer_types"}
    unknown = sorted(key for key in raw if key not in known and not key.startswith("_") and raw[key] is not None)
    if unknown:
        raise ConfigError(
            f"{path}: {unknown[0]}={raw[unknown[0]]!r} is not supported for {raw['model_type']} and may change what "
            "the model computes; remove it if it does not"
        )


def _check_values(raw: Mapping[str, Any], family: Family, path: Path) -> None:
    for key, allowed in _SUPPORTED_VALUES.items():
        if key in raw and raw[key] not in allowed:
            raise ConfigError(f"{path}: {key}={raw[key]!r} is not supported, only {allowed[0]!r} is")
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ConfigError(
            f"{path}: layer_types={sorted(set(raw['layer_types']))} is not supported, only full_attention"
        )
    if family.windowed and raw.get("sliding_window"):
        raise ConfigError(f"{path}: sliding_window={raw['sliding_window']!r} is not supported, only None is")


def _check_sizes(config: Mapping[str, Any], family: Family, path: Path) -> None:
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size") if family.experts else ()
    for name in (*_SIZES, "num_key_value_heads", "max_position_embeddings", *experts):
        value = config[name]
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"{path}: {family.key(name)} must be a positive integer, got {value!r}")
        if value > _MAX_SIZE:
            raise ConfigError(f"{path}: {family.key(name)} must be at most {_MAX_SIZE}")
    if (parts := config["num_hidden_layers"] * (config["num_experts"] if experts else 1)) > _MAX_PARTS:
        raise ConfigError(f"{path}: {parts} layers and experts, more than the {_MAX_PARTS} allowed")
    if experts and config["num_experts_per_tok"] > config["num_experts"]:
        raise ConfigError(
            f"{path}: num_experts_per_tok is {config['num_experts_per_tok']}; it must be at most num_experts "
            f"({config['num_experts']})"
        )


def _rope(raw: Mapping[str, Any], path: Path) -> tuple[float, dict[str, float] | None]:
    """Theta and the YaRN scaling, from ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` in newer files."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", raw.get("rope_theta"))
    if not theta:
        raise ConfigError(f"{path}: rope_theta is missing; {raw['model_type']} requires it")
    kinds = {scaling.pop(key) for key in ("rope_type", "type") if key in scaling} or {"default"}
    if kinds == {"default"} and not scaling:
        return float(theta), None
    if kinds != {"yarn"}:
        raise ConfigError(
            f"{path}: rope_scaling of type {'/'.join(sorted(kinds))} is not supported; yarn and default are"
        )
    return float(theta), _yarn(scaling, raw, path)


def _yarn(scaling: dict[str, Any], raw: Mapping[str, Any], path: Path) -> dict[str, float]:
    values = {"beta_fast": 32.0, "beta_slow": 1.0}
    for key in ("factor", "original_max_position_embeddings", *values):
        if key in scaling:
            values[key] = float(scaling.pop(key))
        elif key not in values:
            raise ConfigError(f"{path}: rope_scaling requires {key} with yarn")
    if scaling:  # engine and reference interpret attention_factor, mscale and truncate differently
        raise ConfigError(f"{path}: rope_scaling.{min(scaling)} is not supported with yarn")
    # SGLang's fused CUDA kernel uses the ratio of the two lengths as the factor, its other kernels use the factor.
    length, reach = raw.get("max_position_embeddings"), values["factor"] * values["original_max_position_embeddings"]
    if length != reach:
        raise ConfigError(
            f"{path}: max_position_embeddings={length} must equal rope_scaling's factor x "
            f"original_max_position_embeddings = {reach:g}, because engines use either value"
        )
    return values
