"""Requests of the driver to trainer workers: small frozen values without torch that travel through Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.config.base import Precision
from agent_rl.config.train import LrSchedule
from agent_rl.models.spec import ModelSpec
from r3.trace.recorders import TraceRequest

WorkerDevice = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What every worker is built from.

    ``model_spec``: the architecture of ``model``. ``model`` and ``reference`` (of the KL penalty; None without one) are
    absolute checkpoint directories, because workers may run in another working directory. ``device``: where passes run.
    ``threads``: CPU threads per worker.
    """

    config: RunConfig
    model_spec: ModelSpec
    model: Path
    reference: Path | None
    device: WorkerDevice
    threads: int


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW, its schedule and the gradient clip.

    ``warmup_steps`` updates of linear warm-up, then ``lr`` (constant), or a line or cosine down to ``lr *
    min_lr_ratio`` at update ``total_steps``. ``offload``: the state is in host memory between updates. ``moments``: the
    precision of Adam's moments. ``ema``: the decay of the weights' average; None: no average.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 0
    total_steps: int = 1
    schedule: LrSchedule = "constant"
    min_lr_ratio: float = 0.0
    offload: bool = False
    moments: Precision = "float32"
    ema: float | None = None

    @classmethod
    def of(cls, train: TrainConfig) -> OptimizerSpec:
        """The optimizer of policy training."""
        return cls(
            lr=train.lr,
            betas=train.betas,
            weight_decay=train.weight_decay,
            grad_clip=train.grad_clip,
            warmup_steps=train.lr_warmup_steps * train.updates_per_step,
            total_steps=train.total_updates,
            schedule=train.lr_schedule,
            min_lr_ratio=train.min_lr_ratio,
            offload=train.offload_optimizer,
            moments=train.optimizer_moments,
            ema=None if train.ema is None else train.ema.decay,
        )


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One global step. ``measure_without_replay``: also measure the mismatch without replay. ``spike_norm``: an update
    with a larger gradient norm is a spike (None: no limit). ``trace``: what to trace of the routes. ``detail``: report
    entropy and flags of every sampled token. ``measure_mismatch``: compare the trainer with the engine."""

    config: RunConfig
    measure_without_replay: bool
    spike_norm: float | None = None
    trace: TraceRequest | None = None
    detail: bool = False
    measure_mismatch: bool = True

    @property
    def runs_old_logprob_pass(self) -> bool:
        """Whether the trainer computes its own log-probs before the update."""
        recorded = self.measure_mismatch or self.detail or self.trace is not None
        return recorded or self.config.train.needs_trainer_logprobs
