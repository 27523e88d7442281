"""Checks made before anything is started: a user's mistake is answered at once, in one line."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path

from agent_rl.config import RunConfig
from agent_rl.config.builtin import MODELS
from agent_rl.engine.factory import check_engines
from agent_rl.errors import UserError
from agent_rl.models.spec import ModelSpec, check_alike, read_model_spec
from agent_rl.train.batching.partition import over_budget
from agent_rl.train.hf_index import check_checkpoint
from agent_rl.train.ray_session import check_ray
from agent_rl.utils.concurrency import first_leaf

FREE_BYTES_WANTED = 1 << 30
TRAINER_PACKAGES = ("torch", "megatron-core", "ray")


def check(config: RunConfig) -> ModelSpec:
    """The facts of the config's model. Raises UserError for what would fail later: no model, no engine environment, no
    agent program, no room on the disk."""
    check_model(config.model)
    facts = read_model_spec(config.model)
    if config.train.kl.reference is not None:
        check_model(config.train.kl.reference, key="train.kl.reference")
        check_alike(facts, config.model, config.train.kl.reference, "train.kl.reference")
    if config.engine.launched and config.engine.placement == "local" and not Path(config.engine.python).exists():
        raise UserError(f"engine.python: no interpreter {config.engine.python}; `agent-rl install engine` makes it")
    harness = config.rollout.harness
    if harness is not None and harness.directory is not None and not harness.directory.is_dir():
        raise UserError(
            f"rollout.harness.directory: {harness.directory}: no such directory; install the agent program there first"
        )
    check_room(config.runs_dir)
    return facts


async def ask_elsewhere(config: RunConfig) -> None:
    """Ask the engines and the Ray cluster that run elsewhere whether they answer, side by side and with deadlines,
    before anything heavy is started. Raises UserError for the first that does not."""
    engine = config.engine
    questions = [] if engine.launched else [check_engines(engine.named, headers=engine.headers)]
    if config.train.ray_address is not None:
        questions.append(check_ray(config.train.ray_address))
    try:
        async with asyncio.TaskGroup() as asking:
            for question in questions:
                asking.create_task(question)
    except BaseExceptionGroup as errors:
        raise first_leaf(errors) from None


def check_trainer() -> None:
    """Raises UserError where the trainer's packages are not installed."""
    missing = [name for name in TRAINER_PACKAGES if importlib.util.find_spec(name.partition("-")[0]) is None]
    if missing:
        raise UserError(f"not installed: {', '.join(missing)}; `agent-rl install trainer` installs them")


def check_weights(config: RunConfig, facts: ModelSpec) -> None:
    """Raises ConfigError for a checkpoint that lacks a shard or a tensor, or has one of another shape than its config
    says; of the policy, and of the KL penalty's reference. Reads the files' heads alone."""
    check_checkpoint(config.model, facts)
    if config.train.kl.reference is not None:
        check_checkpoint(config.train.kl.reference, facts, "train.kl.reference")


def check_replay(config: RunConfig, facts: ModelSpec) -> None:
    """Raises UserError where replay is asked of a dense model."""
    if config.train.replay != "off" and facts.layout is None:
        raise UserError(
            f"train.replay is {config.train.replay} and {config.model} has no MoE layer (model_type {facts.kind}), so "
            "it has no routes to replay: set train.replay to off"
        )


def check_lengths(config: RunConfig, facts: ModelSpec) -> None:
    """Raises UserError where a trajectory may grow beyond what the trainer's micro-batch or the model's context holds.

    A longer sequence is never cut and its budget never raised: this is where it is told, before anything starts.
    """
    longest, budget = config.rollout.max_tokens, config.train.microbatch_tokens
    if longest > budget:
        raise UserError(f"rollout.max_tokens is {longest} and {over_budget(budget, longest)}")
    positions = facts.max_positions
    if longest > positions:
        raise UserError(
            f"rollout.max_tokens is {longest} and {config.model}/config.json has max_position_embeddings={positions}: "
            f"lower rollout.max_tokens to {positions}, or extend the model (rope_scaling: yarn) if it is made for that"
        )
    if config.train.old_logprob.source == "rescore" and longest == positions:
        raise UserError(
            f"train.old_logprob.source rescore: SGLang evaluates no sequence that fills the context of {positions} "
            f"tokens: lower rollout.max_tokens to {positions - 1}"
        )


def check_model(directory: Path, key: str = "model") -> None:
    if not (directory / "config.json").is_file():
        tiny = (
            f"`agent-rl model init {directory}` makes it" if directory.name in MODELS else "name the directory of one"
        )
        raise UserError(f"{key}: {directory}: no Hugging Face checkpoint there (no config.json); {tiny}")


def check_room(directory: Path) -> None:
    """A run needs a directory, and room in it for checkpoints and trajectories."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"runs_dir: {existing} is a file: name a directory, or one that is to be made")
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES_WANTED:
        raise UserError(
            f"runs_dir: {directory}: {free / 2**20:.0f} MiB free, "
            f"a run wants {FREE_BYTES_WANTED / 2**20:.0f} MiB; "
            "free some room or set runs_dir to another disk"
        )
