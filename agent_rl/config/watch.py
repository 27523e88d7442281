"""The sections ``guard`` and ``observe``: what is watched over in a run, and what is kept of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agent_rl.config.base import OFF, Section

OnSpike = Literal["skip", "clip", "allow"]
SinkName = Literal["tensorboard", "wandb", "mlflow"]


class LimitConfig(Section):
    """Limits on one metric of a step. A value that is not finite is always beyond them."""

    above: float | None = Field(None, description="The metric may not be above this; None: no such limit.")
    below: float | None = Field(None, description="The metric may not be below this; None: no such limit.")
    deviations: float | None = Field(
        None,
        gt=0,
        description="How many robust deviations (1.4826 x MAD) the metric may be from the median of the run's own "
        "history; None: not compared with it.",
    )


class GuardConfig(Section):
    """Watches a run for collapse, and its updates for broken gradients; see docs/guard.md."""

    action: Annotated[Literal["off", "warn", "stop"], OFF] = Field(
        "stop", description="A metric beyond a limit: nothing, a warning, or also a checkpoint and the end of the run."
    )
    stop_on: Literal["absolute", "any"] = Field(
        "absolute", description="Limits that may end the run: absolute ones, or also those relative to its history."
    )
    patience: int = Field(3, gt=0, description="Steps in a row beyond a limit that end the run.")
    window: int = Field(50, gt=0, description="Steps of the run's own history that relative limits look back on.")
    min_history: int = Field(8, gt=2, description="Steps of history that a relative limit wants, or it does not hold.")
    k3_kl: LimitConfig = LimitConfig(above=0.1, deviations=10.0)
    f_tau_2: LimitConfig = LimitConfig(above=0.1)
    grad_norm: LimitConfig = LimitConfig(deviations=10.0)
    entropy: LimitConfig = LimitConfig(deviations=10.0)
    reward: LimitConfig = LimitConfig(deviations=10.0)
    audit: LimitConfig = LimitConfig(above=0.2)
    audit_cached: LimitConfig = LimitConfig(above=0.1)
    max_skipped: int = Field(
        3, ge=0, description="Updates within window that may be left out; one more ends the run, whatever the action."
    )
    spike_factor: float | None = Field(
        20.0, gt=1, description="A gradient norm beyond so many times the history's median is a spike; None: none is."
    )
    on_spike: OnSpike = Field(
        "clip", description="An update that is a spike: left out, scaled to the spike's limit, or taken as it is."
    )


class MonitoringConfig(Section):
    """What of a run is kept for whoever looks at it."""

    token_detail: bool = Field(
        True,
        description="Keep what the trainer saw of every token it trained on: how far it is from the engine's "
        "log-probs, with and without replay, entropy, clipping, and the layers whose experts differ.",
    )
    sinks: tuple[SinkName, ...] = Field(
        ("tensorboard",),
        description="Where metrics go besides metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow.",
    )
    project: str = Field(
        "agent-rl", min_length=1, description="The project of Weights & Biases, or the experiment of MLflow."
    )
