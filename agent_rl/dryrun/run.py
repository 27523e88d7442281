"""``agent-rl dry-run``: checks the config, runs one process per rank and depth, and collects the results."""

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
from agent_rl.dryrun.fake_device import build_device_guard
from agent_rl.dryrun.job import RankJob, RankRecord
from agent_rl.errors import TrainerError, UserError
from agent_rl.models.spec import ModelSpec
from agent_rl.planner.compute_model import PlannedPublish, PlannedStep, planned_publish, planned_step
from agent_rl.planner.known_models import CONFIGS, planned_model
from agent_rl.planner.memory_model import RankBytes, rank_bytes
from agent_rl.planner.planner import node_problems
from agent_rl.train.hf_index import check_checkpoint
from agent_rl.train.parallel_checks import layout_problems, refuse

_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The dry run of one rank at one or two depths; its experts are chosen ``skew`` times as often as the mean rank's.

    ``depth``: the layers that the figures refer to; with two records, that of the whole model.
    """

    rank: int
    skew: float
    depth: int
    records: tuple[RankRecord, ...]

    @property
    def fault(self) -> str | None:
        return next((record.fault for record in self.records if record.fault is not None), None)

    def extrapolate(self, value: Callable[[RankRecord], float]) -> float:
        """Returns ``value`` at ``depth``: that of the single record, or on the line through two. Only for values that
        are linear in the number of layers, which the peak over phases is not (see :attr:`peak`)."""
        first, last = self.records[0], self.records[-1]
        if first is last:
            return value(first)
        return value(last) + self.per_layer(value) * (self.depth - last.layers)

    @property
    def peak(self) -> float:
        """Bytes of the phase with the highest peak, which may differ from that at the simulated depths."""
        return max(self.phase_peak(phase) for phase in self.records[0].phases)

    def phase_peak(self, phase: str) -> float:
        """Returns the peak bytes of a phase."""
        return self.extrapolate(lambda record: record.phases[phase].peak)

    def per_layer(self, value: Callable[[RankRecord], float]) -> float:
        """Returns the increase of ``value`` per layer; with one depth, the mean per layer."""
        first, last = self.records[0], self.records[-1]
        if first is last:
            return value(first) / first.layers
        return (value(last) - value(first)) / (last.layers - first.layers)


def dry_run(config: RunConfig, *, ranks: Sequence[int], skew: float, layers: str) -> list[DryRunResult]:
    """Dry-run ``ranks`` (empty: the first rank, and that of a pipeline's last stage).

    ``layers``: layers per model chunk, one number, two with a comma, or ``all``. Raises UserError or ConfigError (one
    line) before it starts a process.
    """
    model_spec = check(config, ranks=ranks, skew=skew)
    depths, library = _depths(layers, config, model_spec), build_device_guard()
    parallel = config.train.parallel
    chosen = ranks or sorted({0, parallel.world_size - parallel.world_size // parallel.pipeline})
    with tempfile.TemporaryDirectory(prefix="agent-rl-dry run-") as directory, ThreadPoolExecutor(2) as pool:
        models = {depth: _write_model(config, depth, Path(directory) / str(depth)) for depth in depths}
        complete = _with_ranks_per_node(config)
        jobs = [RankJob(complete, models[depth], rank, skew, library) for rank in chosen for depth in depths]
        records = list(pool.map(_run, jobs))
    depth = model_spec.num_layers if len(depths) == 2 else depths[0]
    return [
        DryRunResult(rank, skew, depth, tuple(records[index * len(depths) : (index + 1) * len(depths)]))
        for index, rank in enumerate(chosen)
    ]


def _with_ranks_per_node(config: RunConfig) -> RunConfig:
    """With expert balancing, set ``ranks_per_node`` from ``hardware.gpus_per_node``: ranks compare host names to find
    their node, and in a dry run all host names are equal."""
    train, balance = config.train, config.train.balance
    if not balance.enabled or balance.ranks_per_node is not None:
        return config
    per_node = math.gcd(train.parallel.expert, config.hardware.gpus_per_node)
    balance = balance.model_copy(update={"ranks_per_node": per_node})
    return config.model_copy(update={"train": train.model_copy(update={"balance": balance})})


def check(config: RunConfig, *, ranks: Sequence[int], skew: float) -> ModelSpec:
    """Returns the model spec. Raises UserError or ConfigError (one line) for a run that could not start."""
    model_spec, parallel = planned_model(config.model), config.train.parallel
    refuse([*layout_problems(config, model_spec), *node_problems(config.hardware, config.train.parallel)])
    if outside := [rank for rank in ranks if not 0 <= rank < parallel.world_size]:
        raise UserError(f"--rank {outside[0]}: train.parallel.world_size is {parallel.world_size}")
    if not 0 < skew <= parallel.expert:
        raise UserError(
            f"--skew {skew:g}: with train.parallel.expert={parallel.expert} it is at most {parallel.expert}"
        )
    if (config.model / "config.json").is_file() and any(config.model.glob("*.safetensors*")):
        check_checkpoint(config.model, model_spec)
    return model_spec


@dataclass(frozen=True, slots=True)
class PlannedFigures:
    """The planner's figures for a dry run: memory of the fullest rank, a rank's step, what its pipeline stage sends in
    a weight sync."""

    rank: RankBytes
    step: PlannedStep
    publish: PlannedPublish

    @property
    def peak(self) -> int:
        """The higher of a step and a weight sync, which never run at the same time."""
        return max(self.rank.total, self.rank.static + self.publish.memory)


def planned_figures(
    config: RunConfig, *, rank: int = 0, skew: float = 1.0, layers: int | None = None
) -> PlannedFigures:
    """Returns the figures of :mod:`agent_rl.planner` for the model's first ``layers`` (None: all). Balanced experts
    have even loads."""
    model_spec, train = planned_model(config.model), config.train
    model_spec = replace(model_spec, moe=model_spec.moe[:layers])
    skew = 1.0 if train.balance.enabled else skew
    stage = rank // (train.parallel.world_size // train.parallel.pipeline)
    return PlannedFigures(
        rank_bytes(model_spec, train, microbatches=train.parallel.pipeline, device="cuda"),
        planned_step(model_spec, config, rank=rank, skew=skew),
        planned_publish(model_spec, train, config.engine, [stage]),
    )


def _depths(layers: str, config: RunConfig, model_spec: ModelSpec) -> list[int]:
    """Returns the depths to simulate, in layers of the whole model."""
    chunks = config.train.parallel.pipeline * config.train.parallel.virtual_pipeline
    if layers == "all":
        return [model_spec.num_layers]
    parts = layers.split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts) or not 1 <= len(set(parts)) <= 2:
        raise UserError(f"--layers {layers}: expected one number, two (2,4), or all")
    depths = sorted({int(part) * chunks for part in parts})
    if depths[-1] > model_spec.num_layers:
        raise UserError(
            f"--layers {layers}: {chunks} model chunks give {depths[-1]} layers; the model has {model_spec.num_layers}"
        )
    return depths


def _write_model(config: RunConfig, depth: int, directory: Path) -> Path:
    """Write the model's config.json with ``depth`` layers into ``directory``."""
    path = config.model / "config.json"
    known: Mapping[str, Any] = json.loads(path.read_text()) if path.is_file() else CONFIGS[config.model.name]
    layers = planned_model(config.model).num_layers
    by_layer = {k for k, v in known.items() if isinstance(v, list) and len(v) == layers} | {"hybrid_override_pattern"}
    raw = {k: v[:depth] if k in by_layer else v for k, v in known.items()}
    raw.pop("moe_layer_end_index", None)  # the last layer
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": depth}))
    return directory


def _run(job: RankJob) -> RankRecord:
    command = [sys.executable, "-m", "agent_rl.dryrun"]
    try:
        done = subprocess.run(command, input=job.dump(), capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise TrainerError(
            f"the dry run of rank {job.rank} took more than {_SECONDS:g} s: simulate fewer layers (--layers 2,4)"
        ) from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise TrainerError(f"the dry run of rank {job.rank} failed: {last[0]}")
    return RankRecord.load(lines[-1])
