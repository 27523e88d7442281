"""Plans a run before it starts: memory of GPUs and nodes, disk, and traffic.

::

    config ─ model's shape ─┬─ places: a trainer rank's GPU, an engine's, hosts, disk: items against a capacity
                            ├─ traffic: the object store of a step, a weight sync
                            └─ problems: layouts that are not possible, sequences that fit nowhere
    what does not fit ─ plan again with each knob changed ─> agent_rl/planner/suggestions.py

Upper bounds: every trajectory has the maximum length, unless the caller gives the mean. The formulas are
those of :mod:`agent_rl.planner.memory_model`; docs/how-to/plan-a-run.md compares them with measurements.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from agent_rl.config import EngineConfig, ParallelConfig, RunConfig, TrainConfig
from agent_rl.config.run import HardwareConfig
from agent_rl.errors import UserError
from agent_rl.models.spec import ModelSpec
from agent_rl.planner.compute_model import planned_publish, publishing_bytes
from agent_rl.planner.known_models import planned_model
from agent_rl.planner.memory_model import (
    BYTES,
    RankBytes,
    adapter_bytes,
    kv_bytes_per_token,
    parameters,
    pool_bytes,
    rank_bytes,
    route_bytes,
    route_slot_bytes,
    state_bytes,
    state_bytes_per_sequence,
    trained_parameters,
)
from agent_rl.planner.plan import GIB, Item, PlannedResource, RunPlan, gib
from agent_rl.train.parallel_checks import layout_problems
from agent_rl.utils.run_files import nearest_existing

TRAINER_SHARE, ENGINE_SHARE, HOST_SHARE = 0.95, 0.88, 0.9
"""Usable share of a GPU or of host memory; the rest is for fragmentation, engine activations and graphs, the system."""
CUDA_BYTES = 3 * GIB
"""CUDA context, library workspaces and NCCL buffers on one GPU."""
RANK_PROCESS, ENGINE_PROCESS, DRIVER_PROCESS = int(0.6 * GIB), int(2.1 * GIB), int(0.5 * GIB)
"""Host memory of an idle process, measured on a CPU."""
GLIBC_SLACK = {"full": 1.5, "selective": 0.5, "none": 0.5}
"""Freed memory that glibc keeps on a CPU, as a multiple of the memory at the peak, by ``train.recompute``
(benchmarks/bench_plan.py)."""
STATE_BYTES, EMA_BYTES = 12, 4
"""Bytes per parameter in a checkpoint: Adam's two moments and the master weight, and their average, always float32."""
SAMPLE_BYTES = 9
"""Bytes per token of a sample: id, log-prob, mask."""
IDENTITY_BYTES = 5
"""Bytes per row of routes in transfer: identity of its token, and whether it is present."""
ARCHIVE_SHARE = 0.66
"""Compressed size of an archived expert id, relative to its byte (253 bytes for 48 x top-8)."""
TEXT_BYTES = 16
"""Bytes per token of text in memory: messages, calls, observations (measured on 2,880 quickstart trajectories)."""
ROW_BYTES, DETAIL_BYTES = 1, 2
"""Bytes per token in trajectories/*.jsonl.zst and *.train.safetensors (0.97 and 2.2 on 576 quickstart trajectories)."""


def plan_once(config: RunConfig, *, tokens: int | None = None, model_spec: ModelSpec | None = None) -> RunPlan:
    """Plan ``config`` without advice. ``tokens``: the mean length of its trajectories (by default the longest allowed).
    ``model_spec``: of ``config.model``; None reads it.

    Raises UserError for an unknown model or for GPUs of unknown size.
    """
    model = model_spec or planned_model(config.model)
    device = planned_device(config.train, config.hardware)
    return _Planner(config, model, Load.of(config, tokens), device).plan()


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans ``config`` for the architecture ``model``, the step ``load`` and ``device``, cuda or cpu."""

    config: RunConfig
    model: ModelSpec
    load: Load
    device: str

    def plan(self) -> RunPlan:
        config, model, load, device = self.config, self.model, self.load, self.device
        problems = (*layout_problems(config, model), *self._problems(), *self._colocation_problems())
        if device == "cuda":
            problems = (*problems, *node_problems(config.hardware, config.train.parallel))
        rank = None if problems else rank_bytes(model, config.train, microbatches=load.microbatches, device=device)
        return RunPlan(
            name=config.name,
            device=device,
            model=model,
            rank=rank,
            resources=() if rank is None else tuple(self._resources(rank)),
            traffic=tuple(self._traffic()),
            problems=problems,
            notes=tuple(self._notes()),
        )

    def _problems(self) -> Iterator[str]:
        config = self.config
        longest = config.rollout.max_tokens
        if config.train.microbatch_tokens < longest:
            yield (
                f"train.microbatch_tokens={config.train.microbatch_tokens} is less than rollout.max_tokens={longest}: "
                f"a trajectory may be longer than a micro-batch; set it to {longest} or more, or lower max_tokens"
            )
        if config.engine.max_total_tokens < longest:
            yield (
                f"engine.max_total_tokens={config.engine.max_total_tokens} is less than rollout.max_tokens={longest}: "
                f"no trajectory could grow to its limit; set it to {longest} or more"
            )

    def _colocation_problems(self) -> Iterator[str]:
        config, device = self.config, self.device
        if config.engine.colocate and device == "cpu":
            yield "engine.colocate shares GPUs, and the plan is for CPUs: turn it off, or set hardware.gpu_memory_gb"
        world, each = config.train.parallel.world_size, config.hardware.gpus_per_node
        if config.engine.colocate and world > each:
            yield (
                f"engine.colocate is for one machine, and train.parallel.world_size={world} is more than "
                f"hardware.gpus_per_node={each}: take fewer ranks, or turn it off"
            )

    def _resources(self, rank: RankBytes) -> Iterator[PlannedResource]:
        if self.device == "cuda":
            yield from self._gpu_resources(rank)
        else:
            yield from self._cpu_resources(rank)
        yield PlannedResource("disk of runs_dir", tuple(self._disk()), self._disk_capacity())

    def _gpu_resources(self, rank: RankBytes) -> Iterator[PlannedResource]:
        config = self.config
        hardware, parallel = config.hardware, config.train.parallel
        assert hardware.gpu_memory_gb is not None
        gpu, world, span = hardware.gpu_memory_gb * GIB, parallel.world_size, config.engine.gpus
        if config.engine.colocate:
            yield from self._shared_gpu_resources(rank)
            yield from self._host_resources(rank)
            return
        context = Item("CUDA", CUDA_BYTES, "context, workspaces, NCCL")
        items = (*self._rank_items(rank), *self._sync_items(rank), context)
        yield PlannedResource("GPU of a trainer rank", items, int(gpu * TRAINER_SHARE), world)
        yield PlannedResource(
            "GPU of an engine",
            (*self._engine_items(span), context),
            int(gpu * ENGINE_SHARE),
            engine_count(config.engine) * span,
        )
        yield from self._host_resources(rank)

    def _shared_gpu_resources(self, rank: RankBytes) -> Iterator[PlannedResource]:
        """A GPU shared by trainer and engine, while either one is active."""
        config, model = self.config, self.model
        assert config.hardware.gpu_memory_gb is not None
        gpu, world = config.hardware.gpu_memory_gb * GIB, config.train.parallel.world_size
        contexts = Item("CUDA", 2 * CUDA_BYTES, "contexts, workspaces, NCCL of a rank and of an engine")
        training = (*self._rank_items(rank), contexts)
        yield PlannedResource("shared GPU, the engine asleep", training, int(gpu * TRAINER_SHARE), world)
        stays = Item("trainer", rank.static, "weights, gradients and optimizer, which stay")
        sync = Item("weight sync", publishing_bytes(model, config.train, config.engine), "to an engine that came back")
        sampling = (stays, *self._engine_items(config.engine.gpus), sync, contexts)
        yield PlannedResource("shared GPU, the engine awake", sampling, int(gpu * ENGINE_SHARE), world)

    def _host_resources(self, rank: RankBytes) -> Iterator[PlannedResource]:
        """Host memory of the nodes of a GPU run; one resource if ranks, engines and driver fit on one node."""
        config = self.config
        hardware, world = config.hardware, config.train.parallel.world_size
        host = int(self._host_memory_capacity() * HOST_SHARE)
        hosts, served = (
            hardware.trainer_nodes or -(-world // hardware.gpus_per_node),
            engine_count(config.engine) * config.engine.gpus,
        )
        per_host = -(-world // hosts)
        per_engine_host = min(served, hardware.gpus_per_node)
        of_ranks = tuple(self._rank_host_items(rank, per_host))
        of_engines: tuple[Item, ...] = (
            Item("engine's processes", per_engine_host * ENGINE_PROCESS, f"{per_engine_host} GPUs, one each"),
            self._route_slots(per_engine_host),
        )
        if config.engine.weight_sync == "delta":
            copies = -(-per_engine_host // config.engine.gpus)
            of_engines += (Item("weights as received", copies * self._sent_weights, f"{copies} engines' copies"),)
        of_driver = tuple(self._driver_items())
        used = world if config.engine.colocate else world + served
        if hosts == 1 and config.engine.launched and used <= hardware.gpus_per_node:
            yield PlannedResource("memory of the host", (*of_ranks, *of_engines, *of_driver), host)
            return
        yield PlannedResource("memory of a trainer host", of_ranks, host, hosts)
        yield PlannedResource("memory of an engine host", of_engines, host, -(-served // hardware.gpus_per_node))
        yield PlannedResource("memory of the driver's host", of_driver, host)

    def _cpu_resources(self, rank: RankBytes) -> Iterator[PlannedResource]:
        config = self.config
        world = config.train.parallel.world_size
        slack = Item("allocator", glibc_slack(rank, config.train.recompute), "what glibc keeps of freed memory")
        rank_items = (Item("process", RANK_PROCESS), *self._rank_items(rank), slack)
        yield PlannedResource("trainer rank", rank_items, count=world)
        engine_items = (Item("process", ENGINE_PROCESS), *self._engine_items(1), self._route_slots(1))
        one, distill = sum(item.size for item in engine_items), config.train.distill
        engines: tuple[Item, ...] = ()
        if config.engine.launched:
            yield PlannedResource("engine", engine_items)
            engines = (Item("engine", one),)
        if distill is not None and distill.served:
            engines += (Item("teacher's engine", one, "counted with the policy's model"),)
        ranks = Item("trainer ranks", world * sum(item.size for item in rank_items), f"{world} x a rank")
        routes = [item for item in self._rank_host_items(rank, world) if item.what != "processes"]
        items = (ranks, *engines, *routes, *self._driver_items())
        yield PlannedResource("memory of this machine", items, int(self._host_memory_capacity() * HOST_SHARE))

    def _rank_items(self, rank: RankBytes) -> Iterator[Item]:
        config = self.config
        train = config.train
        shared = rank.optimizer + rank.offloaded < rank.optimizer_unshared
        other = f"; {gib(rank.optimizer_unshared)} if not shared" if shared else "; held whole"
        yield Item("weights", rank.weights, train.dtype)
        yield Item("gradients", rank.gradients, "float32 buffers")
        if not rank.offloaded:
            short = "" if train.optimizer_moments == "float32" else f"{train.optimizer_moments} "
            yield Item("optimizer", rank.optimizer, f"Adam's {short}moments{_master(config.train)}{other}")
        where = ", inputs of layers on the host" if rank.inputs else ""
        yield Item(
            "activations", rank.activations, f"{train.microbatch_tokens} tokens, recompute {train.recompute}{where}"
        )
        if train.balance.enabled:
            yield Item(
                "borrowed", rank.borrowed, f"{train.balance.slots} experts, and as many being fetched or returned"
            )
        yield Item("at the peak", rank.peak, max(rank.peaks, key=rank.peaks.__getitem__))

    def _sync_items(self, rank: RankBytes) -> Iterator[Item]:
        """The memory of a weight sync beyond that of a step."""
        config, model = self.config, self.model
        more = publishing_bytes(model, config.train, config.engine) - (rank.total - rank.static)
        if more > 0:
            yield Item("weight sync", more, "a gathered weight and buckets, beyond a step's memory")

    def _engine_items(self, span: int) -> Iterator[Item]:
        config, model = self.config, self.model
        width, slots = BYTES[config.engine.dtype], config.engine.max_total_tokens
        per_token = kv_bytes_per_token(model, config.engine.dtype, span)
        # SGLang stores the output layer separately from the embedding.
        served = parameters(model) + (model.vocab_size * model.hidden if model.tied else 0)
        yield Item("weights", served * width // span, f"{config.engine.dtype}, sharded over {span}")
        yield Item("KV cache", slots * per_token, f"{slots} tokens x {per_token} bytes")
        if state := state_bytes_per_sequence(model, config.engine.dtype, span):
            running = config.engine.max_running_requests
            yield Item("states and windows", running * state, f"{running} requests x {state} bytes")

    def _route_slots(self, processes: int) -> Item:
        config, model = self.config, self.model
        slots, size = config.engine.max_total_tokens, route_slot_bytes(model)
        return Item("engine's routes", processes * slots * size, f"{processes} x {slots} slots x {size} bytes, pinned")

    @property
    def _sent_weights(self) -> int:
        return planned_publish(self.model, self.config.train, self.config.engine).bytes

    def _rank_host_items(self, rank: RankBytes, ranks: int) -> Iterator[Item]:
        config, model, load = self.config, self.model, self.load
        parallel = config.train.parallel
        share = ranks / parallel.world_size
        passes = 1 + 1 + (config.train.replay == "r3" and config.train.measure_without_replay_every > 0)
        yield Item("processes", ranks * RANK_PROCESS, f"{ranks} ranks")
        yield Item("samples", int(share * load.tokens * SAMPLE_BYTES), "of a step, in the object store")
        routes = int(share * load.tokens * route_bytes(model) * passes)
        yield Item("routes", routes, f"of a step: for replay, and recorded by {passes - 1} pass(es)")
        if config.engine.weight_sync == "delta":
            yield Item("weights as sent", self._sent_weights, "rank 0's copy, of which deltas are made")
        if config.train.kl.coefficient:
            trained = rank.gradients * BYTES[config.train.dtype] // 4  # only trained weights are copied
            reference = trained if config.train.kl.reference is None else rank.weights
            yield Item("reference", ranks * reference, "the KL penalty's weights")
        if pool := pool_bytes(model, config.train):
            yield Item("expert pool", pool, "all experts, in memory shared by the ranks of a node")
        if rank.inputs:
            yield Item("activations", ranks * rank.inputs, "inputs of layers, kept for the backward pass")
        if rank.offloaded:
            narrow = "" if config.train.optimizer_moments == "float32" else ", moments in bfloat16"
            yield Item("optimizer", ranks * rank.offloaded, f"its state, between updates{narrow}")
        numbers = (rank.optimizer + rank.offloaded) // state_bytes(config.train)
        if config.train.ema is not None:
            yield Item("average", ranks * numbers * EMA_BYTES, "of the weights, train.ema")
        copied = numbers * saved_bytes(config.train)
        yield Item("checkpoint", ranks * copied, "a copy, written while training continues")

    def _driver_items(self) -> Iterator[Item]:
        config, model, load = self.config, self.model, self.load
        per_token = route_bytes(model) + SAMPLE_BYTES
        yield Item("driver's process", DRIVER_PROCESS)
        yield Item(
            "trajectories", load.tokens * (per_token + TEXT_BYTES), f"{load.trajectories} of a step, with routes"
        )
        if ahead := config.async_rollout.depth:
            yield Item(
                "sampled ahead", ahead * load.tokens * TEXT_BYTES, f"text of {ahead} step(s); arrays are on the disk"
            )

    def _disk(self) -> Iterator[Item]:
        config, model, load = self.config, self.model, self.load
        detail = DETAIL_BYTES if config.monitoring.token_detail else 0
        per_token = int(route_bytes(model) * ARCHIVE_SHARE) + SAMPLE_BYTES + ROW_BYTES + detail
        steps, train = config.train.steps, config.train
        yield Item("trajectories", steps * load.tokens * per_token, f"{steps} steps of {gib(load.tokens * per_token)}")
        # Entries before a checkpoint are removed once it is written, during the next step.
        journaled = min(steps, train.checkpoint_every + 1) if train.checkpoint_every else steps
        ordered = per_token + int(route_bytes(model) * ARCHIVE_SHARE / 3)  # routes keep their order: a third more
        ahead = config.async_rollout.depth
        yield Item("journal", (journaled + ahead) * load.tokens * ordered, "episodes since the last checkpoint")
        kept = train.keep_checkpoints + 1  # the next is written before the oldest is removed
        one = sum(trained_parameters(model, train, ParallelConfig())) * saved_bytes(train)
        yield Item("checkpoints", kept * one, f"{train.keep_checkpoints} kept and one being written, {gib(one)} each")
        yield Item("model", parameters(model) * BYTES[train.dtype], "exported at the end")
        if config.sandbox.pull and config.sandbox.image_budget_gb:
            yield Item(
                "images", int(config.sandbox.image_budget_gb * 1e9), "sandbox.image_budget_gb, on the sandboxes' disk"
            )

    def _traffic(self) -> Iterator[Item]:
        config, model, load = self.config, self.model, self.load
        parallel, count = config.train.parallel, engine_count(config.engine)
        rows = load.tokens * IDENTITY_BYTES * parallel.pipeline
        size = load.tokens * (SAMPLE_BYTES + route_bytes(model)) + rows
        yield Item(
            "object store, a step",
            size,
            f"{load.tokens} tokens: samples {SAMPLE_BYTES} B, routes {route_bytes(model)} B",
        )
        weights = parameters(model) * BYTES[config.engine.dtype]
        if config.train.lora and config.engine.merges_adapters:
            weights = adapter_bytes(model, config.train)
        yield Item("weight sync, a step", weights * count, f"{gib(weights)} to each of {count} engine(s)")
        wire = load.tokens * model.num_layers * model.top_k * 4 * 4 // 3
        yield Item("routes from the engines, a step", wire, "int32 in base64, each row once")

    def _notes(self) -> Iterator[str]:
        config, model, load = self.config, self.model, self.load
        if model.quantized:
            yield f"{config.model} is quantized: trainer and engines have its weights in their own dtypes"
        slots, longest = config.engine.max_total_tokens * engine_count(config.engine), config.rollout.max_tokens
        running = min(config.rollout.concurrency, load.trajectories)
        fitting = slots // longest
        if fitting < running:
            yield (
                f"the engines' KV cache holds {fitting} trajectories of {longest} tokens and {running} run at once: "
                "if they grow that long, prefixes are evicted and computed again"
            )
        if longest > model.max_positions:
            yield (
                f"rollout.max_tokens={longest} is more than the model's max_position_embeddings="
                f"{model.max_positions}: trajectories end there; extend its config (YaRN) or use a long-context release"
            )
        if config.train.parallel.context > 1 and self.device == "cuda" and config.train.dtype == "float32":
            yield (
                f"train.parallel.context={config.train.parallel.context}: its attention is masked in "
                "float32; torch's fallback kernel would store all attention scores, which this plan does not count"
            )
        if not config.train.ray_address:
            from agent_rl.train.ray_session import object_store_bytes

            size, store = next(self._traffic()).size, object_store_bytes()
            if size > store:
                yield (
                    f"the object store of a local Ray has {gib(store)} and a step needs {gib(size)}: Ray spills the "
                    "rest to disk; a cluster (train.ray_address) has its own size"
                )

    def _host_memory_capacity(self) -> int:
        config = self.config
        if config.hardware.host_memory_gb is not None:
            return int(config.hardware.host_memory_gb * GIB)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def _disk_capacity(self) -> int:
        config = self.config
        if config.hardware.disk_gb is not None:
            return int(config.hardware.disk_gb * GIB)
        return shutil.disk_usage(nearest_existing(config.runs_dir)).free


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a step: ``tokens`` of all trajectories, and ``microbatches`` per data rank and mini step."""

    trajectories: int
    tokens: int
    microbatches: int

    @classmethod
    def of(cls, config: RunConfig, mean: int | None) -> Load:
        trajectories = config.rollout.tasks_per_step * config.rollout.group_size
        longest = config.rollout.tokens_per_trajectory
        tokens = trajectories * min(mean or longest, longest)
        parallel = config.train.parallel
        data = max(1, parallel.world_size // (parallel.tensor * parallel.pipeline * parallel.context))
        budget = config.train.microbatch_tokens * data * config.train.mini_steps
        return cls(trajectories, tokens, max(1, -(-tokens // budget)))


def planned_device(train: TrainConfig, hardware: HardwareConfig) -> str:
    """``cuda`` or ``cpu``. Raises UserError for GPUs of unknown size."""
    configured, memory = train.device, hardware.gpu_memory_gb
    if configured == "cpu" or (configured == "auto" and memory is None):
        return "cpu"
    if memory is None:
        raise UserError("hardware.gpu_memory_gb: train.device is cuda: set the memory of a GPU, in GiB")
    return "cuda"


def saved_bytes(train: TrainConfig) -> int:
    """Bytes per trained parameter in a checkpoint."""
    return STATE_BYTES + (EMA_BYTES if train.ema is not None else 0)


def engine_count(engine: EngineConfig) -> int:
    return engine.count if engine.launched else len(engine.external_urls)


def node_problems(hardware: HardwareConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yields one line if the trainer's nodes have fewer GPUs than there are ranks."""
    hosts, each, world = hardware.trainer_nodes, hardware.gpus_per_node, parallel.world_size
    if hosts is not None and world > hosts * each:
        yield (
            f"train.parallel.world_size={world} is more than hardware.trainer_nodes={hosts} times "
            f"hardware.gpus_per_node={each}: use more nodes, or fewer ranks"
        )


def glibc_slack(rank: RankBytes, recompute: str) -> int:
    """Returns the freed memory that glibc keeps in a rank on a CPU, in bytes."""
    return int(rank.peak * GLIBC_SLACK[recompute])


def _master(train: TrainConfig) -> str:
    return " and float32 weights" if train.dtype == "bfloat16" else ""
