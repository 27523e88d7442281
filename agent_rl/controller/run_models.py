"""Runs in place of models: ``RUN`` or ``RUN@STEP`` names the weights of a run's checkpoint, ``RUN@STEP+ema`` their
average.

The checkpoint is exported once into ``RUN/exports/step-NNNNNN`` (or ``step-NNNNNN-ema``), which is used from then on.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_recorded
from agent_rl.errors import UserError
from agent_rl.models.hub import fetch_model, fetch_models
from agent_rl.train.checkpoint.directory import checkpoint_step, complete_checkpoints


def resolve_models(config: RunConfig) -> RunConfig:
    """``config`` with the local directories of its models, which ``RUN`` or ``RUN@STEP`` may name, and as
    :func:`agent_rl.models.hub.fetch_models`. Blocks.

    Raises UserError, ConfigError or TrainerError, one line.
    """
    updated = config.model_copy(update={"model": resolve_run(config.model, "model")})
    kl = config.train.kl
    if kl.reference is not None:
        kl = kl.model_copy(update={"reference": resolve_run(kl.reference, "train.kl.reference")})
        updated = updated.model_copy(update={"train": config.train.model_copy(update={"kl": kl})})
    return fetch_models(updated)


def resolve_run(name: Path, key: str) -> Path:
    """The exported model of ``name``, the value of the config's ``key``, where it is ``RUN``, ``RUN@STEP`` or
    ``RUN@STEP+ema``; any other name unchanged. Raises as :func:`resolve_models`."""
    run, _, version = str(name).partition("@")
    if (name / "config.json").is_file() or not is_run(Path(run)):
        return name
    step, averaged = version.removesuffix("+ema"), version.endswith("+ema")
    source = find_checkpoint(Path(run), step, key)
    out = Path(run) / "exports" / f"{source.name}{'-ema' if averaged else ''}"
    if not (out / "config.json").is_file():
        export(source, Path(run), out, averaged=averaged)
    return out


def is_run(directory: Path) -> bool:
    """Whether ``directory`` is that of a training run."""
    return (directory / "config.yaml").is_file() and (directory / "state.json").is_file()


def find_checkpoint(run: Path, step: str, key: str) -> Path:
    """The checkpoint of ``step`` of a run; "": the newest. Raises UserError that lists the steps there are."""
    complete = {checkpoint_step(path): path for path in complete_checkpoints(run / "checkpoints")}
    wanted = max(complete, default=None) if not step else int(step) if step.isdigit() else None
    if wanted is None or wanted not in complete:
        steps = ", ".join(map(str, sorted(complete))) or "none"
        raise UserError(f"{key}: {run}: no checkpoint of step {step or 'any'}; complete checkpoints: {steps}")
    return complete[wanted]


def export(source: Path, run: Path, out: Path, *, averaged: bool = False) -> None:
    """Write the weights of the checkpoint ``source`` of ``run``, or their average, as a Hugging Face checkpoint to the
    new directory ``out``. Raises UserError where torch is missing or the run has no average, otherwise as
    :func:`resolve_models`."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("exporting needs torch; run `agent-rl install trainer`")
    from agent_rl.train.checkpoint.hf_export import export_checkpoint

    config = load_recorded(run / "config.yaml")
    if averaged and config.train.ema is None:
        raise UserError(f"{run} has no average of its weights: train with train.ema, or leave +ema and --ema out")
    config = config.model_copy(update={"model": fetch_model(resolve_run(config.model, "model"), "model")})
    out.parent.mkdir(parents=True, exist_ok=True)
    export_checkpoint(source, config, out, "ema" if averaged else "master")
