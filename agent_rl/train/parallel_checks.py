"""Checks of the parallel layout. Pure functions; imports no torch.

Rules on ``train.parallel`` alone come first, rules that need the model second. Everything that starts workers or reads
a config uses these checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agent_rl.config import ParallelConfig, RunConfig, TrainConfig
from agent_rl.errors import ConfigError
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.models.tensors import belongs_to, model_parameters


def layout_problems(config: RunConfig, model: ModelSpec | None = None) -> list[str]:
    """The problems of this config's layout, one line each; empty if there are none.

    ``model`` None skips rules about the model.
    """
    train = config.train
    problems = (
        parallel_problems(train.parallel) + balance_problems(train, model) + lora_problems(train, config.engine.dtype)
    )
    problems += router_shift_problems(train)
    if model is not None:
        modules = train.recompute_modules if train.recompute == "selective" else ()
        problems += model_problems(train.parallel, model) + recompute_problems(modules, model) + router_problems(model)
        problems += expert_problems(train.dtype, model) + expert_form_problems(train, model)
        problems += adapter_problems(train, model) + freeze_problems(train, model)
    return problems


def check_layout(config: RunConfig, model_spec: ModelSpec | None = None) -> None:
    """Raises ConfigError with the first of :func:`layout_problems`. Without ``model_spec`` it reads that of
    ``config.model``, where the directory exists."""
    if model_spec is None and (config.model / "config.json").is_file():
        model_spec = read_model_spec(config.model)
    refuse(layout_problems(config, model_spec))


def refuse(problems: list[str]) -> None:
    """Raises ConfigError with the first problem, if there is one."""
    if problems:
        raise ConfigError(problems[0])


def node_block_sizes(parallel: ParallelConfig) -> tuple[int, ...]:
    """Preferred numbers of consecutive ranks per node, best first: whole context, tensor and expert groups; tensor and
    expert groups, which exchange most; a tensor group; one rank."""
    tensor, expert = parallel.tensor, parallel.expert
    sizes = (math.lcm(tensor * parallel.context, expert), math.lcm(tensor, expert), tensor, 1)
    return tuple(dict.fromkeys(sizes))


def layer_groups(parallel: ParallelConfig) -> dict[str, list[range]]:
    """The ranks of each group that communicates in every layer, in Megatron's order: tensor ranks are consecutive,
    context ranks are a tensor group apart, expert ranks are consecutive."""
    world, tensor = parallel.world_size, parallel.tensor
    block = tensor * parallel.context
    firsts = [start + offset for start in range(0, world, block) for offset in range(tensor)]
    return {
        "tensor": [range(first, first + tensor) for first in range(0, world, tensor)],
        "context": [range(first, first + block, tensor) for first in firsts],
        "expert": [range(first, first + parallel.expert) for first in range(0, world, parallel.expert)],
    }


def cross_node_groups(parallel: ParallelConfig, nodes: Sequence[str]) -> str | None:
    """A line about groups that span several nodes, or None. ``nodes``: the node of each rank."""
    groups_across = [
        f"{key} groups ({key}={getattr(parallel, key)})"
        for key, groups in layer_groups(parallel).items()
        if any(len({nodes[rank] for rank in group}) > 1 for group in groups)
    ]
    if not groups_across:
        return None
    return (
        f"train.parallel: {' and '.join(groups_across)} span several nodes, so they communicate over the network; "
        "nodes with more free GPUs, or smaller groups, would be faster"
    )


def parallel_problems(parallel: ParallelConfig) -> list[str]:
    """Problems of a layout that do not depend on the model."""
    world, tensor, pipeline, context = parallel.world_size, parallel.tensor, parallel.pipeline, parallel.context
    stage = world // pipeline
    rules = {
        f"world_size {world} is not a multiple of tensor x pipeline x context = {tensor} x {pipeline} x {context} = "
        f"{tensor * pipeline * context}": world % (tensor * pipeline * context) != 0,
        f"expert {parallel.expert} does not divide the {stage} ranks of a pipeline stage "
        f"(world_size {world} / pipeline {pipeline})": stage % parallel.expert != 0,
        f"virtual_pipeline {parallel.virtual_pipeline} needs pipeline stages; set pipeline to 2 or more, or "
        "virtual_pipeline to 1": parallel.virtual_pipeline > 1 and pipeline == 1,
        f"dispatcher allgather cannot be used with pipeline {pipeline} (Megatron requires micro-batches of "
        "equal length there); set dispatcher to alltoall": parallel.dispatcher == "allgather" and pipeline > 1,
        "dispatcher flex sends tokens to other ranks, and expert is 1; set dispatcher to alltoall": (
            parallel.dispatcher == "flex" and parallel.expert == 1
        ),
    }
    return [f"train.parallel: {problem}" for problem, broken in rules.items() if broken]


def router_shift_problems(train: TrainConfig) -> list[str]:
    """A rank must have the gates of all layers at all tokens that it computes the loss of."""
    parallel = train.parallel
    shared = parallel.tensor * parallel.pipeline * parallel.context
    if train.correction.router_shift is None or shared == 1:
        return []
    return [
        "train.correction.router_shift requires train.parallel.tensor, pipeline and context 1, where a rank has the "
        "gates of all layers at its tokens"
    ]


def router_problems(model: ModelSpec) -> list[str]:
    """A softmax over the one expert of a token is 1: its router has no gradient, and Megatron refuses it."""
    if model.top_k != 1 or not model.norm_topk_prob or model.family.correction:
        return []
    return [
        "model: num_experts_per_tok=1 and norm_topk_prob=true: every chosen expert has the weight 1, so its "
        "router cannot learn; set norm_topk_prob to false, or use a model with more experts per token"
    ]


def model_problems(parallel: ParallelConfig, model: ModelSpec) -> list[str]:
    """Dimensions of ``model`` that a layout cannot divide."""
    problems = []
    for name, field, key in _DIVISIONS:
        size, parts = getattr(model, field), getattr(parallel, name)
        if size % parts and not (field == "inner" and not _dense(model)):  # no layer has an MLP of that size
            problems.append(f"train.parallel.{name}={parts} does not divide the model's {key}={size}")
    if (delta := model.delta) and delta.key_heads % parallel.tensor:
        problems.append(
            f"train.parallel.tensor={parallel.tensor} does not divide the model's "
            f"linear_num_key_heads={delta.key_heads}"
        )
    if mamba := model.mamba:
        if mamba.groups % parallel.tensor:
            problems.append(
                f"train.parallel.tensor={parallel.tensor} does not divide the model's n_groups={mamba.groups}"
            )
        if parallel.context > 1:
            problems.append(
                f"train.parallel.context={parallel.context}: Mamba layers carry a state from token to token and run "
                "whole sequences on a rank; set it to 1"
            )
    stages, layers = parallel.pipeline * parallel.virtual_pipeline, model.num_layers
    if layers < stages:
        problems.append(
            f"train.parallel: pipeline x virtual_pipeline = {parallel.pipeline} x {parallel.virtual_pipeline} is more "
            f"than the model's num_hidden_layers={layers}"
        )
    if parallel.expert > 1 and not any(model.moe):
        problems.append(f"train.parallel.expert={parallel.expert}: this model has no experts; set it to 1")
    return problems


def recompute_problems(modules: tuple[str, ...], model: ModelSpec) -> list[str]:
    """Modules of a selective recomputation that ``model`` lacks."""
    available = {"core_attn": True, "layernorm": True, "moe": any(model.moe), "mlp": _dense(model)}
    return [
        f"train.recompute_modules: {name} would recompute nothing: this model has {_MISSING_LAYERS[name]}"
        for name in modules
        if not available[name]
    ]


def _dense(model: ModelSpec) -> bool:
    """Whether a layer has an MLP without experts."""
    return any(model.has_mlp(layer) and not moe for layer, moe in enumerate(model.moe))


def expert_problems(dtype: str, model: ModelSpec) -> list[str]:
    """Widths that the experts' grouped matmul does not support: its rows must be a multiple of 16 bytes."""
    unit = 16 // {"float32": 4, "bfloat16": 2}[dtype]
    return [
        f"model: {key}={size} must be a multiple of {unit} with train.dtype {dtype} (the experts' grouped matmul "
        "needs rows of a multiple of 16 bytes)"
        for key, size in (("hidden_size", model.hidden), ("moe_intermediate_size", model.expert_inner))
        if any(model.moe) and size % unit
    ]


def expert_form_problems(train: TrainConfig, model: ModelSpec) -> list[str]:
    """Options that support gated experts only."""
    options = {"train.balance": train.balance.enabled, "train.lora": bool(train.lora)}
    return [
        f"{option}: the experts of {model.kind} {_EXPERT_FORMS[model.expert_form]}, which it does not support: turn it "
        "off"
        for option, enabled in options.items()
        if enabled and model.expert_form in _EXPERT_FORMS
    ]


def balance_problems(train: TrainConfig, model: ModelSpec | None = None) -> list[str]:
    """Problems of ``train.balance``: no peer to share with, no known routes, another dispatcher, more slots
    than foreign experts."""
    balance, parallel = train.balance, train.parallel
    if not balance.enabled:
        return []
    problems = []
    if parallel.expert == 1:
        problems.append("train.parallel.expert is 1, so no rank can take load from another; set it to 2 or more")
    if train.replay == "off":
        problems.append("train.replay is off, so no routes are known before a pass; set it to r3 or r2")
    if (dispatcher := parallel.dispatcher) != "alltoall":
        # allgather sums a token's experts by rank first, so results would depend on where the experts are.
        problems.append(f"train.parallel.dispatcher {dispatcher} does not support borrowed experts; set it to alltoall")
    if (per_node := balance.ranks_per_node) is not None and parallel.expert % min(per_node, parallel.expert):
        problems.append(f"ranks_per_node {per_node} does not divide train.parallel.expert={parallel.expert}")
    if model is not None and model.num_experts % parallel.expert == 0:
        foreign = model.num_experts - model.num_experts // parallel.expert
        if parallel.expert > 1 and balance.slots > foreign:
            problems.append(f"slots {balance.slots}: other ranks have {foreign} experts; set it to {foreign} or less")
    return [f"train.balance: {problem}" for problem in problems]


def freeze_problems(train: TrainConfig, model: ModelSpec) -> list[str]:
    """Problems of ``train.freeze``: other options that choose what is trained, and modules that ``model`` lacks."""
    freeze = train.freeze or ()
    names = [parameter.name for _, parameter in model_parameters(model)]
    reasons = {
        "train.lora trains adapters only; remove one of them": bool(freeze and train.lora),
        "train.balance borrows experts with their gradients; turn it off or train the experts": (
            "experts" in freeze and train.balance.enabled
        ),
        "this model has one weight for embeddings and lm_head; freeze both or neither": (
            model.tied and ("embeddings" in freeze) != ("lm_head" in freeze)
        ),
    } | {f"this model has no {each}": not any(belongs_to(name, (each,)) for name in names) for each in freeze}
    return [f"train.freeze: {reason}" for reason, broken in reasons.items() if broken]


def lora_problems(train: TrainConfig, engine_dtype: str) -> list[str]:
    """Options that ``train.lora`` does not support."""
    parallel = train.parallel
    reasons = {
        f"train.parallel.tensor is {parallel.tensor}, and adapters are not sharded: set it to 1": parallel.tensor > 1,
        f"train.parallel.pipeline is {parallel.pipeline}, which adapters do not support: set it to 1": parallel.pipeline
        > 1,
        "train.balance borrows experts without their adapters: turn it off": train.balance.enabled,
        "train.offload_optimizer is for the state of all weights, and that of adapters is small: turn it off": (
            train.offload_optimizer
        ),
        "engine.dtype float32 has more precision than train.dtype bfloat16: make them equal": (
            (train.dtype, engine_dtype) == ("bfloat16", "float32")
        ),
    }
    return [f"train.lora: {reason}" for reason, holds in reasons.items() if train.lora and holds]


def adapter_problems(train: TrainConfig, model: ModelSpec) -> list[str]:
    """Models that ``train.lora`` does not support."""
    reasons = {
        f"{model.kind} has one tensor of all experts, which adapters do not support: turn it off": (
            model.family.stacked_experts
        ),
        "engines merge adapters into the files of model, which are quantized: `agent-rl convert` converts them": (
            model.quantized
        ),
    }
    return [f"train.lora: {reason}" for reason, holds in reasons.items() if train.lora and holds]


def dense_replicas(parallel: ParallelConfig) -> int:
    """The number of ranks with a copy of a dense weight: data and context ranks."""
    return parallel.world_size // (parallel.tensor * parallel.pipeline)


def expert_replicas(parallel: ParallelConfig) -> int:
    """The number of ranks with a copy of an expert, including tensor ranks, because single experts are never
    sharded."""
    return parallel.world_size // (parallel.pipeline * parallel.expert)


def uses_distributed_optimizer(parallel: ParallelConfig) -> bool:
    """Whether ranks share the optimizer state: configured, and some weight has more than one copy."""
    return parallel.distributed_optimizer and max(dense_replicas(parallel), expert_replicas(parallel)) > 1


# Divided dimensions: the layout's key, the field of the model spec, and its key in config.json. Single experts are
# never divided over tensor ranks.
_DIVISIONS = (
    ("tensor", "heads", "num_attention_heads"),
    ("tensor", "kv_heads", "num_key_value_heads"),
    ("tensor", "vocab_size", "vocab_size"),
    ("tensor", "inner", "intermediate_size"),
    ("tensor", "shared_inner", "shared_expert_intermediate_size"),
    ("expert", "num_experts", "num_experts"),
)
_EXPERT_FORMS = {"clamped": "have biases", "squared": "have no gate"}
_MISSING_LAYERS = {"moe": "no layer with experts", "mlp": "no layer without experts"}
