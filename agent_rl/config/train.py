"""The section ``train``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agent_rl.config.base import OFF, Precision, Section, registered
from agent_rl.config.layout import BalanceConfig, ParallelConfig
from agent_rl.config.objectives import Aggregation, objective_spec
from agent_rl.errors import ConfigError

FilterKind = Literal["none", "overlong", "compact"]
Recompute = Literal["none", "selective", "full"]
Replay = Literal["r3", "r2", "off"]
Baseline = Literal["mean", "leave_one_out", "batch"]
AdvantageScale = Literal["group", "batch", "none"]
OldLogprobSource = Literal["recompute", "rollout", "rescore"]
CorrectionWeight = Literal["token", "sequence"]
CorrectionMask = Literal["token", "sequence", "geometric"]
KlEstimator = Literal["k1", "k2", "k3"]
Objective = Annotated[str, registered("train.objective", objective_spec, ConfigError)]


class RescoreConfig(Section):
    """The engine evaluates each finished trajectory again, while other episodes still run (KwaiKAT's old log-probs)."""

    n: int = Field(8, gt=0, description="Evaluations of a trajectory; the mean of their log-probs is taken.")
    concurrency: int = Field(4, gt=0, description="Evaluations in flight at once, beside the episodes' own requests.")


class OldLogprobConfig(Section):
    """The old log-probs that the ratio is taken against; docs/old-logprobs.md says which to use when."""

    source: OldLogprobSource = Field(
        "recompute",
        description="The trainer's own before the update, the engine's as sampled, or the engine's evaluated again.",
    )
    rescore: RescoreConfig = RescoreConfig()


class CorrectionConfig(Section):
    """What is done about tokens that trainer and engine give different probabilities; see docs/trainer.md."""

    weight: CorrectionWeight | None = Field(
        None, description="Importance weights of the old policy over the rollout: of tokens, or of whole sequences."
    )
    weight_low: float = Field(0.0, ge=0, description="Weights below this are raised to it.")
    weight_high: float | None = Field(2.0, gt=0, description="Weights above this are cut to it; None: none is.")
    normalize: bool = Field(False, description="Divide the weights by their mean over the step.")
    mask: CorrectionMask | None = Field(
        None,
        description="Leave out tokens whose ratio of the trainer's probability to the rollout's is out of bounds: "
        "their own, that of their whole sequence, or its geometric mean.",
    )
    mask_low: float = Field(0.5, ge=0, description="The lowest ratio that the mask keeps.")
    mask_high: float = Field(2.0, gt=0, description="The highest ratio that the mask keeps.")
    veto: float | None = Field(None, gt=0, description="Leave out sequences with a token whose ratio is below this.")

    @model_validator(mode="after")
    def _makes_sense(self) -> CorrectionConfig:
        if self.weight_high is not None and self.weight_low > self.weight_high:
            raise ValueError(
                f"train.correction.weight_low is {self.weight_low:g}, above weight_high {self.weight_high:g}: swap them"
            )
        if self.mask_low > self.mask_high:
            raise ValueError(
                f"train.correction.mask_low is {self.mask_low:g}, above mask_high {self.mask_high:g}: swap them"
            )
        if self.normalize and self.weight is None:
            raise ValueError(
                "train.correction.normalize divides weights by their mean: set weight to token or sequence"
            )
        return self


class KlConfig(Section):
    """A penalty for leaving a reference model; docs/trainer.md says what each estimator's gradient is."""

    coefficient: float = Field(0.0, ge=0, description="Weight of the penalty (beta); 0: no reference model is held.")
    estimator: KlEstimator = Field("k3", description="How a token's KL is estimated.")
    k3_limit: float | None = Field(
        10.0, gt=0, description="The most that k3 of one token may be; beyond it has no gradient. None: no limit."
    )
    apply_to: Literal["loss", "reward"] = Field(
        "loss", description="A term of the loss (GRPO), or taken from the advantages token by token (REINFORCE++)."
    )
    reference: Path | None = Field(
        None, description="The reference's checkpoint, a directory or a hub id; None: the starting model."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> KlConfig:
        if self.estimator == "k1" and self.apply_to == "loss":
            raise ValueError(
                "train.kl: k1 in the loss has a gradient whose mean is 0, it is noise alone: take estimator k2 "
                "(its gradient is the KL's) or k3, or set apply_to to reward"
            )
        if self.reference is not None and not self.coefficient:
            raise ValueError("train.kl.reference is given and train.kl.coefficient is 0: give it a coefficient")
        return self


@dataclass(frozen=True, slots=True)
class Clip:
    """The clip of the ratio that is in effect: ``[1 - low, 1 + high]``.

    ``dual`` is dual-clip PPO's constant (arXiv 1912.09729): with A < 0 a token's loss is at most ``-dual * A``, however
    large its ratio; None leaves that out. ``tau``: the temperatures of a soft gate in place of the clip (SAPO), for
    A > 0 and for other A; None where the objective has none.
    """

    low: float
    high: float
    dual: float | None = None
    tau: tuple[float, float] | None = None


class OverlongConfig(Section):
    """DAPO's soft punishment of long trajectories (arXiv 2503.14476, eq. 13)."""

    buffer: int = Field(
        0, ge=0, description="Tokens before rollout.max_tokens over which the penalty rises from 0; 0: no penalty."
    )
    penalty: float = Field(1.0, gt=0, description="What is taken from the reward at rollout.max_tokens.")


class LoraConfig(Section):
    """Low-rank adapters on attention and experts are trained, and every other weight is frozen; docs/lora.md."""

    rank: int = Field(8, gt=0, multiple_of=8, description="The adapters' rank r; the experts' products want eights.")
    alpha: float = Field(16.0, gt=0, description="An adapter's change counts alpha / rank times.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class TrainConfig(Section):
    """The policy-gradient trainer."""

    steps: int = Field(20, ge=0, description="Global steps.")
    replay: Annotated[Replay, OFF] = Field("r3", description="Whose routes the trainer uses (R3, R2 or its own).")
    lr: float = Field(2e-6, gt=0, description="Learning rate.")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = Field((0.9, 0.95))
    grad_clip: float = Field(1.0, gt=0, description="Global gradient-norm limit.")
    lora: LoraConfig | None = Field(
        None, description="Train low-rank adapters instead of the weights; None: all weights are trained."
    )
    objective: Objective = Field(
        "grpo",
        description="The policy objective: grpo, gspo, cispo, reinforce, sapo, gmpo, or one of your own "
        "(docs/trainer.md).",
    )
    aggregation: Aggregation | None = Field(
        None,
        description="Mean over tokens, over sequences of their means, or over sequences of sums / max_tokens. None: "
        "the objective's own (docs/trainer.md).",
    )
    baseline: Baseline = Field(
        "mean", description="What a reward is compared with: its group's mean, the others' of it, or the step's mean."
    )
    advantage_scale: AdvantageScale = Field(
        "group",
        description="Whose standard deviation advantages are divided by; batch: they are normalized over the step's "
        "sampled tokens.",
    )
    overlong: OverlongConfig = OverlongConfig()
    old_logprob: OldLogprobConfig = OldLogprobConfig()
    filter: FilterKind = Field(
        "none",
        description="Trajectories left out of the loss by how they ended: overlong those cut at the context's end, "
        "compact also those out of turns or time. Their rewards still count for their groups' advantages.",
    )
    correction: CorrectionConfig = CorrectionConfig()
    dual_clip: float | None = Field(None, gt=1, description="Dual clip's constant; None leaves it out.")
    eps_low: float | None = Field(
        None, gt=0, description="Lower clip of the ratio; None: the objective's own (docs/trainer.md)."
    )
    eps_high: float | None = Field(
        None, gt=0, description="Upper clip of the ratio (clip-higher); None: the objective's own (docs/trainer.md)."
    )
    tau_positive: float | None = Field(
        None, gt=0, description="Temperature of sapo's gate for positive advantages; None: 1."
    )
    tau_negative: float | None = Field(
        None, gt=0, description="Temperature of sapo's gate for other advantages; None: 1.05."
    )
    kl: KlConfig = KlConfig()
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus in the loss; 0: none.")
    mini_steps: int = Field(1, gt=0, description="Parts of a global step's samples, with an optimizer update each.")
    epochs: int = Field(1, gt=0, description="How often a global step goes through its samples.")
    microbatch_tokens: int = Field(
        8192, gt=0, description="Tokens a packed micro-batch may hold, context ranks together; >= rollout.max_tokens."
    )
    dtype: Precision = Field("float32", description="Precision of the trainer's passes.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto")
    recompute: Recompute = Field("none", description="Activation recomputation.")
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = Field(
        ("core_attn",), description="What selective recomputation runs again; mlp is that of dense layers."
    )
    offload_optimizer: bool = Field(
        False, description="Keep the optimizer's state in host memory between updates; no number changes."
    )
    optimizer_moments: Precision = Field(
        "float32",
        description="Precision in which Adam's moments are kept between updates; bfloat16 rounds without bias.",
    )
    offload_activations: bool = Field(
        False,
        description="Keep the layers' inputs in host memory until the backward pass (recompute: full); no number "
        "changes.",
    )
    parallel: ParallelConfig = ParallelConfig()
    balance: BalanceConfig = BalanceConfig()
    ray_address: str | None = Field(None, description="A Ray cluster's address; None starts a local one.")
    restarts: int = Field(
        3,
        ge=0,
        description="How often dead ranks are started again, from the last checkpoint, before the next is complete.",
    )
    measure_without_replay_every: int = Field(
        1, ge=0, description="Measure mismatch_without_replay/* every so many steps; 0 never."
    )
    checkpoint_every: int = Field(5, ge=0, description="Steps between checkpoints; 0 keeps only the last.")
    keep_checkpoints: int = Field(2, gt=0, description="The newest checkpoints kept.")
    keep_every: int = Field(0, ge=0, description="Also keep the checkpoints of multiples of so many steps; 0: none.")

    @model_validator(mode="after")
    def _makes_sense(self) -> TrainConfig:
        facts, tau = objective_spec(self.objective), self.tau_positive or self.tau_negative
        if problem := facts.refusal(self.objective, self.eps_low, self.eps_high, self.dual_clip, tau):
            raise ValueError(problem)
        if self.baseline == "batch" and self.advantage_scale == "group":
            raise ValueError(
                "train.advantage_scale group divides by a group's spread and train.baseline batch compares over "
                "groups: "
                "set advantage_scale to batch or none"
            )
        if self.offload_activations and self.recompute != "full":
            raise ValueError(
                f"train.offload_activations moves the inputs of layers that are run again, and train.recompute is "
                f"{self.recompute}: set it to full"
            )
        return self

    @property
    def clip(self) -> Clip:
        """The configured bounds, or the objective's own; no bounds at all for one that clips nothing."""
        facts = objective_spec(self.objective)
        low, high = facts.clip or (math.inf, math.inf)
        tau = facts.tau and (self.tau_positive or facts.tau[0], self.tau_negative or facts.tau[1])
        return Clip(self.eps_low or low, self.eps_high or high, self.dual_clip, tau)

    @property
    def averaged_over(self) -> Aggregation:
        """The configured aggregation, or the objective's own."""
        return self.aggregation or objective_spec(self.objective).aggregation

    @property
    def normalizes_penalized(self) -> bool:
        """Whether the ranks normalize advantages over the step after the KL penalty was taken from them (REINFORCE++,
        arXiv 2501.03262, eq. 8 to 10)."""
        return bool(self.kl.coefficient) and self.kl.apply_to == "reward" and self.advantage_scale == "batch"

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the whole run."""
        return max(1, self.steps * self.mini_steps * self.epochs)
