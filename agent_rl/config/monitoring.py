"""The sections ``guard`` and ``monitoring``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agent_rl.config.base import OFF, Section

OnSpike = Literal["skip", "clip", "allow"]
SinkName = Literal["tensorboard", "wandb", "mlflow"]


class LimitConfig(Section):
    """Limits on one metric. A value that is not finite always violates them."""

    above: float | None = Field(None, description="Largest allowed value. null disables the limit.")
    below: float | None = Field(None, description="Smallest allowed value. null disables the limit.")
    deviations: float | None = Field(
        None,
        gt=0,
        description="Largest allowed distance from the median of the run's recent steps, in robust standard deviations "
        "(1.4826 x MAD). null disables the limit.",
    )


class OnCollapseConfig(Section):
    """Forks of a run that the guard stopped."""

    forks: int = Field(
        0,
        ge=0,
        description="How often a run that the guard stops goes on by itself, in a fork of its last checkpoint from "
        "before the first warning. 0: it ends.",
    )
    lr_factor: float = Field(0.3, gt=0, le=1, description="A fork's `train.lr` is multiplied by this.")


class GuardConfig(Section):
    """Detection of collapsing runs and broken gradients; see docs/how-to/debug-a-run.md."""

    action: Annotated[Literal["off", "warn", "stop"], OFF] = Field(
        "stop",
        description="Action if a metric violates a limit. off: none. warn: print a warning. stop: also save a "
        "checkpoint and end the run.",
    )
    stop_on: Literal["absolute", "any"] = Field(
        "absolute", description="Limits that may end the run. absolute: above and below. any: also deviations."
    )
    patience: int = Field(3, gt=0, description="Consecutive steps in violation of a limit that end the run.")
    window: int = Field(50, gt=0, description="Steps of history used for deviations, max_skipped and spike_factor.")
    min_history: int = Field(8, gt=2, description="Steps of history required before deviations and spike_factor apply.")
    k3_kl: LimitConfig = Field(LimitConfig(above=0.1, deviations=10.0), description="Limits on `mismatch/k3_kl`.")
    f_tau_2: LimitConfig = Field(LimitConfig(above=0.1), description="Limits on `mismatch/f_tau_2`.")
    grad_norm: LimitConfig = Field(LimitConfig(deviations=10.0), description="Limits on `train/grad_norm`.")
    entropy: LimitConfig = Field(LimitConfig(deviations=10.0), description="Limits on `train/entropy`.")
    reward: LimitConfig = Field(LimitConfig(deviations=10.0), description="Limits on `reward/mean`.")
    audit: LimitConfig = Field(LimitConfig(above=0.2), description="Limits on `r3/audit_mismatch`.")
    audit_cached: LimitConfig = Field(LimitConfig(above=0.1), description="Limits on `r3/audit_cached_mismatch`.")
    on_collapse: OnCollapseConfig = Field(OnCollapseConfig(), description="Continuation of a run that was stopped.")
    max_skipped: int = Field(
        3, ge=0, description="Skipped updates allowed within window. One more ends the run, always."
    )
    spike_factor: float | None = Field(
        20.0,
        gt=1,
        description="Gradient norm above which an update is a spike, as a multiple of the median gradient norm. null "
        "disables spike detection.",
    )
    on_spike: OnSpike = Field(
        "clip",
        description="Handling of a spike. skip: skip the update. clip: scale the gradient down to the spike limit. "
        "allow: apply it unchanged.",
    )


class MonitoringConfig(Section):
    """Recorded details and metric services."""

    token_detail: bool = Field(
        True,
        description="Record for every trained token: its log-prob gap with and without replay, entropy, clipping, and "
        "the layers whose experts differ.",
    )
    sinks: tuple[SinkName, ...] = Field(
        ("tensorboard",),
        description="Services that receive the metrics in addition to metrics.jsonl: tensorboard, wandb, mlflow.",
    )
    project: str = Field("agent-rl", min_length=1, description="Project name for wandb, experiment name for mlflow.")
    run_name: str | None = Field(None, min_length=1, description="Name of the run in wandb and mlflow. null: name.")
    group: str | None = Field(None, min_length=1, description="Group of runs in wandb; the tag group in mlflow.")
    tags: tuple[str, ...] = Field((), description="Tags of the run in wandb and mlflow.")
