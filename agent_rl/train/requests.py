"""What the driver orders of a trainer rank: the run's config, and the facts that no config says. Small frozen values
without torch; they travel through Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.config.base import Precision
from r3.trace.recorders import TraceRequest

RankDevice = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What every rank is built from.

    ``model`` and ``reference`` (of the KL penalty; None without one) are absolute directories of checkpoints, as
    ranks may run in another working directory. ``device`` is where the passes run, ``threads`` the CPU threads a
    rank uses.
    """

    config: RunConfig
    model: Path
    reference: Path | None
    device: RankDevice
    threads: int


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW, its schedule and the gradient clip.

    ``warmup_steps`` updates of linear warm-up, then ``lr`` (constant) or a cosine down to ``lr * min_lr_ratio`` at
    update ``total_steps``. ``offload``: its state lies in host memory between updates; ``moments``: the
    precision in which Adam's are kept.
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
    offload: bool = False
    moments: Precision = "float32"

    @classmethod
    def of(cls, train: TrainConfig) -> OptimizerSpec:
        """The optimizer of policy training: a constant rate after the warm-up."""
        return cls(
            lr=train.lr,
            betas=train.betas,
            weight_decay=train.weight_decay,
            grad_clip=train.grad_clip,
            warmup_steps=train.lr_warmup_steps,
            total_steps=train.total_updates,
            offload=train.offload_optimizer,
            moments=train.optimizer_moments,
        )


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One global step. ``measure_without_replay``: whether the mismatch without replay is measured in it.
    ``spike_norm``: the gradient norm beyond which an update is a spike (None: none is). ``trace``: what is written
    down of its routes. ``detail``: whether entropy and flags of every sampled token are reported."""

    config: RunConfig
    measure_without_replay: bool
    spike_norm: float | None = None
    trace: TraceRequest | None = None
    detail: bool = False
