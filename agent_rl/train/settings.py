"""What the driver tells the trainer ranks. Small frozen values without torch; they travel through Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent_rl.config import ParallelConfig, RunConfig, TrainConfig

Replay = Literal["r3", "r2", "off"]


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW, its schedule and the gradient clip.

    ``warmup_steps`` updates of linear warm-up, then ``lr`` (constant) or a cosine down to ``lr * min_lr_ratio`` at
    update ``total_steps``.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 0
    total_steps: int = 1
    schedule: Literal["constant", "cosine"] = "constant"
    min_lr_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model every rank builds, in which layout, precision and place. ``threads``: CPU threads a rank uses."""

    folder: Path
    parallel: ParallelConfig
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    recompute: Literal["none", "selective", "full"]
    recompute_modules: tuple[str, ...]
    seed: int
    threads: int


@dataclass(frozen=True, slots=True)
class StepSettings:
    """One GRPO global step. ``temperature`` is the one the rollout sampled at: log-probs are compared there."""

    replay: Replay
    eps_low: float
    eps_high: float
    temperature: float
    measure_native: bool


def optimizer_settings(train: TrainConfig) -> OptimizerSettings:
    """The GRPO optimizer of a config: constant rate after the warm-up."""
    return OptimizerSettings(
        lr=train.lr,
        betas=train.betas,
        weight_decay=train.weight_decay,
        grad_clip=train.grad_clip,
        warmup_steps=train.lr_warmup_steps,
        total_steps=max(1, train.steps * train.mini_steps),
    )


def step_settings(config: RunConfig, *, measure_native: bool) -> StepSettings:
    """The settings of one global step. A greedy rollout's log-probs are the raw ones, so 0 counts as 1."""
    return StepSettings(
        replay=config.train.replay,
        eps_low=config.train.eps_low,
        eps_high=config.train.eps_high,
        temperature=config.rollout.temperature or 1.0,
        measure_native=measure_native,
    )
