"""What a run will take, known before it is started: memory by rank and host, disk, and the bytes that travel.

::

    config ─ model's shape ─┬─ places: a trainer rank's GPU, an engine's, hosts, disk: items against a capacity
                            ├─ traffic: the object store of a step, a weight sync
                            └─ problems: layouts that are not possible, sequences that fit nowhere
    what does not fit ─ every knob tried by planning again ─> agent_rl/planner/suggestions.py

Upper bounds: every trajectory is taken to be as long as allowed, unless the caller knows their mean. The formulas are
those of :mod:`agent_rl.planner.memory_model`; docs/planning.md compares them with measurements.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.errors import UserError
from agent_rl.models.spec import ModelSpec
from agent_rl.planner.compute_model import publishing_bytes
from agent_rl.planner.known_models import planned_model
from agent_rl.planner.memory_model import (
    BYTES,
    RankBytes,
    changes_bytes,
    kv_bytes_per_token,
    parameters,
    pool_bytes,
    rank_bytes,
    route_bytes,
    route_slot_bytes,
    state_bytes,
    trained_parameters,
)
from agent_rl.planner.plan import GIB, Item, PlannedPlace, RunPlan, gib
from agent_rl.train.parallel_checks import layout_problems

TRAINER_SHARE, ENGINE_SHARE, HOST_SHARE = 0.95, 0.88, 0.9
"""Of a GPU or host what a run may fill: the rest goes to fragments, an engine's activations and graphs, the system."""
CUDA_BYTES = 3 * GIB
"""A CUDA context, the libraries' workspaces and NCCL's buffers on one GPU."""
RANK_PROCESS, ENGINE_PROCESS, DRIVER_PROCESS = int(0.6 * GIB), int(2.1 * GIB), int(0.5 * GIB)
"""Host memory of a process that holds nothing yet, measured on a CPU."""
GLIBC_SLACK = {"full": 1.5, "selective": 0.5, "none": 0.5}
"""Freed memory that glibc keeps on a CPU, over what comes and goes at the peak (benchmarks/bench_plan.py): more does
where layers are run again."""
STATE_BYTES = 12
"""A parameter in a checkpoint: Adam's two moments and the master weight, float32 whatever the training's precision."""
SAMPLE_BYTES = 9
"""A token of a sample: id, log-prob, mask."""
IDENTITY_BYTES = 5
"""A row of routes that travels: whose it is, and whether it is there."""
ARCHIVE_SHARE = 0.66
"""An archived expert id over its byte (README, 253 bytes for 48 x top-8)."""
TEXT_BYTES = 16
"""A token's text in memory: messages, calls, observations (measured on 2,880 quickstart trajectories)."""
ROW_BYTES, DETAIL_BYTES = 1, 2
"""A token in trajectories/*.jsonl.zst, and in *.train.safetensors (0.97 and 2.2 on 576 quickstart trajectories)."""


def plan_once(config: RunConfig, *, tokens: int | None = None) -> RunPlan:
    """Plan ``config`` without advice; ``tokens``: the mean length of its trajectories (the longest by default).

    Raises UserError where the model is not known or the hardware cannot be found out.
    """
    model, device, load = planned_model(config.model), planned_device(config), Load.of(config, tokens)
    hosts = hosts_problems(config) if device == "cuda" else ()
    problems = (*layout_problems(config, model), *_problems(config), *_sharing_problems(config, device), *hosts)
    rank = None if problems else rank_bytes(model, config.train, microbatches=load.microbatches, device=device)
    places = () if rank is None else tuple(_places(config, model, rank, load, device))
    return RunPlan(
        name=config.name,
        device=device,
        model=model,
        rank=rank,
        places=places,
        traffic=tuple(_traffic(config, model, load)),
        problems=problems,
        notes=tuple(_notes(config, model, load)),
    )


@dataclass(frozen=True, slots=True)
class Load:
    """What a step brings: ``tokens`` of all trajectories, and a data rank's ``microbatches`` a mini step."""

    trajectories: int
    tokens: int
    microbatches: int

    @classmethod
    def of(cls, config: RunConfig, mean: int | None) -> Load:
        trajectories = config.rollout.tasks_per_step * config.rollout.group_size
        tokens = trajectories * min(mean or config.rollout.max_tokens, config.rollout.max_tokens)
        parallel = config.train.parallel
        data = max(1, parallel.world_size // (parallel.tensor * parallel.pipeline * parallel.context))
        budget = config.train.microbatch_tokens * data * config.train.mini_steps
        return cls(trajectories, tokens, max(1, -(-tokens // budget)))


def planned_device(config: RunConfig) -> str:
    """``cuda`` or ``cpu``. Raises UserError for GPUs of unknown size."""
    wanted, memory = config.train.device, config.hardware.gpu_memory_gb
    if wanted == "cpu" or (wanted == "auto" and memory is None):
        return "cpu"
    if memory is None:
        raise UserError("hardware.gpu_memory_gb: train.device is cuda, so say what memory a GPU has, in GiB")
    return "cuda"


def engines(config: RunConfig) -> int:
    return config.engine.count if config.engine.launched else len(config.engine.named)


def _problems(config: RunConfig) -> Iterator[str]:
    longest = config.rollout.max_tokens
    if config.train.microbatch_tokens < longest:
        yield (
            f"train.microbatch_tokens={config.train.microbatch_tokens} is less than rollout.max_tokens={longest}: a "
            f"trajectory may be longer than a micro-batch; set it to {longest} or more, or rollout.max_tokens lower"
        )
    if config.engine.max_total_tokens < longest:
        yield (
            f"engine.max_total_tokens={config.engine.max_total_tokens} is less than rollout.max_tokens={longest}: no "
            f"trajectory could grow to its limit; set it to {longest} or more"
        )


def _sharing_problems(config: RunConfig, device: str) -> Iterator[str]:
    if config.engine.colocate and device == "cpu":
        yield "engine.colocate shares GPUs, and the plan is for CPUs: turn it off, or set hardware.gpu_memory_gb"
    world, each = config.train.parallel.world_size, config.hardware.gpus_per_node
    if config.engine.colocate and world > each:
        yield (
            f"engine.colocate is for one machine, and train.parallel.world_size={world} is more than "
            f"hardware.gpus_per_node={each}: take fewer ranks, or turn it off"
        )


def hosts_problems(config: RunConfig) -> Iterator[str]:
    """One line where the hosts have fewer GPUs than there are trainer ranks."""
    hosts, each, world = (
        config.hardware.trainer_nodes,
        config.hardware.gpus_per_node,
        config.train.parallel.world_size,
    )
    if hosts is not None and world > hosts * each:
        yield (
            f"train.parallel.world_size={world} is more than hardware.trainer_nodes={hosts} times "
            f"hardware.gpus_per_node={each}: name more hosts, or fewer ranks"
        )


def _places(config: RunConfig, model: ModelSpec, rank: RankBytes, load: Load, device: str) -> Iterator[PlannedPlace]:
    if device == "cuda":
        yield from _gpu_places(config, model, rank, load)
    else:
        yield from _cpu_places(config, model, rank, load)
    yield PlannedPlace("disk of runs_dir", tuple(_disk(config, model, load)), _disk_capacity(config))


def _gpu_places(config: RunConfig, model: ModelSpec, rank: RankBytes, load: Load) -> Iterator[PlannedPlace]:
    hardware, parallel = config.hardware, config.train.parallel
    assert hardware.gpu_memory_gb is not None
    gpu, world, span = hardware.gpu_memory_gb * GIB, parallel.world_size, config.engine.gpus
    if config.engine.colocate:
        yield from _shared_gpu_places(config, model, rank)
        yield from _host_places(config, model, rank, load)
        return
    context = Item("CUDA", CUDA_BYTES, "context, workspaces, NCCL")
    items = (*_rank_items(config, rank), *_sync_items(config, model, rank), context)
    yield PlannedPlace("GPU of a trainer rank", items, int(gpu * TRAINER_SHARE), world)
    yield PlannedPlace(
        "GPU of an engine",
        (*_engine_items(config, model, span), context),
        int(gpu * ENGINE_SHARE),
        engines(config) * span,
    )
    yield from _host_places(config, model, rank, load)


def _shared_gpu_places(config: RunConfig, model: ModelSpec, rank: RankBytes) -> Iterator[PlannedPlace]:
    """A GPU that trainer and engine have in turn, in the turn of each."""
    assert config.hardware.gpu_memory_gb is not None
    gpu, world = config.hardware.gpu_memory_gb * GIB, config.train.parallel.world_size
    contexts = Item("CUDA", 2 * CUDA_BYTES, "contexts, workspaces, NCCL of a rank and of an engine")
    training = (*_rank_items(config, rank), contexts)
    yield PlannedPlace("shared GPU, the engine asleep", training, int(gpu * TRAINER_SHARE), world)
    stays = Item("trainer", rank.static, "weights, gradients and optimizer, which stay")
    sync = Item("weight sync", publishing_bytes(model, config.train, config.engine), "to an engine that came back")
    sampling = (stays, *_engine_items(config, model, config.engine.gpus), sync, contexts)
    yield PlannedPlace("shared GPU, the engine awake", sampling, int(gpu * ENGINE_SHARE), world)


def _host_places(config: RunConfig, model: ModelSpec, rank: RankBytes, load: Load) -> Iterator[PlannedPlace]:
    """Memory of the machines of a run on GPUs; one place where ranks, engines and driver may all be on one."""
    hardware, world = config.hardware, config.train.parallel.world_size
    host = int(_host_memory(config) * HOST_SHARE)
    hosts, served = (
        hardware.trainer_nodes or -(-world // hardware.gpus_per_node),
        engines(config) * config.engine.gpus,
    )
    per_host = -(-world // hosts)
    per_engine_host = min(served, hardware.gpus_per_node)
    of_ranks = tuple(_rank_host_items(config, model, rank, load, per_host))
    of_engines = (
        Item("engine's processes", per_engine_host * ENGINE_PROCESS, f"{per_engine_host} GPUs, one each"),
        _route_slots(config, model, per_engine_host),
    )
    of_driver = tuple(_driver_items(config, model, load))
    used = world if config.engine.colocate else world + served
    if hosts == 1 and config.engine.launched and used <= hardware.gpus_per_node:
        yield PlannedPlace("memory of the host", (*of_ranks, *of_engines, *of_driver), host)
        return
    yield PlannedPlace("memory of a trainer host", of_ranks, host, hosts)
    yield PlannedPlace("memory of an engine host", of_engines, host, -(-served // hardware.gpus_per_node))
    yield PlannedPlace("memory of the driver's host", of_driver, host)


def _cpu_places(config: RunConfig, model: ModelSpec, rank: RankBytes, load: Load) -> Iterator[PlannedPlace]:
    world = config.train.parallel.world_size
    slack = Item("allocator", glibc_slack(rank, config.train.recompute), "what glibc keeps of freed memory")
    rank_items = (Item("process", RANK_PROCESS), *_rank_items(config, rank), slack)
    yield PlannedPlace("trainer rank", rank_items, count=world)
    engine_items: tuple[Item, ...] = ()
    if config.engine.launched:
        engine_items = (
            Item("process", ENGINE_PROCESS),
            *_engine_items(config, model, 1),
            _route_slots(config, model, 1),
        )
        yield PlannedPlace("engine", engine_items)
    ranks = Item("trainer ranks", world * sum(item.size for item in rank_items), f"{world} x a rank")
    engine = (Item("engine", sum(item.size for item in engine_items)),) if engine_items else ()
    routes = [item for item in _rank_host_items(config, model, rank, load, world) if item.what != "processes"]
    items = (ranks, *engine, *routes, *_driver_items(config, model, load))
    yield PlannedPlace("memory of this machine", items, int(_host_memory(config) * HOST_SHARE))


def glibc_slack(rank: RankBytes, recompute: str) -> int:
    """What a rank on a CPU keeps of freed memory, in bytes."""
    return int(rank.peak * GLIBC_SLACK[recompute])


def _rank_items(config: RunConfig, rank: RankBytes) -> Iterator[Item]:
    train = config.train
    shared = rank.optimizer + rank.offloaded < rank.optimizer_unshared
    other = f"; {gib(rank.optimizer_unshared)} if not shared" if shared else "; held whole"
    yield Item("weights", rank.weights, train.dtype)
    yield Item("gradients", rank.gradients, "float32 buffers")
    if not rank.offloaded:
        short = "" if train.optimizer_moments == "float32" else f"{train.optimizer_moments} "
        yield Item("optimizer", rank.optimizer, f"Adam's {short}moments{_master(config)}{other}")
    where = ", inputs of layers on the host" if rank.inputs else ""
    yield Item("activations", rank.activations, f"{train.microbatch_tokens} tokens, recompute {train.recompute}{where}")
    if train.balance.enabled:
        yield Item("borrowed", rank.borrowed, f"{train.balance.slots} experts, and as many being fetched or returned")
    yield Item("at the peak", rank.peak, max(rank.peaks, key=rank.peaks.__getitem__))


def _sync_items(config: RunConfig, model: ModelSpec, rank: RankBytes) -> Iterator[Item]:
    """What a weight sync holds more than a step."""
    more = publishing_bytes(model, config.train, config.engine) - (rank.total - rank.static)
    if more > 0:
        yield Item("weight sync", more, "a gathered weight and buckets, beyond what a step takes")


def _master(config: RunConfig) -> str:
    return " and float32 weights" if config.train.dtype == "bfloat16" else ""


def _engine_items(config: RunConfig, model: ModelSpec, span: int) -> Iterator[Item]:
    width, slots = BYTES[config.engine.dtype], config.engine.max_total_tokens
    per_token = kv_bytes_per_token(model, config.engine.dtype, span)
    # SGLang's own models hold the output layer apart from the embedding.
    served = parameters(model) + (model.vocab_size * model.hidden if model.tied else 0)
    yield Item("weights", served * width // span, f"{config.engine.dtype}, cut in {span}")
    yield Item("KV cache", slots * per_token, f"{slots} tokens x {per_token} bytes")


def _route_slots(config: RunConfig, model: ModelSpec, processes: int) -> Item:
    slots, size = config.engine.max_total_tokens, route_slot_bytes(model)
    return Item("engine's routes", processes * slots * size, f"{processes} x {slots} slots x {size} bytes, pinned")


def _rank_host_items(config: RunConfig, model: ModelSpec, rank: RankBytes, load: Load, ranks: int) -> Iterator[Item]:
    parallel = config.train.parallel
    share = ranks / parallel.world_size
    passes = 1 + 1 + (config.train.replay == "r3" and config.train.measure_without_replay_every > 0)
    yield Item("processes", ranks * RANK_PROCESS, f"{ranks} ranks")
    yield Item("samples", int(share * load.tokens * SAMPLE_BYTES), "of a step, in the object store")
    routes = int(share * load.tokens * route_bytes(model) * passes)
    yield Item("routes", routes, f"given, and recorded by {passes - 1} pass(es), of a step")
    if config.train.kl.coefficient:
        trained = rank.gradients * BYTES[config.train.dtype] // 4  # beside the starting model nothing else differs
        held = trained if config.train.kl.reference is None else rank.weights
        yield Item("reference", ranks * held, "the KL penalty's weights")
    if pool := pool_bytes(model, config.train):
        yield Item("expert pool", pool, "all experts, in memory that its ranks share")
    if rank.inputs:
        yield Item("activations", ranks * rank.inputs, "inputs of layers, of a backward pass that is to come")
    if rank.offloaded:
        narrow = "" if config.train.optimizer_moments == "float32" else ", moments in bfloat16"
        yield Item("optimizer", ranks * rank.offloaded, f"its state, between updates{narrow}")
    copied = (rank.optimizer + rank.offloaded) * STATE_BYTES // state_bytes(config.train)
    yield Item("checkpoint", ranks * copied, "a copy that is written while training goes on")


def _driver_items(config: RunConfig, model: ModelSpec, load: Load) -> Iterator[Item]:
    per_token = route_bytes(model) + SAMPLE_BYTES
    yield Item("driver's process", DRIVER_PROCESS)
    yield Item("trajectories", load.tokens * (per_token + TEXT_BYTES), f"{load.trajectories} of a step, with routes")
    if ahead := config.async_rollout.depth:
        yield Item(
            "sampled ahead", ahead * load.tokens * TEXT_BYTES, f"text of {ahead} step(s); arrays are on the disk"
        )


def _disk(config: RunConfig, model: ModelSpec, load: Load) -> Iterator[Item]:
    detail = DETAIL_BYTES if config.monitoring.token_detail else 0
    per_token = int(route_bytes(model) * ARCHIVE_SHARE) + SAMPLE_BYTES + ROW_BYTES + detail
    steps, train = config.train.steps, config.train
    yield Item("trajectories", steps * load.tokens * per_token, f"{steps} steps of {gib(load.tokens * per_token)}")
    # The former steps' are removed when the checkpoint is written, during the step after it.
    journaled = min(steps, train.checkpoint_every + 1) if train.checkpoint_every else steps
    ordered = per_token + int(route_bytes(model) * ARCHIVE_SHARE / 3)  # routes keep their order there: a third more
    ahead = config.async_rollout.depth
    yield Item("journal", (journaled + ahead) * load.tokens * ordered, "episodes since the last checkpoint")
    kept = train.keep_checkpoints + 1  # the next is written before the oldest goes
    one = sum(trained_parameters(model, train, ParallelConfig())) * STATE_BYTES
    yield Item("checkpoints", kept * one, f"{train.keep_checkpoints} kept and one being written, {gib(one)} each")
    yield Item("model", parameters(model) * BYTES[train.dtype], "exported at the end")
    if config.sandbox.pull and config.sandbox.image_budget_gb:
        yield Item(
            "images", int(config.sandbox.image_budget_gb * 1e9), "sandbox.image_budget_gb, on the sandboxes' disk"
        )


def _traffic(config: RunConfig, model: ModelSpec, load: Load) -> Iterator[Item]:
    parallel, count = config.train.parallel, engines(config)
    rows = load.tokens * IDENTITY_BYTES * parallel.pipeline
    size = load.tokens * (SAMPLE_BYTES + route_bytes(model)) + rows
    yield Item(
        "object store, a step", size, f"{load.tokens} tokens: samples {SAMPLE_BYTES} B, routes {route_bytes(model)} B"
    )
    weights = parameters(model) * BYTES[config.engine.dtype]
    if config.train.lora and config.engine.merges_adapters:
        weights = changes_bytes(model, config.train)
    yield Item("weight sync, a step", weights * count, f"{gib(weights)} to each of {count} engine(s)")
    wire = load.tokens * model.num_layers * model.top_k * 4 * 4 // 3
    yield Item("routes from the engines, a step", wire, "int32 in base64, each row once")


def _notes(config: RunConfig, model: ModelSpec, load: Load) -> Iterator[str]:
    slots, longest = config.engine.max_total_tokens * engines(config), config.rollout.max_tokens
    running = min(config.rollout.concurrency, load.trajectories)
    whole = slots // longest
    if whole < running:
        yield (
            f"the engines' KV cache holds {whole} trajectories of {longest} tokens and {running} run at once: where "
            "they grow that long, prefixes are evicted and computed again"
        )
    if longest > model.max_positions:
        yield (
            f"rollout.max_tokens={longest} is more than the model's max_position_embeddings={model.max_positions}: "
            "trajectories end there unless its config is extended (YaRN) or a long-context release is taken"
        )
    if config.train.parallel.context > 1 and planned_device(config) == "cuda" and config.train.dtype == "float32":
        yield (
            f"train.parallel.context={config.train.parallel.context}: its attention is masked, and which of torch's "
            "kernels takes that on a GPU was not tried; the slowest would hold all scores, which are not counted here"
        )
    if not config.train.ray_address:
        from agent_rl.train.ray_session import object_store_bytes

        size, store = next(_traffic(config, model, load)).size, object_store_bytes()
        if size > store:
            yield (
                f"a local Ray's object store has {gib(store)} and a step brings {gib(size)}: Ray would "
                "spill the rest to disk; on a cluster (train.ray_address) its own size counts"
            )


def _host_memory(config: RunConfig) -> int:
    if config.hardware.host_memory_gb is not None:
        return int(config.hardware.host_memory_gb * GIB)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _disk_capacity(config: RunConfig) -> int:
    if config.hardware.disk_gb is not None:
        return int(config.hardware.disk_gb * GIB)
    directory = config.runs_dir.absolute()
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free
