"""Which parallel layouts are refused, and why: one table of rules. Pure functions; imports no torch.

The rules that ``train.parallel`` alone decides come first, those that need the model's ``config.json`` second.
Everything that starts ranks asks here, and so does everything that only looks at a config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from agent_rl.config import ParallelConfig, RunConfig, TrainConfig
from agent_rl.errors import ConfigError
from agent_rl.models.spec import ModelSpec, read_model_spec


def layout_problems(config: RunConfig, model: ModelSpec | None = None) -> list[str]:
    """Why this config's layout can't be trained in, a line each; empty where it can.

    ``model`` None leaves out what depends on it.
    """
    train = config.train
    problems = parallel_problems(train.parallel) + balance_problems(train, model) + lora_problems(config)
    if model is not None:
        modules = train.recompute_modules if train.recompute == "selective" else ()
        problems += model_problems(train.parallel, model) + recompute_problems(modules, model)
        problems += expert_problems(train.dtype, model)
    return problems


def check_layout(config: RunConfig) -> None:
    """Raises ConfigError with the first of :func:`layout_problems`; looks at the model where its directory is there."""
    known = (config.model / "config.json").is_file()
    refuse(layout_problems(config, read_model_spec(config.model) if known else None))


def refuse(problems: list[str]) -> None:
    """Raises ConfigError with the first problem, where there is one."""
    if problems:
        raise ConfigError(problems[0])


def rank_blocks(parallel: ParallelConfig) -> tuple[int, ...]:
    """How many ranks that follow each other should be on one machine, the best first: whole context, tensor and expert
    groups; those that exchange most, tensor and expert groups; a tensor group; one rank."""
    tensor, expert = parallel.tensor, parallel.expert
    sizes = (math.lcm(tensor * parallel.context, expert), math.lcm(tensor, expert), tensor, 1)
    return tuple(dict.fromkeys(sizes))


def layer_groups(parallel: ParallelConfig) -> dict[str, list[range]]:
    """The ranks of each group that exchanges something in every layer, in Megatron's order: tensor ranks follow each
    other, context ranks lie a tensor group apart, expert ranks (whose experts are never cut) follow each other."""
    world, tensor = parallel.world_size, parallel.tensor
    block = tensor * parallel.context
    firsts = [start + place for start in range(0, world, block) for place in range(tensor)]
    return {
        "tensor": [range(first, first + tensor) for first in range(0, world, tensor)],
        "context": [range(first, first + block, tensor) for first in firsts],
        "expert": [range(first, first + parallel.expert) for first in range(0, world, parallel.expert)],
    }


def straddling(parallel: ParallelConfig, machines: Sequence[str]) -> str | None:
    """Which groups lie over several of ``machines``, those of the ranks in order; None where none does."""
    found = [
        f"{key} groups ({key}={getattr(parallel, key)})"
        for key, groups in layer_groups(parallel).items()
        if any(len({machines[rank] for rank in group}) > 1 for group in groups)
    ]
    if not found:
        return None
    return (
        f"train.parallel: {' and '.join(found)} of the ranks lie over several machines, so their exchanges go over the "
        "network; machines with more GPUs free, or smaller groups, would be faster"
    )


def parallel_problems(parallel: ParallelConfig) -> list[str]:
    """What is wrong with a layout whatever the model."""
    return [f"train.parallel: {found}" for rule in _RULES if (found := rule(parallel)) is not None]


def model_problems(parallel: ParallelConfig, model: ModelSpec) -> list[str]:
    """What of ``model`` a layout can't cut."""
    problems = []
    for name, field, key in _CUTS:
        size, parts = getattr(model, field), getattr(parallel, name)
        if size % parts and not (field == "inner" and all(model.moe)):  # no layer has an MLP of that size
            problems.append(f"train.parallel.{name}={parts} does not divide the model's {key}={size}")
    stages, layers = parallel.pipeline * parallel.virtual_pipeline, model.num_layers
    if layers % stages:
        problems.append(
            f"train.parallel: pipeline x virtual_pipeline = {parallel.pipeline} x {parallel.virtual_pipeline} does "
            f"not divide the model's num_hidden_layers={layers}"
        )
    if parallel.expert > 1 and not any(model.moe):
        problems.append(f"train.parallel.expert={parallel.expert}: this model has no experts; set it to 1")
    return problems


def recompute_problems(modules: tuple[str, ...], model: ModelSpec) -> list[str]:
    """Modules of a selective recomputation that ``model`` does not have, so that nothing would be run again."""
    there = {"core_attn": True, "moe": any(model.moe), "mlp": not all(model.moe)}
    return [
        f"train.recompute_modules: {name} would run nothing again, this model has {_LACKS[name]}"
        for name in modules
        if not there[name]
    ]


def expert_problems(dtype: str, model: ModelSpec) -> list[str]:
    """Widths that the experts' grouped matrix product can't take: it wants rows of a multiple of 16 bytes."""
    unit = 16 // {"float32": 4, "bfloat16": 2}[dtype]
    return [
        f"model: {key}={size} must be a multiple of {unit} with train.dtype {dtype} (the experts' grouped matrix "
        "product wants rows of a multiple of 16 bytes)"
        for key, size in (("hidden_size", model.hidden), ("moe_intermediate_size", model.expert_inner))
        if any(model.moe) and size % unit
    ]


def balance_problems(train: TrainConfig, model: ModelSpec | None = None) -> list[str]:
    """Why ``train.balance`` can't be done: nobody to share with, no route known before a pass, more slots than
    experts."""
    balance, parallel = train.balance, train.parallel
    if not balance.enabled:
        return []
    problems = []
    if parallel.expert == 1:
        problems.append("train.parallel.expert is 1, so no rank could take another's load; set it to 2 or more")
    if train.replay == "off":
        problems.append("train.replay is off, so no routes are known before a pass; set it to r3 or r2")
    if train.replay == "r2" and balance.expert_placement == "measured":
        problems.append("home measured needs routes before the first pass, and train.replay is r2; set it to r3")
    if parallel.dispatcher == "flex":
        problems.append("train.parallel.dispatcher flex knows nothing of borrowed experts; set it to alltoall")
    if (each := balance.ranks_per_node) is not None and parallel.expert % min(each, parallel.expert):
        problems.append(f"ranks_per_node {each} does not divide train.parallel.expert={parallel.expert}")
    if model is not None and model.num_experts % parallel.expert == 0:
        foreign = model.num_experts - model.num_experts // parallel.expert
        if parallel.expert > 1 and balance.slots > foreign:
            problems.append(f"slots {balance.slots}: other ranks have {foreign} experts; set it to {foreign} or less")
    return [f"train.balance: {problem}" for problem in problems]


def lora_problems(config: RunConfig) -> list[str]:
    """What adapters (``train.lora``) were not made for, or have no use for."""
    train, parallel = config.train, config.train.parallel
    reasons = {
        f"train.parallel.tensor is {parallel.tensor}, and adapters are not cut: set it to 1": parallel.tensor > 1,
        f"train.parallel.pipeline is {parallel.pipeline}, where they were not tried: set it to 1": parallel.pipeline
        > 1,
        "train.balance lends experts without their adapters: turn it off": train.balance.enabled,
        "train.offload_optimizer is for the state of all weights, theirs is small: turn it off": (
            train.offload_optimizer
        ),
        "engine.dtype float32 has digits that an export by train.dtype bfloat16 has not: make them equal": (
            (train.dtype, config.engine.dtype) == ("bfloat16", "float32")
        ),
    }
    return [f"train.lora: {reason}" for reason, holds in reasons.items() if train.lora and holds]


def weight_copies(parallel: ParallelConfig) -> int:
    """How many ranks hold a copy of a weight that is not an expert's: the data and context ranks."""
    return parallel.world_size // (parallel.tensor * parallel.pipeline)


def expert_copies(parallel: ParallelConfig) -> int:
    """How many ranks hold a copy of an expert: tensor ranks are among them, since experts are never cut."""
    return parallel.world_size // (parallel.pipeline * parallel.expert)


def shares_optimizer(parallel: ParallelConfig) -> bool:
    """Whether optimizer state is shared out: asked for, and some weight has more than one copy to share it among."""
    return parallel.distributed_optimizer and max(weight_copies(parallel), expert_copies(parallel)) > 1


def _whole_models(parallel: ParallelConfig) -> str | None:
    model = parallel.tensor * parallel.pipeline * parallel.context
    if parallel.world_size % model == 0:
        return None
    return (
        f"world_size {parallel.world_size} is not a multiple of tensor x pipeline x context = "
        f"{parallel.tensor} x {parallel.pipeline} x {parallel.context} = {model}"
    )


def _experts_in_a_stage(parallel: ParallelConfig) -> str | None:
    stage = parallel.world_size // parallel.pipeline
    if stage % parallel.expert == 0:
        return None
    return (
        f"expert {parallel.expert} does not divide the {stage} ranks of a pipeline stage "
        f"(world_size {parallel.world_size} / pipeline {parallel.pipeline})"
    )


def _virtual_stages_of_a_pipeline(parallel: ParallelConfig) -> str | None:
    if parallel.virtual_pipeline == 1 or parallel.pipeline > 1:
        return None
    return (
        f"virtual_pipeline {parallel.virtual_pipeline} needs pipeline stages; "
        "set pipeline to 2 or more, or virtual_pipeline to 1"
    )


def _allgather_in_one_stage(parallel: ParallelConfig) -> str | None:
    if parallel.dispatcher != "allgather" or parallel.pipeline == 1:
        return None
    return (
        f"dispatcher allgather can't be used with pipeline {parallel.pipeline} (Megatron wants "
        "micro-batches of one length there); set dispatcher to alltoall"
    )


def _flex_between_ranks(parallel: ParallelConfig) -> str | None:
    if parallel.dispatcher != "flex" or parallel.expert > 1:
        return None
    return "dispatcher flex is for tokens that go to other ranks, and expert is 1; set dispatcher to alltoall"


_RULES: tuple[Callable[[ParallelConfig], str | None], ...] = (
    _whole_models,
    _experts_in_a_stage,
    _virtual_stages_of_a_pipeline,
    _allgather_in_one_stage,
    _flex_between_ranks,
)
# What is cut into how many equal parts: the layout's key, the fact, and the fact's key in config.json. Experts are
# never cut over tensor ranks.
_CUTS = (
    ("tensor", "heads", "num_attention_heads"),
    ("tensor", "kv_heads", "num_key_value_heads"),
    ("tensor", "vocab_size", "vocab_size"),
    ("tensor", "inner", "intermediate_size"),
    ("tensor", "shared_inner", "shared_expert_intermediate_size"),
    ("expert", "num_experts", "num_experts"),
)
_LACKS = {"moe": "no layer with experts", "mlp": "no layer without experts"}
