"""Runs the trainer's own code for one rank on a GPU that is not there, and records what it did. Imports torch."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agent_rl.dryrun import fake_cuda_api as cuda
from agent_rl.dryrun import fake_cuda_mode as mode
from agent_rl.dryrun.batch import make_samples, share_of
from agent_rl.dryrun.collectives import Collectives
from agent_rl.dryrun.engines import StandInEngines
from agent_rl.dryrun.job import PhaseRecord, RankJob, RankRecord
from agent_rl.dryrun.names import OUT, STEP, Owner
from agent_rl.dryrun.usage import Ledger
from agent_rl.errors import AgentRlError, TrainerError
from agent_rl.planner.hardware import Gpu
from agent_rl.planner.planner import engines
from agent_rl.train.hf_index import change_shapes, expected_shapes
from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerRequest
from agent_rl.weight_sync.adapters import SUFFIX
from agent_rl.weight_sync.order import PublishRequest
from r3.shard import stage_layers

if TYPE_CHECKING:
    from agent_rl.train.megatron.model import PolicyModel


@dataclass(frozen=True, slots=True)
class Stage:
    """What stands in a rehearsed rank's process for CUDA and for the other ranks."""

    ledger: Ledger
    collectives: Collectives

    @classmethod
    def set_up(cls, gpu: Gpu) -> Stage:
        """In this process, for good. Must come before anything of Megatron is imported, which it does."""
        ledger = Ledger(gpu)
        collectives = Collectives(ledger)
        collectives.install()
        cuda.install(ledger)
        mode.install(ledger)
        return cls(ledger, collectives)


def rehearse(job: RankJob, stage: Stage) -> RankRecord:
    """Start, load, one global step, a snapshot, an export and two weight syncs, of which an engine refuses one."""
    begun, ledger, done = time.perf_counter(), stage.ledger, Done()
    try:
        with mode.Rehearsal(ledger):
            _run(job, stage, done)
        fault = None
    except Exception as error:  # whatever a GPU's process would have died of is the result
        fault = _named(error, ledger.failed)
    held = ledger.most()
    phases = {
        name: PhaseRecord(
            held[name].peak, phase.flops, dict(phase.sent), phase.syncs, held[name].owners, phase.seconds,
            dict(phase.calls),
        )
        for name, phase in ledger.phases.items()
    }  # fmt: skip
    groups = {name: list(ranks) for ranks, name in stage.collectives.names.items()}
    return RankRecord(
        rank=job.rank,
        layers=done.layers,
        phases=phases,
        static=done.static,
        left=done.left,
        pinned=ledger.pinned,
        groups=groups,
        seconds=time.perf_counter() - begun,
        fault=fault,
    )


class Done:
    """What a rank tells on its way: bytes of its state, and of a step that outlived it."""

    layers = static = left = 0


def _run(job: RankJob, stage: Stage, done: Done) -> None:
    from agent_rl.train.route_sharding import cut
    from agent_rl.train.worker import TrainerRank

    train, ledger, collectives = job.config.train, stage.ledger, stage.collectives
    _shapes_for_weights(job, ledger)
    _room_for_experts(job)
    order = WorkerRequest(job.config, job.model, job.model if train.kl.coefficient else None, "cuda", threads=1)
    with ledger.phase("start"):
        rank = TrainerRank(order, OptimizerSpec.of(train), job.rank, master_addr="", master_port=0)
    collectives.names = _groups()
    model, ranks = rank.model, rank._ranks
    done.layers = model.facts.num_layers
    samples = make_samples(job.config, model.facts, ranks.expert_rank, job.skew)
    share = share_of(samples, job.config)
    listed = [samples[index] for index in sorted(samples)]
    shards = [cut(listed, ids, model.shard) for ids in share.micro_batches] if model.facts.moe_layer_ids else []
    tokens = [sum(len(samples[index].tokens) for index in ids) for ids in share.micro_batches]
    rows = len(shards[0].experts) if shards else tokens[0] // (ranks.context_size * ranks.tensor_size)
    collectives.stage_shape = (rows, 1, model.facts.hidden)
    collectives.objects = lambda: [_stand_in(ledger.name, size) for size in tokens]
    _name_phases(rank, ledger)
    with ledger.phase("snapshot"):  # before the step, so that the optimizer's moments are there
        rank._state.snapshot()
    _own_state(rank, ledger)
    done.static = ledger.held
    with ledger.phase(STEP[0]):
        rank.grpo(samples, [share], StepRequest(job.config, measure_without_replay=False), shards)
    gc.collect()
    done.left = ledger.held - done.static
    if ranks.pipeline_size > 1:
        collectives.gathered = partial(_of_all_stages, model)
    with ledger.phase(OUT[0], owner="copies"):
        deque(model.export_weights(), maxlen=0)
    _publish(job, rank, stage)


def _name_phases(rank: Any, ledger: Ledger) -> None:
    """Count the parts of a step apart. What is there when a backward pass begins was kept for it."""
    from megatron.core.pipeline_parallel import schedules

    model = rank.model
    _phase(ledger, model, "train_microbatches", "update")
    _phase(ledger, model, "forward_logprobs", "old log-probs")
    _phase(ledger, rank._optimizer, "step", "step")
    if rank._reference is not None:
        reference = rank._reference
        plain = reference.in_place

        @contextmanager
        def in_place() -> Iterator[None]:
            with ledger.phase("reference"), plain():
                yield

        reference.in_place = in_place
    backward = schedules.backward_step

    def kept(*args: Any, **options: Any) -> Any:
        ledger.keep("activations")
        return backward(*args, **options)

    schedules.backward_step = kept


def _own_state(rank: Any, ledger: Ledger) -> None:
    """Say who holds what is there before a step; in float32 a weight is its optimizer's master too."""
    parameters = [parameter for chunk in rank.model.chunks for parameter in chunk.parameters()]
    slots = [slot for shard in rank._optimizer.shards() for slot in shard.slots.values()]
    held: tuple[tuple[Owner, list[Tensor]], ...] = (
        ("optimizer", slots),
        ("gradients", [parameter.main_grad for parameter in parameters if parameter.requires_grad]),
        ("weights", parameters),
    )
    for owner, tensors in held:
        ledger.own(owner, (tensor.untyped_storage() for tensor in tensors))
    ledger.keep("other state")


def _of_all_stages(model: PolicyModel, own: list[Any]) -> list[Any]:
    """What every pipeline stage tells the others of the weights that it will send (names, shape, dtype): this rank's
    ``own``, and of another stage each tensor of the checkpoint apart."""
    facts, ranks = model.facts, model.ranks
    held = stage_layers(facts.num_layers, ranks.pipeline_size, len(model.chunks))
    stage_of = {layer - 1: stage for stage, chunks in enumerate(held) for chunk in chunks for layer in chunk}
    plans: list[list[Any]] = [[] for _ in held]
    for name, shape in expected_shapes(facts).items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        ends = 0 if name == "model.embed_tokens.weight" else len(held) - 1
        plans[ends if layer is None else stage_of[layer]].append(((name,), shape, model.config.params_dtype))
    return [own if stage == ranks.pipeline_rank else plan for stage, plan in enumerate(plans)]


def _publish(job: RankJob, rank: Any, stage: Stage) -> None:
    """A weight sync that all engines take, then one of which an engine refuses the first bucket. Raises TrainerError
    where the first fails, or the second is not refused at once."""
    ledger, facts = stage.ledger, rank.model.facts
    engine = job.config.engine.model_copy(update={"api_key_env": None})
    expected = expected_shapes(facts)
    if facts.tied:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    if (lora := job.config.train.lora) is not None and engine.merges_adapters:
        expected = {name + SUFFIX: shape for name, shape in change_shapes(facts, lora.rank).items()}
    ours = engines(job.config), engine.gpus, expected, engine.dtype
    with StandInEngines(*ours, colocated=engine.colocate) as stand_in:
        stage.collectives.engines = stand_in
        for name, refusing in zip(OUT[1:], (False, True), strict=True):
            stand_in.refusing = refusing
            with ledger.phase(name, owner="copies"):
                report = rank.publish(PublishRequest(stand_in.urls, name, engine))
                failures = [*stand_in.complaints, *(report.failures.values() if report else ())]
                if stand_in.complaints or (report is not None and bool(failures) != refusing):
                    raise TrainerError(failures[0] if failures else "an engine refused, and nobody noticed")
    rank.close()


def _stand_in(phase: str, tokens: int) -> Any:
    from agent_rl.train.step import SUMS

    if phase == "update":
        return dict.fromkeys(SUMS, 0.0)
    return torch.zeros(tokens, device="cuda"), None


def _phase(ledger: Ledger, owner: Any, method: str, name: str) -> None:
    """Count what ``owner.method`` does for phase ``name``, or for the phase within which it is called."""
    plain: Callable[..., Any] = getattr(owner, method)

    @wraps(plain)
    def counted(*args: Any, **options: Any) -> Any:
        with ledger.phase(name if ledger.name == STEP[0] else ledger.name):
            return plain(*args, **options)

    setattr(owner, method, counted)


def _groups() -> dict[tuple[int, ...], str]:
    """The names of this rank's groups by their ranks; one of several kinds has all their names."""
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
    found: dict[tuple[int, ...], list[str]] = {}
    for name, group in kinds.items():
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        if len(ranks) > 1:
            found.setdefault(ranks, []).append(name)
    return {ranks: ", ".join(names) for ranks, names in found.items()}


def _shapes_for_weights(job: RankJob, ledger: Ledger) -> None:
    """Read shapes in place of weights, in a phase of their own."""
    from agent_rl.train.megatron import hf_weights as hf
    from agent_rl.train.megatron import kernel_choice

    plain: Any = hf.load_weights

    def load(*arguments: Any) -> None:
        with ledger.phase("load"):
            plain(*arguments)

    replaced: Any = hf
    replaced.load_weights, replaced.SliceReader = load, lambda directory: ShapeReader(job)
    chosen: Any = kernel_choice  # kernels have no values to be proved by: the first that is there is taken
    chosen.examine = lambda candidate, *_: None if candidate.there else "it is not installed"


def _room_for_experts(job: RankJob) -> None:
    """A pool of all experts is made and mapped here, whatever rank would make it, and never written to: it takes no
    memory, however much the machine has."""
    from agent_rl.train.expert_balancing import host_pool as pool

    replaced: Any = pool
    shared, own = pool._shared, job.rank
    replaced.free_memory = lambda: sys.maxsize
    replaced._shared = lambda layers, experts, _maker, group: shared(layers, experts, own, group)


class ShapeReader:
    """In place of :class:`agent_rl.train.megatron.safetensors_slices.SliceReader`: fills parameters from host
    tensors that have no memory. The checkpoint's shapes were checked before."""

    def __init__(self, job: RankJob) -> None:
        self._dtype = getattr(torch, job.config.train.dtype)

    def __enter__(self) -> ShapeReader:
        return self

    def __exit__(self, *error: object) -> None: ...

    def check(self, piece: Any) -> None: ...

    def place(self, piece: Any) -> str:
        name: str = piece.name
        return name

    def nbytes(self, piece: Any) -> int:
        size: int = piece.target.nbytes
        return size

    def fill(self, piece: Any, progress: Any) -> None:
        piece.target.copy_(mode.host_shape(piece.target.shape, self._dtype))


def _named(error: Exception, phase: str) -> str:
    """What failed, in which phase, and in which line of this project or of Megatron, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if "/agent_rl/dryrun/" not in f.filename]
    places = [f for f in inside if "/agent_rl/" in f.filename or "/megatron/" in f.filename]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    kind = "" if isinstance(error, AgentRlError) else f"{type(error).__name__}: "
    if not places:
        return f"{phase}: {kind}{reason}"
    last = places[-1]
    where = f"{Path(last.filename).parent.name}/{Path(last.filename).name}:{last.lineno}"
    return f"{phase}: {where}: {(last.line or '').strip()}: {kind}{reason}"
