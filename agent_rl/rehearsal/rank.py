"""Runs the trainer's own code for one rank on a GPU that is not there, and records what it did. Imports torch."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from agent_rl.errors import AgentRlError
from agent_rl.rehearsal import cuda, mode
from agent_rl.rehearsal.batch import make_samples, share_of
from agent_rl.rehearsal.collectives import Collectives
from agent_rl.rehearsal.job import PhaseRecord, RankJob, RankRecord
from agent_rl.rehearsal.ledger import Ledger
from agent_rl.train.orders import OptimizerSpec, RankOrder, StepOrder


def rehearse(job: RankJob) -> RankRecord:
    """Start, load, one global step, a snapshot and an export of the weights."""
    begun, ledger = time.perf_counter(), Ledger()
    collectives = Collectives(ledger)
    collectives.install()
    cuda.install(ledger)
    mode.install(ledger)
    done = Done()
    try:
        with mode.Rehearsal(ledger):
            _run(job, ledger, collectives, done)
        fault = None
    except Exception as error:  # whatever a GPU's process would have died of is the result
        fault = _named(error, ledger.failed)
    phases = {
        name: PhaseRecord(phase.peak, phase.flops, dict(phase.sent), phase.syncs)
        for name, phase in ledger.phases.items()
    }
    groups = {name: list(ranks) for ranks, name in collectives.names.items()}
    seconds = time.perf_counter() - begun
    layers = done.layers
    return RankRecord(job.rank, layers, phases, done.static, done.left, ledger.pinned, groups, seconds, fault)


class Done:
    """What a rank tells on its way: bytes of its state, and of a step that outlived it."""

    layers = static = left = 0


def _run(job: RankJob, ledger: Ledger, collectives: Collectives, done: Done) -> None:
    from agent_rl.train.megatron import hf, kernel_choice
    from agent_rl.train.rank import TrainerRank
    from agent_rl.train.route_shares import cut

    train = job.config.train
    _shapes_for_weights(hf, kernel_choice, job, ledger)
    order = RankOrder(job.config, job.model, None, "cuda", threads=1)
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
    _phase(ledger, model, "forward_logprobs", "old log-probs")
    _phase(ledger, model, "train_microbatches", "update")
    _phase(ledger, rank._optimizer, "step", "step")
    with ledger.phase("snapshot"):  # before the step, so that the optimizer's moments are there
        rank._state.snapshot()
    done.static = ledger.held
    rank.grpo(samples, [share], StepOrder(job.config, measure_native=False), shards)
    gc.collect()
    done.left = ledger.held - done.static
    with ledger.phase("export"):
        for _ in model.export_weights():
            pass


def _stand_in(phase: str, tokens: int) -> Any:
    from agent_rl.train.step import SUMS

    if phase == "update":
        return dict.fromkeys(SUMS, 0.0)
    return torch.zeros(tokens, device="cuda"), None


def _phase(ledger: Ledger, owner: Any, method: str, name: str) -> None:
    """Count what ``owner.method`` does for phase ``name``."""
    plain: Callable[..., Any] = getattr(owner, method)

    @wraps(plain)
    def counted(*args: Any, **options: Any) -> Any:
        with ledger.phase(name):
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


def _shapes_for_weights(hf: Any, kernel_choice: Any, job: RankJob, ledger: Ledger) -> None:
    """Read shapes in place of weights, in a phase of their own."""
    plain = hf.load_weights

    def load(*arguments: Any) -> None:
        with ledger.phase("load"):
            plain(*arguments)

    hf.load_weights, hf.SliceReader = load, lambda folder: ShapeReader(job)
    # Kernels have no values to be proved by: the first that is there is taken.
    kernel_choice.examine = lambda candidate, *_: None if candidate.there else "it is not installed"


class ShapeReader:
    """In place of :class:`agent_rl.train.megatron.slices.SliceReader`: fills parameters from host tensors that have no
    memory. The checkpoint's shapes were checked before."""

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
    inside = [f for f in frames if "/agent_rl/rehearsal/" not in f.filename]
    places = [f for f in inside if "/agent_rl/" in f.filename or "/megatron/" in f.filename]
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    kind = "" if isinstance(error, AgentRlError) else f"{type(error).__name__}: "
    if not places:
        return f"{phase}: {kind}{reason}"
    last = places[-1]
    where = f"{Path(last.filename).parent.name}/{Path(last.filename).name}:{last.lineno}"
    return f"{phase}: {where}: {(last.line or '').strip()}: {kind}{reason}"
