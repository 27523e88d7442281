"""Runs the trainer's code for one rank on a simulated GPU and records its usage. Imports torch."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agent_rl.config import EngineConfig
from agent_rl.dryrun import fake_cuda_api as cuda
from agent_rl.dryrun import fake_cuda_mode as mode
from agent_rl.dryrun.batch import make_samples, mini_step_share
from agent_rl.dryrun.collectives import Collectives
from agent_rl.dryrun.engines import FakeEngines
from agent_rl.dryrun.job import STEP_PHASES, WEIGHT_PHASES, Owner, PhaseRecord, RankJob, RankRecord
from agent_rl.dryrun.usage import UsageRecorder
from agent_rl.errors import AgentRlError, TrainerError
from agent_rl.models.spec import read_model_spec
from agent_rl.models.tensors import model_parameters
from agent_rl.planner.hardware import Gpu
from agent_rl.planner.planner import engine_count
from agent_rl.train.hf_index import Shapes, adapter_update_shapes, sent_shapes
from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerRequest
from agent_rl.weight_sync.adapters import SUFFIX
from agent_rl.weight_sync.requests import PublishRequest
from r3.shard import stage_layers

if TYPE_CHECKING:
    from agent_rl.train.megatron.model import PolicyModel


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """The replacements for CUDA and for the other ranks in a dry-run rank's process."""

    usage: UsageRecorder
    collectives: Collectives

    @classmethod
    def install(cls, gpu: Gpu) -> RankEnvironment:
        """Install the replacements in this process, permanently. Imports Megatron; call before anything else does."""
        usage = UsageRecorder(gpu)
        collectives = Collectives(usage)
        collectives.install()
        cuda.install(usage)
        mode.install(usage)
        return cls(usage, collectives)


def dry_run_rank(job: RankJob, environment: RankEnvironment) -> RankRecord:
    """Run the start, the load, a snapshot, one global step, an export and two weight syncs, the second refused."""
    started, usage, progress = time.perf_counter(), environment.usage, RankProgress()
    try:
        with mode.FakeCudaMode(usage):
            _run(job, environment, progress)
        fault = None
    except Exception as error:  # an error that would end a process on a GPU is the result of the dry run
        fault = _describe(error, usage.failed_phase)
    peaks = usage.peaks()
    phases = {
        name: PhaseRecord(
            peaks[name].peak, phase.flops, dict(phase.sent), phase.syncs, peaks[name].owners, phase.seconds,
            dict(phase.calls), phase.attention,
        )
        for name, phase in usage.phases.items()
    }  # fmt: skip
    groups = {name: list(ranks) for ranks, name in environment.collectives.names.items()}
    return RankRecord(
        rank=job.rank,
        layers=progress.layers,
        phases=phases,
        static=progress.static,
        retained=progress.retained,
        pinned=usage.pinned,
        groups=groups,
        seconds=time.perf_counter() - started,
        fault=fault,
    )


class RankProgress:
    """What a rank reports before it ends: its layers, bytes of its state, and bytes retained after a step."""

    layers = static = retained = 0


def _run(job: RankJob, environment: RankEnvironment, progress: RankProgress) -> None:
    from agent_rl.train.route_sharding import shard_routes
    from agent_rl.train.worker import TrainerWorker

    train, usage, collectives = job.config.train, environment.usage, environment.collectives
    _load_shapes_only(job, usage)
    _map_pool_without_memory(job)
    reference = job.model if train.kl.coefficient else None
    request = WorkerRequest(job.config, read_model_spec(job.model), job.model, reference, "cuda", threads=1)
    with usage.phase("start"):
        rank = TrainerWorker(request, OptimizerSpec.of(train), job.rank, master_addr="", master_port=0)
    collectives.names = _group_names()
    model, ranks = rank.model, rank._ranks
    progress.layers = model.model_spec.num_layers
    samples = make_samples(job.config, model.model_spec, ranks.expert_rank, job.skew)
    share = mini_step_share(samples, job.config)
    listed = [samples[index] for index in sorted(samples)]
    shards = (
        [shard_routes(listed, ids, model.shard) for ids in share.micro_batches]
        if model.model_spec.moe_layer_ids
        else []
    )
    tokens = [sum(len(samples[index].tokens) for index in ids) for ids in share.micro_batches]
    rows = len(shards[0].experts) if shards else tokens[0] // (ranks.context_size * ranks.tensor_size)
    collectives.activation_shape = (rows, 1, model.model_spec.hidden)
    collectives.last_stage_objects = lambda: [_last_stage_output(usage.phase_name, size) for size in tokens]
    _separate_phases(rank, usage)
    with usage.phase("snapshot"):  # before the step: allocates the optimizer's moments
        rank._state.snapshot()
    _assign_state_owners(rank, usage)
    progress.static = usage.allocated
    collectives.gather_objects = partial(_one_peer_swaps, job.rank, train.parallel.world_size)
    with usage.phase(STEP_PHASES[0]):
        rank.grpo(samples, [share], StepRequest(job.config, measure_without_replay=False), shards)
    gc.collect()
    progress.retained = usage.allocated - progress.static
    collectives.gather_objects = partial(_announced_before_a_sync, model, train.parallel.world_size)
    with usage.phase(WEIGHT_PHASES[0], owner="copies"):
        deque(model.export_weights(), maxlen=0)
    _publish(job, rank, environment)


def _separate_phases(rank: Any, usage: UsageRecorder) -> None:
    """Count the parts of a step as separate phases. Temporaries present when a backward pass starts are activations."""
    from megatron.core.pipeline_parallel import schedules

    model = rank.model
    _count_as_phase(usage, model, "train_microbatches", "update")
    _count_as_phase(usage, model, "forward_logprobs", "old log-probs")
    _count_as_phase(usage, rank._optimizer, "step", "step")
    if rank._reference is not None:
        reference = rank._reference
        plain = reference.swapped_in

        @contextmanager
        def swapped_in() -> Iterator[None]:
            with usage.phase("reference"), plain():
                yield

        reference.swapped_in = swapped_in
    backward = schedules.backward_step

    def count_activations(*args: Any, **options: Any) -> Any:
        usage.assign_unowned("activations")
        return backward(*args, **options)

    schedules.backward_step = count_activations


def _assign_state_owners(rank: Any, usage: UsageRecorder) -> None:
    """Assign owners to the state before a step; in float32 a weight is also the optimizer's master copy."""
    parameters = [parameter for chunk in rank.model.chunks for parameter in chunk.parameters()]
    slots = [slot for shard in rank._optimizer.shards() for slot in shard.slots.values()]
    state: tuple[tuple[Owner, list[Tensor]], ...] = (
        ("optimizer", slots),
        ("gradients", [parameter.main_grad for parameter in parameters if parameter.requires_grad]),
        ("weights", parameters),
    )
    for owner, tensors in state:
        usage.assign_owner(owner, (tensor.untyped_storage() for tensor in tensors))
    usage.assign_unowned("other state")


def _one_peer_swaps(rank: int, ranks: int, own: tuple[Any, Any]) -> list[Any]:
    """Returns what ranks announce when experts move (before, after): another rank has what this one needs, and needs
    what this one has."""
    before, after = own
    swaps: list[Any] = [({}, {})] * ranks
    swaps[rank], swaps[(rank + 1) % ranks] = own, (after, before)
    return swaps


def _announced_before_a_sync(model: PolicyModel, world_size: int, own: Any) -> list[Any]:
    """Returns what all ranks announce where this one announces ``own``: the names of the GPUs, the tensors of the
    pipeline stages, or the handles of a shared bucket, which are all alike here."""
    if isinstance(own, str):
        return [str(rank) for rank in range(world_size)]
    return _specs_of_all_stages(model, own) if isinstance(own, list) else [own] * world_size


def _specs_of_all_stages(model: PolicyModel, own: list[Any]) -> list[Any]:
    """Returns the tensors and dtypes that each pipeline stage announces before a sync: ``own`` for this rank's stage,
    and those by the description of the model for the others."""
    model_spec, ranks, stages = model.model_spec, model.ranks, model.ranks.pipeline_size
    plans: list[list[Any]] = []
    for stage, chunks in enumerate(stage_layers(model_spec.num_layers, stages, len(model.chunks))):
        layers = [layer - 1 for chunk in chunks for layer in chunk]
        parameters = model_parameters(model_spec, layers, first=stage == 0, last=stage == stages - 1)
        plans.append([(each.tensors, model.config.params_dtype) for _, each in parameters if not each.copied])
    return [own if stage == ranks.pipeline_rank else plan for stage, plan in enumerate(plans)]


def _publish(job: RankJob, rank: Any, environment: RankEnvironment) -> None:
    """Run weight syncs as the config makes them: through a process group, and with ``engine.colocate`` also through
    shared memory. Each is run twice: all engines accept it, and an engine refuses its first bucket.

    Raises TrainerError if the first fails, or if the second does not fail at once.
    """
    engine = job.config.engine.model_copy(update={"api_key_env": None, "weight_sync": "full"})
    lora = job.config.train.lora if engine.merges_adapters else None
    model = rank.model
    if lora is None:
        sent = sent_shapes(model.model_spec, model.ranks.pipeline_rank, model.ranks.pipeline_size, len(model.chunks))
    else:
        sent = {name + SUFFIX: shape for name, shape in adapter_update_shapes(model.model_spec, lora.rank).items()}
    _publish_to(_fake_engines(engine, sent), (), WEIGHT_PHASES[1:3], engine, rank, environment)
    if engine.colocate:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(job.rank)  # as Ray sets it; engines use the GPUs in order
        gpus = [[str(engine.gpus * number + gpu) for gpu in range(engine.gpus)] for number in range(engine.count)]
        engines = _fake_engines(engine, sent_shapes(model.model_spec))
        _publish_to(engines, gpus, WEIGHT_PHASES[3:], engine, rank, environment)
    rank.close()


def _fake_engines(config: EngineConfig, sent: Shapes) -> FakeEngines:
    """The engines of ``config``, which receive the tensors ``sent``."""
    return FakeEngines(engine_count(config), config.gpus, sent, config.dtype, colocated=config.colocate)


def _publish_to(
    engines: FakeEngines,
    gpus: Sequence[Sequence[str]],
    phases: Sequence[str],
    config: EngineConfig,
    rank: Any,
    environment: RankEnvironment,
) -> None:
    with engines as fakes:
        environment.collectives.engines = fakes
        for name, refuse_buckets in zip(phases, (False, True), strict=True):
            fakes.refuse_buckets = refuse_buckets
            if rank.model.ranks.pipeline_rank and not gpus:
                fakes.begin()
            with environment.usage.phase(name, owner="copies"):
                report = rank.publish(PublishRequest(fakes.urls, name, config, gpus))
                failures = [*fakes.violations, *(report.failures.values() if report else ())]
                if fakes.violations or (report is not None and bool(failures) != refuse_buckets):
                    raise TrainerError(
                        failures[0]
                        if failures
                        else "an engine refused a bucket and the weight sync reported no failure"
                    )


def _last_stage_output(phase: str, tokens: int) -> Any:
    from agent_rl.train.step import SUMS

    if phase == "update":
        return {name: torch.zeros((), device="cuda") for name in (*SUMS, "critic_loss", "critic_clipped")}
    return torch.zeros(tokens, device="cuda"), None, torch.zeros(tokens, device="cuda")


def _count_as_phase(usage: UsageRecorder, owner: Any, method: str, name: str) -> None:
    """Count ``owner.method`` as phase ``name``, unless it is called within another phase."""
    plain: Callable[..., Any] = getattr(owner, method)

    @wraps(plain)
    def counted(*args: Any, **options: Any) -> Any:
        with usage.phase(name if usage.phase_name == STEP_PHASES[0] else usage.phase_name):
            return plain(*args, **options)

    setattr(owner, method, counted)


def _group_names() -> dict[tuple[int, ...], str]:
    """Returns the names of this rank's groups by their ranks; names of groups with equal ranks are joined."""
    from megatron.core import parallel_state as state

    kinds = {
        "tensor": state.get_tensor_model_parallel_group(),
        "pipeline": state.get_pipeline_model_parallel_group(),
        "context": state.get_context_parallel_group(),
        "expert": state.get_expert_model_parallel_group(),
        "tensor x expert": state.get_expert_tensor_and_model_parallel_group(),
        "data": state.get_data_parallel_group(),
        "data x context": state.get_data_parallel_group(with_context_parallel=True),
        "expert's data": state.get_expert_data_parallel_group(),
        "model": state.get_model_parallel_group(),
        "world": None,
    }
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name, group in kinds.items():
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        if len(ranks) > 1:
            names_of.setdefault(ranks, []).append(name)
    return {ranks: ", ".join(names) for ranks, names in names_of.items()}


def _load_shapes_only(job: RankJob, usage: UsageRecorder) -> None:
    """Load shapes instead of weights, as phase ``load``."""
    from agent_rl.train.megatron import hf_weights as hf
    from agent_rl.train.megatron import kernel_choice

    plain: Any = hf.load_weights

    def load(*arguments: Any) -> None:
        with usage.phase("load"):
            plain(*arguments)

    replaced: Any = hf
    replaced.load_weights, replaced.SliceReader = load, lambda directory: ShapeReader(job)
    chosen: Any = kernel_choice  # a kernel check needs values: use the first installed kernel
    chosen.check_kernel = lambda candidate, *_: None if candidate.installed else "it is not installed"
    chosen.attention_rate = lambda *_: 0.0  # nothing is computed


def _map_pool_without_memory(job: RankJob) -> None:
    """Create and map the pool of all experts in this process, whatever rank would create it. It is never written and so
    takes no memory."""
    from agent_rl.train.expert_balancing import host_pool as pool

    replaced: Any = pool
    shared, own = pool._shared, job.rank
    replaced.free_memory = lambda: sys.maxsize
    replaced._shared = lambda layers, experts, _maker, group: shared(layers, experts, own, group)


class ShapeReader:
    """Replaces :class:`agent_rl.train.megatron.safetensors_slices.SliceReader`: fills parameters from host tensors
    without memory. The shapes of the checkpoint were checked before."""

    def __init__(self, job: RankJob) -> None:
        self._dtype = getattr(torch, job.config.train.dtype)

    def __enter__(self) -> ShapeReader:
        return self

    def __exit__(self, *error: object) -> None: ...

    def check(self, piece: Any) -> None: ...

    def position(self, piece: Any) -> str:
        name: str = piece.name
        return name

    def nbytes(self, piece: Any) -> int:
        size: int = piece.target.nbytes
        return size

    def fill(self, piece: Any, progress: Any) -> None:
        piece.target.copy_(mode.host_shape(piece.target.shape, self._dtype))


def _describe(error: Exception, phase: str) -> str:
    """Returns one line: the phase, the line of this project or of Megatron, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if "/agent_rl/dryrun/" not in f.filename]
    known = [f for f in inside if "/agent_rl/" in f.filename or "/megatron/" in f.filename]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    kind = "" if isinstance(error, AgentRlError) else f"{type(error).__name__}: "
    if not known:
        return f"{phase}: {kind}{reason}"
    last = known[-1]
    location = f"{Path(last.filename).parent.name}/{Path(last.filename).name}:{last.lineno}"
    return f"{phase}: {location}: {(last.line or '').strip()}: {kind}{reason}"
