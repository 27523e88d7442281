"""Checks that run before anything starts. A mistake of the user is reported at once, in one line."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent_rl.config import EngineConfig, HarnessConfig, RolloutConfig, RunConfig, TrainConfig
from agent_rl.config.loader import MODELS
from agent_rl.controller.cluster_resources import ClusterRequest
from agent_rl.controller.run_models import resolve_models
from agent_rl.endpoint.episode import SANDBOX_HARNESS
from agent_rl.engine.factory import check_engines
from agent_rl.errors import UserError
from agent_rl.models.spec import ModelSpec, check_same_architecture, read_model_spec, refuse_quantized
from agent_rl.monitoring.sinks import check_sinks
from agent_rl.train.batching.partition import over_budget
from agent_rl.train.hf_index import check_checkpoint
from agent_rl.train.parallel_checks import check_layout
from agent_rl.train.ray_session import check_ray
from agent_rl.train.route_trace import check_trace
from agent_rl.utils.concurrency import first_error
from agent_rl.utils.run_files import nearest_existing
from envs.registry import check_environment

NVIDIA = Path("/dev/nvidiactl")
MIN_FREE_BYTES = 1 << 30
TRAINER_PACKAGES = ("torch", "megatron-core", "ray")

Purpose = Literal["model", "sft", "serve", "rollout", "train"]
"""``model``: only the model is read. ``sft``: the trainer starts, and with ``sft.eval_every`` engines. ``serve``:
engines serve the model. ``rollout``: trajectories are kept, with routes where the config replays them. ``train``: the
trainer starts too."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A config that passed :func:`run`, and what was derived from it once.

    ``config.model`` is a local directory and ``model_spec`` its architecture. ``cluster``: what the run needs of Ray.
    """

    config: RunConfig
    model_spec: ModelSpec
    cluster: ClusterRequest


def run(config: RunConfig, purpose: Purpose = "serve") -> Checked:
    """Check ``config`` for ``purpose`` and read the model's ``config.json``, once for the run. Blocks; models that the
    config names by a hub id are downloaded.

    Raises UserError or ConfigError, one line, for what would fail later.
    """
    if (config.sft is not None) != (purpose == "sft") and purpose in ("sft", "train"):
        raise UserError(
            "the config has the section sft: run it with `agent-rl sft`, or add the override sft=null"
            if config.sft
            else "sft.data: missing; it lists the runs and files to train on (docs/how-to/sft.md)"
        )
    if purpose in ("sft", "train"):
        check_trainer()
        _check_gpu(config.train)
    config = resolve_models(config)
    reference = config.train.kl.reference
    model_spec = _check_models(config.model, reference)
    if model_spec.quantized and config.engine.launched and purpose in ("serve", "rollout"):
        refuse_quantized(config.model)
    if purpose not in ("model", "sft") or config.evaluates_sft:
        _check_programs(config.engine, config.rollout)
        for source in config.environments.values():
            check_environment(source.env, source.options)
    if purpose != "model":
        check_disk_space(config.runs_dir)
    if purpose in ("rollout", "train"):
        check_replay(config.train, config.model, model_spec)
    if purpose in ("sft", "train"):
        check_checkpoint(config.model, model_spec)
        check_layout(config, model_spec)
        check_sinks(config.monitoring)
    if purpose == "train":
        if reference is not None:
            check_checkpoint(reference, model_spec, "train.kl.reference")
        check_lengths(config.rollout, config.train, config.model, model_spec)
        check_trace(config.r3.trace, config.train.replay)
    cluster = ClusterRequest.of(config)
    return Checked(config, model_spec, cluster)


async def check_remote_services(engine: EngineConfig, ray_address: str | None) -> None:
    """Check that the engines of ``engine.urls`` and the cluster of ``train.ray_address`` respond, concurrently and with
    deadlines. Raises UserError for the first that does not."""
    checks = [] if engine.launched else [check_engines(engine.external_urls, headers=engine.headers)]
    if ray_address is not None:
        checks.append(check_ray(ray_address))
    try:
        async with asyncio.TaskGroup() as group:
            for check in checks:
                group.create_task(check)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def check_trainer() -> None:
    """Raises UserError where the trainer's packages are not installed."""
    missing = [name for name in TRAINER_PACKAGES if importlib.util.find_spec(name.partition("-")[0]) is None]
    if missing:
        raise UserError(f"not installed: {', '.join(missing)}; `agent-rl install trainer` installs them")


def _check_gpu(train: TrainConfig) -> None:
    """Raises UserError where ranks of this machine need GPUs and it has none."""
    if train.device == "cuda" and train.ray_address is None and not NVIDIA.exists():
        raise UserError("train.device is cuda and this machine has no NVIDIA GPU: set it to cpu, or train.ray_address")


def _check_models(model: Path, reference: Path | None) -> ModelSpec:
    """The architecture of the policy's model. Raises UserError or ConfigError for a model that is missing or not
    supported, and for a KL reference of another architecture."""
    check_model(model)
    model_spec = read_model_spec(model)
    if reference is not None:
        check_model(reference, key="train.kl.reference")
        check_same_architecture(model_spec, model, reference, "train.kl.reference")
    return model_spec


def _check_programs(engine: EngineConfig, rollout: RolloutConfig) -> None:
    """Raises UserError where the engine's interpreter or the directory of the agent program is missing."""
    if engine.launched and engine.placement == "local" and not Path(engine.python).exists():
        raise UserError(f"engine.python: no interpreter {engine.python}; `agent-rl install engine` makes it")
    harness = rollout.harness
    if harness is not None and harness.directory is not None and not harness.directory.is_dir():
        raise UserError(
            f"rollout.harness.directory: {harness.directory}: no such directory; install the agent program there first"
        )
    if harness is not None and (program := _missing_program(harness)) is not None:
        raise UserError(f"rollout.harness.command: {program}: no such program; install it, or correct the command")


def _missing_program(harness: HarnessConfig) -> str | None:
    """The program that the agent's command begins with, if it is known not to exist. In a sandbox only programs of
    ``harness.directory`` are known."""
    try:
        words = shlex.split(harness.command)
    except ValueError as error:
        raise UserError(f"rollout.harness.command: {error}") from None
    first = next((word for word in words if "=" not in word), "")
    if harness.location == "sandbox":
        inside = Path(first)
        if harness.directory is None or not inside.is_relative_to(SANDBOX_HARNESS):
            return None
        return None if (harness.directory / inside.relative_to(SANDBOX_HARNESS)).exists() else first
    if not re.fullmatch(r"[\w./+-]+", first):  # the shell makes it from other text
        return None
    found = subprocess.run(["bash", "-c", 'type -- "$0"', first], capture_output=True, timeout=30, check=False)
    return first if found.returncode else None


def check_replay(train: TrainConfig, model: Path, model_spec: ModelSpec) -> None:
    """Raises UserError where ``train.replay`` is set for a dense model."""
    if train.replay != "off" and model_spec.layout is None:
        raise UserError(
            f"train.replay is {train.replay} and {model} has no MoE layer (model_type {model_spec.kind}), so it has no "
            "routes to replay: set train.replay to off"
        )


def check_lengths(rollout: RolloutConfig, train: TrainConfig, model: Path, model_spec: ModelSpec) -> None:
    """Raises UserError where ``rollout.max_tokens`` exceeds the trainer's micro-batch or the model's context: training
    never truncates a sequence and never exceeds the budget."""
    max_tokens, budget, positions = rollout.max_tokens, train.microbatch_tokens, model_spec.max_positions
    if max_tokens > budget:
        raise UserError(f"rollout.max_tokens is {max_tokens} and {over_budget(budget, max_tokens)}")
    if max_tokens > positions:
        raise UserError(
            f"rollout.max_tokens is {max_tokens} and {model}/config.json has max_position_embeddings={positions}: "
            f"lower rollout.max_tokens to {positions}, or extend the model (rope_scaling: yarn) if it is made for that"
        )
    rescored = train.old_logprob.source == "rescore"
    if (rescored or train.distill is not None) and max_tokens == positions:
        key = "train.old_logprob.source rescore" if rescored else "train.distill"
        raise UserError(
            f"{key}: SGLang evaluates no sequence that fills the context of {positions} "
            f"tokens: lower rollout.max_tokens to {positions - 1}"
        )


def check_model(directory: Path, key: str = "model") -> None:
    """Raises UserError where ``directory``, the value of the config's ``key``, has no ``config.json``."""
    if not (directory / "config.json").is_file():
        hint = (
            f"`agent-rl model init {directory}` makes it" if directory.name in MODELS else "name the directory of one"
        )
        raise UserError(f"{key}: {directory}: no Hugging Face checkpoint there (no config.json); {hint}")


def check_disk_space(runs_dir: Path) -> int:
    """The free bytes of the disk of ``runs_dir``. Raises UserError unless run directories can be made there and 1 GiB
    is free."""
    existing = nearest_existing(runs_dir)
    if not existing.is_dir():
        raise UserError(f"runs_dir: {existing} is a file: name a directory")
    free = shutil.disk_usage(existing).free
    if free < MIN_FREE_BYTES:
        raise UserError(
            f"runs_dir: {runs_dir}: {free / 2**20:.0f} MiB free, a run needs {MIN_FREE_BYTES / 2**20:.0f} MiB; "
            "free some space or set runs_dir to another disk"
        )
    return free
