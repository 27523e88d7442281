"""What the driver tells the trainer ranks. Small frozen values without torch; they travel through Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent_rl.config import ParallelConfig, RunConfig, TrainConfig

Replay = Literal["r3", "r2", "off"]
OldLogprobs = Literal["recompute", "rollout", "rescore"]
Objective = Literal["grpo", "gspo", "cispo", "reinforce"]
Aggregation = Literal["token", "sequence", "constant"]
Correction = Literal["tis", "icepop", "sequence_tis", "sequence_mask", "geometric_mask"]
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward"]


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
    """Which model every rank builds, in which layout, precision and place. ``threads``: CPU threads a rank uses.
    ``reference``: the checkpoint of the KL penalty's reference model, None without a penalty."""

    folder: Path
    parallel: ParallelConfig
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    recompute: Literal["none", "selective", "full"]
    recompute_modules: tuple[str, ...]
    seed: int
    threads: int
    reference: Path | None = None


@dataclass(frozen=True, slots=True)
class Clip:
    """The clip of the ratio: ``[1 - low, 1 + high]``.

    ``dual`` is dual-clip PPO's constant (arXiv 1912.09729): with A < 0 a token's loss is at most ``-dual * A``, however
    large its ratio; None leaves that out.
    """

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """``low`` and ``high`` bounds of a correction's ratio, and its veto (None: no veto)."""

    low: float = 0.5
    high: float = 2.0
    veto: float | None = None


@dataclass(frozen=True, slots=True)
class KlPenalty:
    """The penalty for leaving the reference model. With ``normalise`` advantages are normalised over the step after the
    penalty was taken from them (only of place "reward")."""

    coefficient: float
    estimator: KlEstimator = "k3"
    place: KlPlace = "loss"
    normalise: bool = False


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The policy loss: objective, clip, aggregation (``length``: the constant of ``constant``), correction, the KL
    penalty (None: no reference model) and the entropy bonus' coefficient."""

    objective: Objective = "grpo"
    clip: Clip = Clip(0.2, 0.27)
    aggregation: Aggregation = "token"
    length: int = 1
    correction: Correction | None = None
    bounds: Bounds = Bounds()
    kl: KlPenalty | None = None
    entropy: float = 0.0


@dataclass(frozen=True, slots=True)
class SpikePolicy:
    """What becomes of an update whose gradient norm is beyond ``norm`` (None: no norm is a spike).

    ``skip`` leaves it out, ``clip`` scales it to ``norm``, ``allow`` takes it (clipped like any other) and counts it.
    """

    norm: float | None = None
    action: Literal["skip", "clip", "allow"] = "allow"


ALLOW_SPIKES = SpikePolicy()


@dataclass(frozen=True, slots=True)
class StepSettings:
    """One global step. ``old_logprobs``: what the ratio is taken against, the trainer's own (recomputed before the
    update), the rollout's as sampled, or the samples' ``old_logprobs`` (rescored by the engine). ``temperature`` is the
    one the rollout sampled at: log-probs are compared there."""

    replay: Replay
    loss: LossSettings
    old_logprobs: OldLogprobs
    temperature: float
    measure_native: bool
    spikes: SpikePolicy = ALLOW_SPIKES


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


def loss_settings(config: RunConfig) -> LossSettings:
    """The policy loss of a config. Dr.GRPO's constant length is the most a trajectory may hold."""
    train, correction = config.train, config.train.correction
    return LossSettings(
        objective=train.objective,
        clip=_clip(train),
        aggregation=train.aggregation,
        length=config.rollout.max_tokens,
        correction=correction.kind,
        bounds=Bounds(correction.low, correction.high, correction.veto),
        kl=_kl_penalty(train),
        entropy=train.entropy_coefficient,
    )


def _clip(train: TrainConfig) -> Clip:
    """GSPO's ratio is a mean over a sequence, so its bounds are narrow (arXiv 2507.18071, section 5.1)."""
    low, high = (3e-4, 4e-4) if train.objective == "gspo" else (0.2, 0.27)
    return Clip(train.eps_low or low, train.eps_high or high, train.dual_clip)


def _kl_penalty(train: TrainConfig) -> KlPenalty | None:
    kl = train.kl
    if not kl.coefficient:
        return None
    return KlPenalty(kl.coefficient, kl.estimator, kl.where, normalise=kl.where == "reward" and train.scale == "batch")


def advantage_scale(train: TrainConfig) -> Literal["group", "batch", "none"]:
    """What the step's advantages are divided by before they reach the ranks. Those that the KL penalty is taken from
    are normalised after it, by the ranks (REINFORCE++, arXiv 2501.03262, eq. 8 to 10)."""
    penalty = _kl_penalty(train)
    return "none" if penalty is not None and penalty.normalise else train.scale


def reference_folder(config: RunConfig) -> Path | None:
    """Where the reference model of the KL penalty is; None where there is no penalty."""
    kl = config.train.kl
    return (kl.reference or config.model).absolute() if kl.coefficient else None


def step_settings(config: RunConfig, *, measure_native: bool, spike_norm: float | None = None) -> StepSettings:
    """The settings of one global step. A greedy rollout's log-probs are the raw ones, so 0 counts as 1."""
    return StepSettings(
        replay=config.train.replay,
        loss=loss_settings(config),
        old_logprobs=config.train.old_logprob.source,
        temperature=config.rollout.temperature or 1.0,
        measure_native=measure_native,
        spikes=SpikePolicy(spike_norm, config.guard.on_spike),
    )
