"""The supported model families, one table entry each. Imports no torch.

:func:`read_config` converts a Hugging Face ``config.json`` to the key names of Qwen3-MoE. Keys that are not in the
tables below may change what the model computes, so they are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from agent_rl.errors import ConfigError
from agent_rl.models import latent
from agent_rl.models.config_keys import ConfigKeys
from agent_rl.models.files import read_object
from agent_rl.models.parts import Delta, Mamba, Mixer

QkNorm = Literal["", "head", "all"]


@dataclass(frozen=True, slots=True)
class Family:
    """Differences from a plain decoder (pre-norm with RMSNorm, rotary embedding, gated SiLU MLPs).

    ``keys``: the family's config keys that differ from Qwen3-MoE's, by Qwen3-MoE's name. ``aliases``: names that
    transformers 5 writes for the family's keys. ``defaults``: values of missing keys; other missing keys are errors.
    ``fixed``: values that the family's configs cannot change. ``qk_norm``: queries and keys are normalized over each
    ``head`` or over ``all`` heads. ``qkv_bias``: the q, k and v projections have a bias. ``experts``: layers may be MoE
    layers. ``windowed``: a ``sliding_window`` in the config is active, because the family has no
    ``use_sliding_window``. ``read``: reads the family's own keys; it returns values by the names of
    :func:`read_config`. ``unused``: keys of the family that do not change the logits; ``unused_rope``: such keys of
    ``rope_parameters``. ``outer``: the config of the text model is nested under ``text_config``, beside these keys.
    ``yarn_keys``: keys of YaRN that engines read for the family only. ``together``: endings of the names of a layer's
    tensors that an engine must receive in one request of a weight update: its loader joins them.

    ``root``: the Hugging Face name of the module with the embedding, the layers and the last norm. ``embedding``,
    ``last_norm``, ``mixer_norm``, ``attention``, ``mlp_norm`` and ``mlp``: names of modules within it. ``router``,
    ``expert``, ``expert_parts`` (gate, up, down), ``shared`` (expert) and ``correction`` (bias that is added to the
    router's scores only to choose experts; "" without one): names of an MoE layer's tensors. ``engine_float32``: endings
    of the names of tensors that SGLang has in float32 whatever the dtype is in which it receives them.
    ``correction_axes``: the sizes of the correction bias before its axis of experts. ``stacked_experts``: instead of a
    tensor for each expert there is one of all, ``gate_up_proj`` and ``down_proj``. ``shared_gate``: the shared expert
    has a sigmoid gate. ``untrained``: beginnings of the names of tensors that are neither trained nor sent to engines,
    such as layers that predict further tokens or a vision tower; an export has them as the start checkpoint does.
    ``{layers}`` stands for the number of layers, and for the next two numbers. ``serves_dense_layers``: SGLang loads
    dense layers beside MoE layers. ``engine_arguments`` and ``engine_environment``: SGLang's arguments and environment
    variables, in which ``{dtype}`` stands for the engine's. ``gpu_arguments``: its arguments on a GPU, which
    ``engine.extra_args`` may replace.
    """

    qk_norm: QkNorm = ""
    qkv_bias: bool = False
    experts: bool = False
    windowed: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[ConfigKeys], Mapping[str, Any]] | None = None
    unused: frozenset[str] = frozenset()
    unused_rope: frozenset[str] = frozenset()
    outer: frozenset[str] = frozenset()
    yarn_keys: frozenset[str] = frozenset()
    together: tuple[tuple[str, ...], ...] = ()
    root: str = "model"
    embedding: str = "embed_tokens"
    last_norm: str = "norm"
    mixer_norm: str = "input_layernorm"
    attention: str = "self_attn"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    router: str = "mlp.gate.weight"
    engine_float32: tuple[str, ...] = ()
    correction: str = ""
    correction_axes: tuple[int, ...] = ()
    expert: str = "mlp.experts.{}"
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_expert"
    stacked_experts: bool = False
    shared_gate: bool = True
    untrained: tuple[str, ...] = ()
    serves_dense_layers: bool = False
    engine_arguments: tuple[str, ...] = ()
    gpu_arguments: tuple[str, ...] = ()
    engine_environment: Mapping[str, str] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """The family's config key for Qwen3-MoE's key ``name``."""
        return self.keys.get(name, name)

    def served_in_float32(self, name: str) -> bool:
        """Whether engines have the tensor ``name`` in float32 whatever their dtype is."""
        return keeps_float32(name) or name.endswith(self.engine_float32)


def _qwen2_moe(keys: ConfigKeys) -> dict[str, Any]:
    return {"shared_expert_intermediate_size": keys.require("shared_expert_intermediate_size")}


def _glm4_moe(keys: ConfigKeys) -> dict[str, Any]:
    return {
        "qk_norm": "head" if keys.get("use_qk_norm", False) else "",
        "qkv_bias": keys.get("attention_bias", False),
        "rotary_dim": keys.rotary_dim(),
        "mlp_only_layers": tuple(range(keys.count("first_k_dense_replace", 0))),
        **keys.sigmoid_router(),
    }


def _minimax_m2(keys: ConfigKeys) -> dict[str, Any]:
    keys.expect("scoring_func", "sigmoid")
    keys.expect("use_routing_bias", True)
    keys.expect("qk_norm_type", "per_layer")
    keys.expect("shared_intermediate_size", 0)
    for part in ("full_attention", "linear_attention", "mlp"):
        for factor in ("alpha", "beta"):
            keys.expect(f"layernorm_{part}_{factor}", 1.0)
    if any(kind != 1 for kind in keys.get("attn_type_list", ())):
        keys.expect("attn_type_list", [1])
    return {
        "qk_norm": "all" if keys.get("use_qk_norm", True) else "",
        "rotary_dim": keys.count("rotary_dim", keys.rotary_dim()),
        "scoring": "sigmoid",
    }


_FURTHER_LAYERS = ("model.layers.{layers}.",)
"""Layers after the last, each of which predicts a further token."""
_SIGMOID_ROUTED: Mapping[str, Any] = {
    "experts": True,
    "keys": {"num_experts": "n_routed_experts"},
    "fixed": {"decoder_sparse_step": 1, "mlp_only_layers": ()},
    "untrained": _FURTHER_LAYERS,
    "correction": "mlp.gate.e_score_correction_bias",
    "shared": "mlp.shared_experts",
    "shared_gate": False,
    "serves_dense_layers": True,
}
"""What DeepSeek-V3 and GLM-4 share."""


def _latent(read: Callable[[ConfigKeys], Mapping[str, Any]]) -> Family:
    """A family like DeepSeek-V3; ``read`` reads its keys."""
    return Family(
        **_SIGMOID_ROUTED,
        read=read,
        unused=latent.UNUSED,
        yarn_keys=latent.YARN_KEYS,
        together=(("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),),
    )


def _gpt_oss(keys: ConfigKeys) -> dict[str, Any]:
    # Each implementation has its own key for the factor of the experts' sigmoid, and the same value where it is absent.
    for key in ("swiglu_alpha", "hidden_act_alpha"):
        keys.expect(key, 1.702)
    keys.expect("swiglu_limit", 7.0)
    keys.expect("experts_per_token", keys.require("num_experts_per_tok"))
    kinds, biased = keys.require("layer_types"), keys.get("attention_bias", True)
    return {
        "windows": keys.windows(kinds, keys.count("sliding_window", 0)),
        "sinks": True,
        "qkv_bias": biased,
        "out_bias": biased,
        "router_bias": True,
        "expert_form": "clamped",
    }


def _ernie4_5_moe(keys: ConfigKeys) -> dict[str, Any]:
    for key, value in (("use_rmsnorm", True), ("moe_gate", "topk"), ("moe_use_aux_free", True), ("use_bias", False)):
        keys.expect(key, value)
    keys.expect("moe_norm_min", 1e-12)
    keys.expect("moe_layer_interval", 1)
    keys.expect("moe_layer_end_index", keys.require("num_hidden_layers") - 1)
    keys.require("tie_word_embeddings")
    shared = keys.count("moe_num_shared_experts", 0)
    return {
        "rotary_interleaved": True,
        "mlp_only_layers": tuple(range(keys.count("moe_layer_start_index", 0))),
        "shared_expert_intermediate_size": shared * keys.require("moe_intermediate_size"),
    }


def _delta_hybrid(keys: ConfigKeys, *, fused: bool) -> dict[str, Any]:
    """The gated delta rule, and grouped-query attention in every ``full_attention_interval``-th layer: SGLang 0.5.23
    reads this key and not ``layer_types``."""
    interval, layers = keys.positive("full_attention_interval"), keys.positive("num_hidden_layers")
    full = [(layer + 1) % interval == 0 for layer in range(layers)]
    keys.expect("layer_types", ["full_attention" if yes else "linear_attention" for yes in full])
    keys.expect("output_gate_type", "swish")
    delta = Delta(
        key_heads=keys.positive("linear_num_key_heads"),
        value_heads=keys.positive("linear_num_value_heads"),
        key_dim=keys.positive("linear_key_head_dim"),
        value_dim=keys.positive("linear_value_head_dim"),
        kernel=keys.positive("linear_conv_kernel_dim"),
        fused=fused,
    )
    if delta.value_heads % delta.key_heads:
        raise ValueError(
            f"linear_num_value_heads={delta.value_heads} is not a multiple of linear_num_key_heads={delta.key_heads}"
        )
    return {
        "mixers": tuple("grouped" if yes else "delta" for yes in full),
        "delta": delta,
        "rotary_dim": keys.rotary_dim(default=0.25),
        "output_gate": True,
        "zero_centered_norms": True,
        "shared_expert_intermediate_size": keys.positive("shared_expert_intermediate_size"),
    }


def _qwen3_next(keys: ConfigKeys) -> dict[str, Any]:
    return _delta_hybrid(keys, fused=True)


def _qwen3_5_moe(keys: ConfigKeys) -> dict[str, Any]:
    for key, value in {"attn_output_gate": True, "norm_topk_prob": True, "decoder_sparse_step": 1}.items():
        keys.expect(key, value)
    keys.expect("mlp_only_layers", [])
    keys.expect("tie_word_embeddings", False)
    keys.require("rope_parameters")  # of SGLang
    return _delta_hybrid(keys, fused=False)


_NEMOTRON_H_LAYERS: Mapping[str, tuple[str, Mixer]] = {
    "M": ("linear_attention", "mamba"),
    "*": ("full_attention", "grouped"),
    "E": ("moe", "none"),
    "-": ("mlp", "none"),
}
"""By the letter of ``hybrid_override_pattern``: the name in ``layers_block_type`` of transformers, and the mixer."""


def _nemotron_h(keys: ConfigKeys) -> dict[str, Any]:
    """Each layer is a mixer or an MLP. Engines have no lower bound of the time step (``time_step_min``), so the trainer
    has none either."""
    pattern = keys.require("hybrid_override_pattern")  # of SGLang
    if not pattern or not set(pattern) <= _NEMOTRON_H_LAYERS.keys():
        raise ValueError(f"hybrid_override_pattern={pattern!r} may only have {' '.join(_NEMOTRON_H_LAYERS)}")
    keys.expect("layers_block_type", [_NEMOTRON_H_LAYERS[letter][0] for letter in pattern])
    keys.expect("num_hidden_layers", len(pattern))
    for key, value in _NEMOTRON_H_VALUES.items():
        keys.expect(key, value)
    mamba = Mamba(
        heads=keys.positive("mamba_num_heads"),
        head_dim=keys.positive("mamba_head_dim"),
        groups=keys.positive("n_groups"),
        state=keys.positive("ssm_state_size"),
        kernel=keys.positive("conv_kernel"),
    )
    if mamba.heads % mamba.groups:
        raise ValueError(f"mamba_num_heads={mamba.heads} is not a multiple of n_groups={mamba.groups}")
    if (served := keys.get("mamba_n_groups", 8)) != mamba.groups:
        raise ValueError(
            f"n_groups={mamba.groups}, but engines read mamba_n_groups, which is {served} (8 if it is missing): set it "
            f"to {mamba.groups}"
        )
    return {
        **keys.sigmoid_router(),
        "num_hidden_layers": len(pattern),
        "mixers": tuple(_NEMOTRON_H_LAYERS[letter][1] for letter in pattern),
        "mlp_only_layers": tuple(layer for layer, letter in enumerate(pattern) if letter != "E"),
        "single": True,
        "rotary": False,
        "mamba": mamba,
        "expert_form": "squared",
        "shared_expert_intermediate_size": keys.positive("moe_shared_expert_intermediate_size"),
    }


_NEMOTRON_H_VALUES: Mapping[str, Any] = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "n_shared_experts": 1,
    "moe_latent_size": None,
    "use_conv_bias": True,
    "use_bias": False,
    "mamba_proj_bias": False,
    "residual_in_fp32": False,
    "hidden_dropout": 0.0,
}

_MIXED = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
_BLOCK_SPARSE: Mapping[str, Any] = {
    "router": "block_sparse_moe.gate.weight",
    "expert": "block_sparse_moe.experts.{}",
    "expert_parts": ("w1", "w3", "w2"),
}

_NEMOTRON_H_UNUSED = frozenset(
    {"auto_map", "chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type"}
    | {"mtp_hybrid_override_pattern", "norm_eps", "num_logits_to_keep", "num_nextn_predict_layers"}
    | {"rescale_prenorm_residual", "time_step_floor", "time_step_limit", "time_step_max", "time_step_min"}
    | {"use_mamba_kernels"}
)
"""Initial values, settings of kernels, and layers that predict further tokens."""

# SGLang would keep the last inputs of convolutions in bfloat16: a cached prefix would continue with rounded ones.
_DELTA_ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "{dtype}"}
_QWEN3_5_MOE: Mapping[str, Any] = {
    "qk_norm": "head",
    "experts": True,
    "read": _qwen3_5_moe,
    "keys": {"intermediate_size": "moe_intermediate_size"},  # no layer is dense
    "fixed": {**_MIXED, "norm_topk_prob": True},
    "unused": frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
    # Text has the same position on all three axes, so that sections of the axes do not matter.
    "unused_rope": frozenset({"mrope_section", "mrope_interleaved"}),
    "engine_environment": _DELTA_ENVIRONMENT,
    "untrained": ("mtp.", "model.visual."),
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2": Family(qkv_bias=True),
        "qwen3": Family(qk_norm="head"),
        "qwen2_moe": Family(qkv_bias=True, experts=True, read=_qwen2_moe, defaults=_MIXED),
        "qwen3_moe": Family(
            qk_norm="head", experts=True, aliases={"num_local_experts": "num_experts"}, defaults=_MIXED
        ),
        "qwen3_next": Family(
            qk_norm="head",
            experts=True,
            read=_qwen3_next,
            defaults=_MIXED,
            engine_environment=_DELTA_ENVIRONMENT,
            untrained=("mtp.",),
        ),
        "qwen3_5_moe_text": Family(**_QWEN3_5_MOE),
        "qwen3_5_moe": Family(
            **_QWEN3_5_MOE,
            root="model.language_model",
            stacked_experts=True,
            # Without the vision tower; SGLang 0.5.23 refuses its own --language-model-only for this family.
            engine_arguments=("--json-model-override-args", '{"language_model_only": true}'),
            outer=frozenset(
                {"architectures", "dtype", "image_token_id", "tie_word_embeddings", "torch_dtype"}
                | {"transformers_version", "video_token_id", "vision_config", "vision_end_token_id"}
                | {"vision_start_token_id"}
            ),
        ),
        "glm4_moe": Family(
            **_SIGMOID_ROUTED,
            read=_glm4_moe,
            engine_float32=(".mlp.gate.weight",),
            unused=frozenset({"num_nextn_predict_layers"}),
        ),
        "deepseek_v3": _latent(latent.read_latent),
        "kimi_k2": _latent(latent.read_latent),
        "deepseek_v32": _latent(latent.read_deepseek_v32),
        "glm_moe_dsa": _latent(latent.read_glm_moe_dsa),
        "gpt_oss": Family(
            experts=True,
            read=_gpt_oss,
            engine_float32=(".experts.gate_up_proj_bias", ".experts.down_proj_bias"),
            keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            fixed={**_MIXED, "norm_topk_prob": True},
            unused=frozenset({"initial_context_length"}),
            router="mlp.router.weight",
            # SGLang would use triton_kernel, which captures no routes.
            gpu_arguments=("--moe-runner-backend", "triton"),
        ),
        "ernie4_5_moe": Family(
            experts=True,
            read=_ernie4_5_moe,
            keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
            fixed={**_MIXED, "norm_topk_prob": True},
            unused=frozenset({"moe_capacity", "num_nextn_predict_layers"}),
            untrained=("model.mtp_",),
            correction="mlp.moe_statics.e_score_correction_bias",
            correction_axes=(1,),
            shared="mlp.shared_experts",
            shared_gate=False,
            serves_dense_layers=True,
        ),
        "nemotron_h": Family(
            experts=True,
            read=_nemotron_h,
            keys={"num_experts": "n_routed_experts", "rms_norm_eps": "layer_norm_epsilon"},
            fixed=_MIXED,
            unused=_NEMOTRON_H_UNUSED,
            root="backbone",
            embedding="embeddings",
            last_norm="norm_f",
            mixer_norm="norm",
            attention="mixer",
            mlp_norm="norm",
            mlp="mixer",
            router="mixer.gate.weight",
            correction="mixer.gate.e_score_correction_bias",
            expert="mixer.experts.{}",
            shared="mixer.shared_experts",
            shared_gate=False,
            untrained=("mtp.",),
            serves_dense_layers=True,
            engine_environment=_DELTA_ENVIRONMENT,
        ),
        "olmoe": Family(
            qk_norm="all",
            experts=True,
            keys={"moe_intermediate_size": "intermediate_size"},
            defaults={"norm_topk_prob": False},
            fixed=_MIXED,
        ),
        "minimax_m2": Family(
            experts=True,
            read=_minimax_m2,
            engine_float32=(".block_sparse_moe.gate.weight",),
            keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            fixed={**_MIXED, "norm_topk_prob": True},
            unused=frozenset(
                {"auto_map", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode"}
                | {"use_mtp"}
            ),
            untrained=_FURTHER_LAYERS,
            correction="block_sparse_moe.e_score_correction_bias",
            **_BLOCK_SPARSE,
        ),
        "mixtral": Family(
            experts=True,
            windowed=True,
            keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            fixed={**_MIXED, "norm_topk_prob": True},
            **_BLOCK_SPARSE,
        ),
    }
)

_FLOAT32_TENSORS = (".e_score_correction_bias", ".indexer.k_norm.weight", ".indexer.k_norm.bias", ".A_log")


def keeps_float32(name: str) -> bool:
    """Whether engines and checkpoints have the tensor ``name`` in float32 whatever the model's dtype is. A correction
    bias rounded to bfloat16 changes up to 3 % of the chosen expert sets. ``A_log`` is the logarithm of a decay rate."""
    return name.endswith(_FLOAT32_TENSORS)


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_REQUIRED = (*_SIZES, "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", *_MIXED)
_OPTIONAL = {"head_dim": None, "tie_word_embeddings": False, "initializer_range": 0.02}
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_QUANT_METHODS = ("fp8", "mxfp4", "compressed-tensors")

# Keys with the only supported values (first one shown in errors). Missing keys are accepted.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, None),
    "router_jitter_noise": (0, None),
    "clip_qkv": (None,),
    "partial_rotary_factor": (1, None),
}

# Keys that do not change the logits: special tokens, generation, unused training losses, metadata. ``sliding_window``
# and ``max_window_layers`` matter only with ``use_sliding_window`` (Mixtral: see _check_values).
_IGNORED = frozenset(
    {
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "layer_types",
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
    """The config of the checkpoint in ``directory`` with Qwen3-MoE's key names and its ``model_type``.

    ``rope_scaling`` is None or a checked mapping (see :func:`_rope`). Raises ConfigError for a missing file or key, an
    unsupported architecture, and unknown keys or values that may change what the model computes.
    """
    path = directory / "config.json"
    return parse_config(_read(path), path)


def parse_config(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """As :func:`read_config`, from the content of a ``config.json``; ``path`` is its name in errors."""
    try:
        return _checked(_without_aliases(raw), path)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{path}: not a model's config: {error}") from None


def _checked(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    family = _family_of(raw, path)
    quantized = check_quantization(raw, path) is not None
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    kind, raw = raw["model_type"], _text_config(raw, family, path) if family.outer else raw
    keys = ConfigKeys(raw, path)
    own = family.read(keys) if family.read else {}
    _check_keys(raw, family, keys.known, path)
    _check_values(raw, family, keys.known, path)
    required = _REQUIRED + (_EXPERTS if family.experts else ())
    config = {"model_type": kind, **{name: _value(raw, family, name, path) for name in required if name not in own}}
    config |= {name: raw.get(name, default) for name, default in _OPTIONAL.items()}
    config |= {"qkv_bias": raw.get("qkv_bias", family.qkv_bias), "qk_norm": family.qk_norm, "quantized": quantized}
    config |= own
    _check_sizes(config, family, path)
    if own.get("rotary", True):
        config["rope_theta"], config["rope_scaling"] = _rope(raw, family, path)
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


def _without_aliases(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """``raw`` with the family's own key in the place of each other name for it."""
    family = FAMILIES.get(str(raw.get("model_type")))
    names = {} if family is None else {other: key for other, key in family.aliases.items() if raw.get(key) is None}
    return {names.get(key, key): value for key, value in raw.items() if key not in names.values()}


def _family_of(config: Mapping[str, Any], path: Path) -> Family:
    """The family of a config's ``model_type``. Raises ConfigError with the supported values."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"{path}: model_type {kind!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]


def _text_config(raw: Mapping[str, Any], family: Family, path: Path) -> Mapping[str, Any]:
    """The nested config of the text model. Raises ConfigError for unknown keys beside it."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") != f"{raw['model_type']}_text":
        raise ConfigError(f"{path}: text_config must be a config of model_type {raw['model_type']}_text")
    unknown = sorted(key for key in raw.keys() - family.outer - {"model_type", "text_config"} if raw[key] is not None)
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]}={raw[unknown[0]]!r} is not supported for {raw['model_type']}")
    if raw.get("tie_word_embeddings"):
        raise ConfigError(f"{path}: tie_word_embeddings=True is not supported, only False is")
    return text


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


def _check_keys(raw: Mapping[str, Any], family: Family, read: set[str], path: Path) -> None:
    specific = {family.key(name) for name in _EXPERTS if name not in family.fixed} if family.experts else set()
    if family.qkv_bias:
        specific.add("qkv_bias")
    specific.update(map(family.key, _REQUIRED))
    known = specific | read | family.unused | {*_REQUIRED, *_OPTIONAL, *_ROPE, *_SUPPORTED_VALUES, *_IGNORED}
    unknown = sorted(key for key in raw if key not in known and not key.startswith("_") and raw[key] is not None)
    if unknown:
        raise ConfigError(
            f"{path}: {unknown[0]}={raw[unknown[0]]!r} is not supported for {raw['model_type']} and may change what "
            "the model computes; remove it if it does not"
        )


def _check_values(raw: Mapping[str, Any], family: Family, read: set[str], path: Path) -> None:
    for key, allowed in _SUPPORTED_VALUES.items():
        if key in raw and key not in read and raw[key] not in allowed:
            raise ConfigError(f"{path}: {key}={raw[key]!r} is not supported, only {allowed[0]!r} is")
    if "layer_types" not in read and any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise ConfigError(
            f"{path}: layer_types={sorted(set(raw['layer_types']))} is not supported, only full_attention"
        )
    if family.windowed and raw.get("sliding_window"):
        raise ConfigError(f"{path}: sliding_window={raw['sliding_window']!r} is not supported, only None is")


def check_quantization(raw: Mapping[str, Any], path: Path) -> Mapping[str, Any] | None:
    """The ``quantization_config`` in the content of the ``config.json`` at ``path``; None where there is none. Raises
    ConfigError for a method that is not supported."""
    settings = raw.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if settings is not None and method not in _QUANT_METHODS:
        raise ConfigError(
            f"{path}: quant_method {method!r} is not supported; supported: fp8, mxfp4 and compressed-tensors with "
            "float8 weights"
        )
    return settings


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
    if experts and config["num_experts_per_tok"] == 1 and config["norm_topk_prob"]:
        raise ConfigError(
            f"{path}: {family.key('num_experts_per_tok')} is 1; with normalized gates it must be at least 2, because a "
            "single gate is always 1 and its router does not learn"
        )


def _rope(raw: Mapping[str, Any], family: Family, path: Path) -> tuple[float, dict[str, float] | None]:
    """Theta and the YaRN scaling, from ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` in newer files."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", raw.get("rope_theta"))
    if not theta:
        raise ConfigError(f"{path}: rope_theta is missing; {raw['model_type']} requires it")
    kinds = {scaling.pop(key) for key in ("rope_type", "type") if key in scaling} or {"default"}
    for key in ("partial_rotary_factor", *family.unused_rope):  # the first is for the family's reader
        scaling.pop(key, None)
    if kinds == {"default"} and not scaling:
        return float(theta), None
    if kinds != {"yarn"}:
        raise ConfigError(
            f"{path}: rope_scaling of type {'/'.join(sorted(kinds))} is not supported; yarn and default are"
        )
    return float(theta), _yarn(scaling, raw, family, path)


def _yarn(scaling: dict[str, Any], raw: Mapping[str, Any], family: Family, path: Path) -> dict[str, float]:
    values = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": 1.0}
    for key in ("factor", "original_max_position_embeddings", *values):
        if key in scaling:
            values[key] = float(scaling.pop(key))
        elif key not in values:
            raise ConfigError(f"{path}: rope_scaling requires {key} with yarn")
    own = {key: float(scaling.pop(key)) for key in family.yarn_keys if key in scaling}
    if own and own.keys() != family.yarn_keys:
        raise ConfigError(f"{path}: rope_scaling has {min(own)} and lacks {min(family.yarn_keys - own.keys())}")
    if scaling:  # engine and reference interpret attention_factor and mscale differently
        raise ConfigError(f"{path}: rope_scaling.{min(scaling)} is not supported with yarn")
    # SGLang's fused CUDA kernel uses the ratio of the two lengths as the factor, its other kernels use the factor.
    length, reach = raw.get("max_position_embeddings"), values["factor"] * values["original_max_position_embeddings"]
    if length != reach:
        raise ConfigError(
            f"{path}: max_position_embeddings={length} must equal rope_scaling's factor x "
            f"original_max_position_embeddings = {reach:g}, because engines use either value"
        )
    return values | own
