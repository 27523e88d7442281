"""A model's architecture, as its checkpoint's ``config.json`` describes it. A run reads it once and passes it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from agent_rl.errors import ConfigError
from agent_rl.models.families import FAMILIES, Family, QkNorm, is_moe, read_config
from agent_rl.models.parts import Delta, ExpertForm, Indexer, Latent, Mamba, Mixer
from r3.payload import RouteLayout


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The architecture that engine, trainer and planner share. ``kind`` is the ``model_type``; the sizes follow.

    ``moe[i]``: layer i is a mixture of experts. ``hidden`` is the width of the residual stream, ``inner`` that of a
    dense layer's MLP, ``expert_inner`` that of an expert and ``shared_inner`` that of the shared expert (0: none).
    ``max_positions`` is the context length in tokens. ``rope_scaling`` is None or YaRN's settings, checked by
    :func:`agent_rl.models.families.read_config`. ``qk_norm``: queries and keys are normalized over each ``head`` or
    over ``all`` heads. ``rotary_dim``: the first dimensions of each head that are rotated (0: all), in pairs of
    neighbors where ``rotary_interleaved``, otherwise in pairs from either half. ``windows``: by layer the number of
    keys that a query sees, its own included (0: all); empty: all layers see all. ``sinks``: each head has a score that
    takes a share of the softmax and has no value. ``out_bias``: the output projection has a bias.
    ``output_gate``: grouped attention's output is multiplied by the sigmoid of a gate that is projected beside the
    queries. ``zero_centered_norms``: norms multiply by 1 + weight. ``mixers``: by layer; empty: all ``grouped``.
    ``latent``, ``indexer``, ``delta`` and ``mamba``: sizes of these mixers. ``single``: a layer is either a mixer or an
    MLP. ``rotary``: attention rotates queries and keys. ``quantized``: the checkpoint's weights are quantized.

    The router scores experts by ``scoring`` of its logits. It chooses by score, plus the correction bias where the
    family has one, among the experts of the best ``top_groups`` of ``expert_groups``. Gates are the scores of the
    chosen experts without the bias, normalized to sum 1 where ``norm_topk_prob``, times ``gate_scale``.
    ``router_bias``: the logits have a bias. ``expert_form``: an expert's inner layer (:data:`ExpertForm`).
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
    qk_norm: QkNorm = ""
    qkv_bias: bool = False
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    windows: tuple[int, ...] = ()
    sinks: bool = False
    out_bias: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    gate_scale: float = 1.0
    expert_groups: int = 1
    top_groups: int = 1
    norm_topk_prob: bool = True
    router_bias: bool = False
    expert_form: ExpertForm = "gated"
    norm_eps: float = 1e-6
    init_std: float = 0.02
    rope_theta: float = 1e6
    rope_scaling: Mapping[str, float] | None = None
    mixers: tuple[Mixer, ...] = ()
    latent: Latent | None = None
    indexer: Indexer | None = None
    output_gate: bool = False
    zero_centered_norms: bool = False
    delta: Delta | None = None
    mamba: Mamba | None = None
    single: bool = False
    rotary: bool = True
    quantized: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelSpec:
        """From a config with Qwen3-MoE's key names, as :func:`agent_rl.models.families.read_config` returns it."""
        experts = FAMILIES[config["model_type"]].experts
        moe = tuple(experts and is_moe(config, layer) for layer in range(config["num_hidden_layers"]))
        names = [field.name for field in fields(cls) if field.name != "moe" and field.name not in _EXPERT_KEYS]
        values = {name: config[key] for name in names if config.get(key := _KEYS.get(name, name)) is not None}
        values |= {name: config[key] for name, key in _EXPERT_KEYS.items() if any(moe)}
        values.setdefault("qk_norm", FAMILIES[config["model_type"]].qk_norm)
        values.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        return cls(moe=moe, **values)

    @property
    def family(self) -> Family:
        return FAMILIES[self.kind]

    def mixer(self, layer: int) -> Mixer:
        """The mixer of ``layer`` (from 0)."""
        return self.mixers[layer] if self.mixers else "grouped"

    def has_mlp(self, layer: int) -> bool:
        """Whether ``layer`` (from 0) has an MLP or experts."""
        return not self.single or self.mixer(layer) == "none"

    @property
    def mlp_matrices(self) -> int:
        """The number of matrices of an MLP or an expert: gate, up and down, or up and down."""
        return 2 if self.expert_form == "squared" else 3

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
        """The shape of the routes that an engine sends; None for a dense model."""
        if not any(self.moe):
            return None
        return RouteLayout(self.num_layers, self.moe_layer_ids, self.num_experts, self.top_k)


_KEYS = {
    "kind": "model_type",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "inner": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "shared_inner": "shared_expert_intermediate_size",
    "tied": "tie_word_embeddings",
    "gate_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
"""The key of each field that has another name in a config."""
_EXPERT_KEYS = {"num_experts": "num_experts", "top_k": "num_experts_per_tok", "expert_inner": "moe_intermediate_size"}
"""The keys of the fields that only models with experts have."""


def read_model_spec(directory: Path) -> ModelSpec:
    """The architecture of the checkpoint in ``directory``. Raises ConfigError, one line, for an unsupported one."""
    config = read_config(directory)
    try:
        return ModelSpec.of(config)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{directory / 'config.json'}: not a model's config: {error}") from None


def read_moe_spec(directory: Path) -> ModelSpec:
    """As :func:`read_model_spec`, for an MoE model. Raises ConfigError for a dense one."""
    model_spec = read_model_spec(directory)
    refuse_dense(model_spec, directory)
    return model_spec


def refuse_dense(model_spec: ModelSpec, directory: Path) -> None:
    """Raises ConfigError for a model without an MoE layer: an engine has no routes of it."""
    if not any(model_spec.moe):
        raise ConfigError(
            f"model: {directory} has no MoE layer (model_type {model_spec.kind}), so it has no routes to replay"
        )


def refuse_quantized(directory: Path) -> None:
    """Raises ConfigError for a quantized checkpoint where its weights do not go through the trainer."""
    raise ConfigError(
        f"model: {directory} is quantized, which only `agent-rl train` and `agent-rl sft` read: convert it to bfloat16 "
        "with `agent-rl convert`"
    )


def difference(expected: ModelSpec, other: ModelSpec) -> str | None:
    """The first difference of ``other`` from ``expected``, as "num_experts 64, not 128"; None where their
    architectures are equal."""
    compared = [field.name for field in fields(ModelSpec) if field.name not in ("init_std", "quantized")]
    name = next((name for name in compared if getattr(expected, name) != getattr(other, name)), None)
    if name is None:
        return None
    key = "layers with experts" if name == "moe" else (_KEYS | _EXPERT_KEYS).get(name, name)
    return f"{key} {getattr(other, name)!r}, not {getattr(expected, name)!r}"


def check_same_architecture(expected: ModelSpec, directory: Path, other: Path, key: str) -> None:
    """Raises ConfigError, which names the config key ``key``, where the checkpoint ``other`` has another architecture
    than ``expected``, that of ``directory``."""
    if (found := difference(expected, read_model_spec(other))) is not None:
        raise ConfigError(f"{key}: {other} has {found} as {directory}: name a checkpoint of the same architecture")
