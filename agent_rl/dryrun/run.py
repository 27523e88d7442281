"""``agent-rl dry-run``: what is checked before anything starts, a process for each rank and depth, the results."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_rl.config import RunConfig
from agent_rl.dryrun.fake_device import build_guard
from agent_rl.dryrun.job import RankJob, RankRecord
from agent_rl.errors import TrainerError, UserError
from agent_rl.models.spec import ModelSpec
from agent_rl.planner.compute_model import PlannedPublish, PlannedStep, planned_publish, planned_step
from agent_rl.planner.known_models import CONFIGS, planned_model
from agent_rl.planner.memory_model import RankBytes, rank_bytes
from agent_rl.planner.planner import hosts_problems
from agent_rl.train.hf_index import check_checkpoint
from agent_rl.train.parallel_checks import layout_problems, refuse

_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """One rank, whose experts are chosen ``skew`` times as often as the mean rank's, at one depth or two; ``depth``, in
    layers, is what the figures are of: the whole model's where there are two."""

    rank: int
    skew: float
    depth: int
    records: tuple[RankRecord, ...]

    @property
    def fault(self) -> str | None:
        return next((record.fault for record in self.records if record.fault is not None), None)

    def whole(self, of: Callable[[RankRecord], float]) -> float:
        """``of`` a record, at ``depth``: the one record's, or the line through those of two. For what grows evenly with
        the layers, as the peak of several phases does not (:attr:`peak`)."""
        first, last = self.records[0], self.records[-1]
        if first is last:
            return of(first)
        slope = (of(last) - of(first)) / (last.layers - first.layers)
        return of(last) + slope * (self.depth - last.layers)

    @property
    def peak(self) -> float:
        """Bytes of the fullest phase, which may be another one than at the depths that were rehearsed."""
        return max(self.peak_of(phase) for phase in self.records[0].phases)

    def peak_of(self, phase: str) -> float:
        """The most bytes that a phase holds at once."""
        return self.whole(lambda record: record.phases[phase].peak)

    def a_layer(self, of: Callable[[RankRecord], float]) -> float:
        """How much of ``of`` each layer of this rank's stage brings; of one depth, its mean."""
        first, last = self.records[0], self.records[-1]
        if first is last:
            return of(first) / first.layers
        return (of(last) - of(first)) / (last.layers - first.layers)


def rehearse(config: RunConfig, *, ranks: Sequence[int], skew: float, layers: str) -> list[Rehearsed]:
    """Rehearse ``ranks`` (none: the first, and the last of a pipeline). ``layers``: so many a model chunk, one number
    or two with a comma, or ``all``. Raises UserError or ConfigError, one line, before anything heavy is started."""
    facts = check(config, ranks=ranks, skew=skew)
    depths, library = _depths(layers, config, facts), build_guard()
    parallel = config.train.parallel
    chosen = ranks or sorted({0, parallel.world_size - 1 if parallel.pipeline > 1 else 0})
    with tempfile.TemporaryDirectory(prefix="agent-rl-dry run-") as directory, ThreadPoolExecutor(2) as pool:
        models = {depth: _write_model(config, depth, Path(directory) / str(depth)) for depth in depths}
        placed = _on_machines(config)
        jobs = [RankJob(placed, models[depth], rank, skew, library) for rank in chosen for depth in depths]
        records = list(pool.map(_run, jobs))
    depth = facts.num_layers if len(depths) == 2 else depths[0]
    return [
        Rehearsed(rank, skew, depth, tuple(records[at * len(depths) : (at + 1) * len(depths)]))
        for at, rank in enumerate(chosen)
    ]


def _on_machines(config: RunConfig) -> RunConfig:
    """The config with the expert ranks that a host of ``hardware.gpus_per_node`` has, where experts are balanced: a
    rank would ask the others on which machine they are, and here all are on this one."""
    train, balance = config.train, config.train.balance
    if not balance.enabled or balance.ranks_per_node is not None:
        return config
    here = math.gcd(train.parallel.expert, config.hardware.gpus_per_node)
    spread = balance.model_copy(update={"ranks_per_node": here})
    return config.model_copy(update={"train": train.model_copy(update={"balance": spread})})


def check(config: RunConfig, *, ranks: Sequence[int], skew: float) -> ModelSpec:
    """The model's facts. Raises UserError or ConfigError, one line, for what can't be rehearsed or would not start."""
    facts, parallel = planned_model(config.model), config.train.parallel
    refuse([*layout_problems(config, facts), *hosts_problems(config)])
    if outside := [rank for rank in ranks if not 0 <= rank < parallel.world_size]:
        raise UserError(f"--rank {outside[0]}: train.parallel.world_size is {parallel.world_size}")
    if not 0 < skew <= parallel.expert:
        raise UserError(
            f"--skew {skew:g}: with train.parallel.expert={parallel.expert} it is at most {parallel.expert}"
        )
    if (config.model / "config.json").is_file() and any(config.model.glob("*.safetensors*")):
        check_checkpoint(config.model, facts)
    return facts


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan's figures for what is rehearsed: memory of the fullest rank, a rank's step, a weight sync."""

    rank: RankBytes
    step: PlannedStep
    publish: PlannedPublish

    @property
    def peak(self) -> int:
        """Of a step or of a weight sync, which are never under way together."""
        return max(self.rank.total, self.rank.static + self.publish.memory)


def planned(config: RunConfig, *, rank: int = 0, skew: float = 1.0, layers: int | None = None) -> Planned:
    """By the formulas of :mod:`agent_rl.planner`, for the model's first ``layers`` (None: all); balanced experts have
    even loads."""
    facts, train = planned_model(config.model), config.train
    facts = replace(facts, moe=facts.moe[:layers])
    skew = 1.0 if train.balance.enabled else skew
    return Planned(
        rank_bytes(facts, train, microbatches=train.parallel.pipeline, device="cuda"),
        planned_step(facts, config, rank=rank, skew=skew),
        planned_publish(facts, train, config.engine),
    )


def _depths(layers: str, config: RunConfig, facts: ModelSpec) -> list[int]:
    """Depths in layers of the whole model."""
    chunks = config.train.parallel.pipeline * config.train.parallel.virtual_pipeline
    if layers == "all":
        return [facts.num_layers]
    parts = layers.split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts) or not 1 <= len(set(parts)) <= 2:
        raise UserError(f"--layers {layers}: write one number or two (2,4), or all")
    depths = sorted({int(part) * chunks for part in parts})
    if depths[-1] > facts.num_layers:
        raise UserError(
            f"--layers {layers}: {depths[-1]} layers in {chunks} model chunks, and the model has {facts.num_layers}"
        )
    return depths


def _write_model(config: RunConfig, depth: int, directory: Path) -> Path:
    """A directory with the model's config.json, so many layers deep."""
    path = config.model / "config.json"
    known: Mapping[str, Any] = json.loads(path.read_text()) if path.is_file() else CONFIGS[config.model.name]
    raw = {key: value for key, value in known.items() if key != "layer_types"}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": depth}))
    return directory


def _run(job: RankJob) -> RankRecord:
    command = [sys.executable, "-m", "agent_rl.dryrun"]
    try:
        done = subprocess.run(command, input=job.dump(), capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise TrainerError(
            f"the dry run of rank {job.rank} took more than {_SECONDS:g} s: rehearse fewer layers (--layers 2,4)"
        ) from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise TrainerError(f"the dry run of rank {job.rank} broke off: {last[0]}")
    return RankRecord.load(lines[-1])
