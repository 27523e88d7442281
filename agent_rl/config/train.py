"""The section ``train``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agent_rl.config.advantages import baseline_spec, scale_spec
from agent_rl.config.base import OFF, Precision, Section, registered_name
from agent_rl.config.objectives import Aggregation, Distance, objective_spec
from agent_rl.config.tasks import SourceName, TrainSource
from agent_rl.errors import ConfigError

FilterKind = Literal["none", "overlong", "compact"]
Recompute = Literal["none", "selective", "full"]
Replay = Literal["r3", "r2", "off"]
OldLogprobSource = Literal["recompute", "rollout", "rescore"]
CorrectionWeight = Literal["token", "sequence", "icepop"]
CorrectionMask = Literal["token", "sequence", "geometric"]
KlEstimator = Literal["k1", "k2", "k3"]
Planner = Literal["foremoe", "eplb", "shadow"]
ExpertTransfer = Literal["pool", "exchange"]
FrozenModule = Literal["embeddings", "lm_head", "attention", "router", "experts", "shared_experts", "mlp"]
LrSchedule = Literal["constant", "linear", "cosine"]
Objective = Annotated[str, registered_name("train.objective", objective_spec, ConfigError)]
Baseline = Annotated[str, registered_name("train.baseline", baseline_spec, ConfigError)]
AdvantageScale = Annotated[str, registered_name("train.advantage_scale", scale_spec, ConfigError)]


class ParallelConfig(Section):
    """Megatron's parallel layout. The data-parallel size follows from `world_size` and the other sizes."""

    world_size: int = Field(1, gt=0, description="Number of trainer ranks.")
    tensor: int = Field(1, gt=0, description="Tensor-parallel size; above 1 sequence parallelism is on.")
    pipeline: int = Field(1, gt=0, description="Pipeline-parallel size.")
    virtual_pipeline: int = Field(1, gt=0, description="Model chunks per pipeline stage (interleaved 1F1B schedule).")
    context: int = Field(1, gt=0, description="Context-parallel size.")
    expert: int = Field(1, gt=0, description="Expert-parallel size.")
    dispatcher: Literal["alltoall", "allgather", "flex"] = Field(
        "alltoall",
        description="Token dispatcher of the MoE layers. allgather: requires pipeline 1. flex: DeepEP if the hardware "
        "supports it, else alltoall.",
    )
    distributed_optimizer: bool = Field(
        True, description="Shard the optimizer state over the ranks that replicate a weight (ZeRO-1)."
    )


class BalanceTransferConfig(Section):
    """Transfer of borrowed experts; docs/explanation/balancing.md compares the costs."""

    recompute: ExpertTransfer = Field(
        "pool",
        description="Transfer in passes without gradients. pool: read from shared host memory. exchange: send between "
        "ranks.",
    )
    update: ExpertTransfer = Field(
        "exchange", description="Transfer of weights in passes with gradients. Gradients always use exchange."
    )


class BalanceConfig(Section):
    """Expert load balancing: expert ranks get equal work in every micro-batch and layer, planned from the replayed
    routes (ForeMoE); see docs/explanation/balancing.md."""

    enabled: bool = Field(False, description="Let expert ranks borrow each other's experts for a micro-batch.")
    planner: Planner = Field(
        "foremoe",
        description="Planner of borrowed experts. foremoe: from the replayed routes. eplb, shadow: baselines for "
        "comparison.",
    )
    slots: int = Field(4, gt=0, description="Experts that a rank may borrow at once, per layer.")
    transfer: BalanceTransferConfig = Field(BalanceTransferConfig(), description="Transfer of borrowed experts.")
    ranks_per_node: int | None = Field(
        None, gt=0, description="Neighboring expert ranks on one node. null: detected from the ranks' host names."
    )
    placement_every: int = Field(
        1,
        ge=0,
        description="Steps between two renewals of the experts' owner ranks from the replayed routes, where expert "
        "ranks span nodes; experts move if that saves more time than it takes. 0: owners follow expert numbers.",
    )


class RescoreConfig(Section):
    """Evaluation of finished trajectories by the engine while other episodes run (KwaiKAT's old log-probs)."""

    n: int = Field(8, gt=0, description="Evaluations per trajectory. The old log-prob is the mean over them.")
    concurrency: int = Field(4, gt=0, description="Maximum number of concurrent evaluations.")


class OldLogprobConfig(Section):
    """The old log-probs, the denominator of the importance ratio; see docs/reference/objectives.md."""

    source: OldLogprobSource = Field(
        "recompute",
        description="Source of the old log-probs. recompute: a trainer pass before the update. rollout: the engine's "
        "log-probs as sampled. rescore: new evaluations by the engine.",
    )
    rescore: RescoreConfig = Field(RescoreConfig(), description="Settings of source rescore.")
    measure_every: int = Field(
        10,
        ge=0,
        description="With source rollout or rescore: steps between measurements of `mismatch/*` and of token details. "
        "Other steps leave out the trainer's pass before the update, unless another key needs it. 0: never measure.",
    )


class CorrectionConfig(Section):
    """Corrections for probability mismatch between trainer and engine; see docs/reference/objectives.md."""

    weight: CorrectionWeight | None = Field(
        None,
        description="Importance weights, old policy over rollout policy. token, sequence: the token's or its "
        "sequence's ratio within the limits. icepop: the token's ratio, 0 beyond the limits. null: no weights.",
    )
    weight_low: float = Field(0.0, ge=0, description="Lower limit of the weights; smaller weights are raised to it.")
    weight_high: float | None = Field(
        2.0, gt=0, description="Upper limit of the weights; larger weights are reduced to it. null disables the limit."
    )
    normalize: bool = Field(False, description="Divide the weights by their mean over the step.")
    mask: CorrectionMask | None = Field(
        None,
        description="Mask tokens whose ratio of trainer to rollout probability is outside [mask_low, mask_high]. "
        "token: the token's ratio. sequence: the ratio of its sequence. geometric: the geometric mean over its "
        "sequence. null: no mask.",
    )
    mask_low: float = Field(0.5, ge=0, description="Smallest ratio that the mask keeps.")
    mask_high: float = Field(2.0, gt=0, description="Largest ratio that the mask keeps.")
    veto: float | None = Field(
        None, gt=0, description="Mask sequences with a token of a ratio below this. null: no veto."
    )
    opsm: float | None = Field(
        None,
        ge=0,
        description="Off-policy sequence masking (DeepSeek-V3.2): mask sequences with a negative advantage whose mean "
        "log-ratio of the old to the current policy is above this. null: no masking.",
    )
    router_shift: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Floor of RSPO's router-shift ratio, which multiplies a token's ratio before the clip; requires "
        "replay. null: no router shift.",
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> CorrectionConfig:
        for name, low, high in (("weight", self.weight_low, self.weight_high), ("mask", self.mask_low, self.mask_high)):
            if high is not None and low > high:
                raise ValueError(f"train.correction.{name}_low is {low:g}; it must be at most {name}_high ({high:g})")
        if self.normalize and self.weight is None:
            raise ValueError("train.correction.normalize requires weights: set train.correction.weight")
        return self


class KlConfig(Section):
    """KL penalty against a reference model; docs/reference/objectives.md gives each estimator's gradient."""

    coefficient: float = Field(0.0, ge=0, description="Weight of the penalty (beta). 0: no reference model is loaded.")
    estimator: KlEstimator = Field("k3", description="Estimator of a token's KL: k1, k2 or k3.")
    k3_limit: float | None = Field(
        10.0,
        gt=0,
        description="Upper limit of k3 per token. A token above it has no gradient. null disables the limit.",
    )
    apply_to: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the penalty applies. loss: a term of the loss (GRPO). reward: subtracted from each token's "
        "advantage (REINFORCE++).",
    )
    unbiased: bool = Field(
        False,
        description="Multiply the estimate in the loss by the ratio to the old policy, so that its gradient is that of "
        "KL(pi || reference) also off-policy (DeepSeek-V3.2).",
    )
    reference: Path | None = Field(
        None, description="Checkpoint directory or hub id of the reference model. null: the starting model."
    )

    @model_validator(mode="after")
    def _check_penalty(self) -> KlConfig:
        if self.unbiased and self.apply_to == "reward":
            raise ValueError("train.kl.unbiased requires train.kl.apply_to loss")
        if self.estimator == "k1" and self.apply_to == "loss" and not self.unbiased:
            raise ValueError(
                "train.kl.estimator k1 in the loss has a gradient with mean 0: set estimator to k2 (the KL's gradient) "
                "or k3, apply_to to reward, or unbiased"
            )
        if self.reference is not None and not self.coefficient:
            raise ValueError("train.kl.reference requires train.kl.coefficient above 0")
        return self


@dataclass(frozen=True, slots=True)
class Clip:
    """The effective clip of the ratio: ``[1 - low, 1 + high]``.

    ``dual``: constant of dual-clip PPO (arXiv 1912.09729); for a negative advantage A a token's loss is at most
    ``-dual * A``; None: no dual clip. ``tau``: temperatures of the soft gate that replaces the clip (SAPO), for
    positive and for other advantages; None if the objective has no gate. ``options``: the objective's further numbers.
    ``distance``: what the bounds limit of a token, where it is not the ratio; None: nothing of a single token.
    """

    low: float
    high: float
    dual: float | None = None
    tau: tuple[float, float] | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    distance: Distance | None = "ratio"


class OverlongConfig(Section):
    """Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13)."""

    buffer: int = Field(
        0,
        ge=0,
        description="Tokens before rollout.max_tokens over which the penalty rises linearly from 0. 0: no penalty.",
    )
    penalty: float = Field(1.0, gt=0, description="Amount subtracted from the reward at rollout.max_tokens.")


class TurnRewardsConfig(Section):
    """Advantages by turn, from the rewards of turns; see docs/reference/objectives.md."""

    gamma: float = Field(1.0, ge=0, le=1, description="Discount of the next turn's return.")


class DifficultyPool(Section):
    """Tasks by their latest solve rate."""

    up_to: float = Field(..., ge=0, le=1, description="Highest solve rate of the pool's tasks, inclusive.")
    weight: float = Field(..., ge=0, description="Weight of one of its tasks, relative to an unseen task's 1.")


class CurriculumConfig(Section):
    """Draw tasks by their measured solve rate; see docs/how-to/train.md."""

    pools: tuple[DifficultyPool, ...] = Field(
        (
            DifficultyPool(up_to=0.25, weight=0.2),
            DifficultyPool(up_to=0.75, weight=1.0),
            DifficultyPool(up_to=1.0, weight=0.2),
        ),
        min_length=1,
        description="Pools by rising `up_to`; the last one has 1.",
    )

    @model_validator(mode="after")
    def _check_pools(self) -> CurriculumConfig:
        limits = [pool.up_to for pool in self.pools]
        if limits != sorted(set(limits)) or limits[-1] != 1.0:
            raise ValueError(f"train.curriculum.pools: up_to is {limits}; it must rise from pool to pool, up to 1")
        return self


class EchoConfig(Section):
    """ECHO (arXiv 2605.24517): also learn to predict observations; see docs/reference/objectives.md."""

    coefficient: float = Field(0.05, gt=0, description="Weight of the observations' cross entropy in the loss.")


class DistillConfig(Section):
    """On-policy distillation: learn from a teacher's log-probs of the sampled tokens; see docs/how-to/distill.md."""

    teacher: str = Field(
        description="URL of an SGLang server with the model's tokenizer. Or, on CPUs, a checkpoint directory or "
        "RUN[@STEP] that the run serves."
    )
    coefficient: float = Field(
        1.0, gt=0, description="Weight of the reverse KL to the teacher, in the advantage; with top_k in the loss."
    )
    reward: float = Field(0.0, ge=0, description="Weight of the reward's advantage. 0: learn from the teacher alone.")
    top_k: int | None = Field(
        None,
        gt=0,
        le=256,
        description="Learn from the teacher's distribution over its top_k most likely tokens and the rest, 8 * top_k "
        "bytes per sampled token. null: from its log-prob of the sampled token.",
    )
    concurrency: int = Field(8, gt=0, description="Maximum number of concurrent evaluations by the teacher.")

    @property
    def served(self) -> bool:
        """Whether the run starts an engine for the teacher."""
        return not self.teacher.startswith(("http://", "https://"))

    @property
    def in_advantage(self) -> float:
        """The weight of the reverse KL in the advantage; 0 where it is a term of the loss."""
        return self.coefficient if self.top_k is None else 0.0


class CriticConfig(Section):
    """The critic of `train.baseline: critic`: a value head on the policy's last hidden states, whose values give the
    advantages (GAE); see docs/how-to/critic.md."""

    lr: float = Field(
        0.3,
        gt=0,
        description="Learning rate of the value head (Adam, constant): about the change of a value per update.",
    )
    coefficient: float = Field(
        0.0,
        ge=0,
        description="Weight of the value loss in the gradient of the policy's weights. 0: only the value head learns "
        "from it.",
    )
    clip: float | None = Field(
        0.2, gt=0, description="Limit of a value's change in the updates of a step (PPO). null: no limit."
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per step of GAE.")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of the advantages.")
    value_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of the returns that the values learn.")
    warmup_steps: int = Field(0, ge=0, description="Global steps at the start in which only the value head learns.")
    step: Literal["token", "turn"] = Field(
        "token",
        description="Step of GAE. token: every sampled token. turn: the sampled tokens between two observations, with "
        "one value and one advantage. Observation tokens are never steps.",
    )


class EmaConfig(Section):
    """An exponential moving average of the weights, for evaluation and export; see docs/how-to/checkpoints.md."""

    decay: float = Field(
        0.999, gt=0, lt=1, description="Share of the average that an update keeps: it averages 1 / (1 - decay) updates."
    )


class LoraConfig(Section):
    """LoRA: train low-rank adapters on attention and experts and freeze all other weights; see docs/how-to/lora.md."""

    rank: int = Field(
        8, gt=0, multiple_of=8, description="Rank r of the adapters, a multiple of 8 (for expert layers)."
    )
    alpha: float = Field(16.0, gt=0, description="An adapter's output is multiplied by alpha / rank.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class TrainConfig(Section):
    """The policy-gradient trainer."""

    steps: int = Field(20, ge=0, description="Number of global steps.")
    sources: dict[SourceName, TrainSource] = Field(
        default_factory=dict,
        description="Environments to train on, by name. They replace `env.name` and `env.options`. Empty: the "
        "environment of the section `env` (docs/how-to/train.md).",
    )
    curriculum: CurriculumConfig | None = Field(
        None, description="Draw tasks by their solve rate so far. null: every task once per epoch."
    )
    replay: Annotated[Replay, OFF] = Field(
        "r3", description="Routing replay mode: r3 (rollout), r2 (trainer's first pass), off."
    )
    lr: float = Field(2e-6, gt=0, description="Learning rate.")
    lr_warmup_steps: int = Field(0, ge=0, description="Global steps of linear learning-rate warm-up.")
    lr_schedule: LrSchedule = Field(
        "constant",
        description="Learning rate after the warm-up. constant: lr. linear, cosine: down to lr * min_lr_ratio at the "
        "last of train.steps.",
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Last learning rate of linear and cosine, divided by lr.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of AdamW.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Adam's beta1 and beta2.")
    grad_clip: float = Field(1.0, gt=0, description="Global gradient-norm limit.")
    lora: LoraConfig | None = Field(None, description="Train LoRA adapters. null: train all weights.")
    ema: EmaConfig | None = Field(
        None, description="Average of the weights, float32 in host memory, saved in checkpoints. null: none."
    )
    echo: EchoConfig | None = Field(None, description="Cross entropy of observation tokens (ECHO). null: none.")
    distill: DistillConfig | None = Field(None, description="On-policy distillation. null: no teacher.")
    freeze: tuple[FrozenModule, ...] | None = Field(
        None,
        description="Modules whose weights are not trained and have no optimizer state: embeddings, lm_head, attention "
        "(every token mixer), router, experts, shared_experts, mlp (of layers without experts). Norms are trained. "
        "null: train all.",
    )
    objective: Objective = Field(
        "grpo",
        description="Policy objective: grpo, gspo, cispo, reinforce, sapo, gmpo, dppo_tv, dppo_kl, clip_cov, kl_cov, "
        "or a registered objective (docs/reference/objectives.md).",
    )
    objective_options: dict[str, float] = Field(
        default_factory=dict, description="Further numbers of the objective, by name (docs/reference/objectives.md)."
    )
    aggregation: Aggregation | None = Field(
        None,
        description="Loss aggregation. token: mean over tokens. sequence: mean over sequences of token means. "
        "constant: mean over sequences of token sums / rollout.max_tokens. prompt: mean over tasks of token means. "
        "null: the objective's default.",
    )
    baseline: Baseline = Field(
        "mean",
        description="Reward baseline. mean: of the group. leave_one_out: mean of the others. batch: mean of the step. "
        "critic: values of train.critic. Or a registered baseline (docs/reference/objectives.md).",
    )
    critic: CriticConfig = Field(CriticConfig(), description="The critic of baseline critic.")
    advantage_scale: AdvantageScale = Field(
        "group",
        description="Divisor of advantages. group: the group's standard deviation. batch: the step's, over sampled "
        "tokens. mean: the group's mean reward (MaxRL). none: 1. Or a registered scale (docs/reference/objectives.md).",
    )
    turn_rewards: TurnRewardsConfig | None = Field(
        None, description="Advantages by turn, from the rewards that a grade gives to turns. null: by trajectory."
    )
    overlong: OverlongConfig = Field(OverlongConfig(), description="Penalty on long trajectories.")
    old_logprob: OldLogprobConfig = Field(OldLogprobConfig(), description="Old log-probs of the importance ratio.")
    filter: FilterKind = Field(
        "none",
        description="Trajectories masked from the loss. overlong: those truncated at the context limit. compact: also "
        "those that hit the turn or time limit. Their rewards still count in group statistics.",
    )
    correction: CorrectionConfig = Field(CorrectionConfig(), description="Corrections for trainer-engine mismatch.")
    dual_clip: float | None = Field(None, gt=1, description="Constant of dual-clip PPO. null disables dual clip.")
    eps_low: float | None = Field(
        None,
        gt=0,
        description="Lower clip range of the ratio. null: the objective's default (docs/reference/objectives.md).",
    )
    eps_high: float | None = Field(
        None,
        gt=0,
        description="Upper clip range of the ratio (clip-higher). null: the objective's default "
        "(docs/reference/objectives.md).",
    )
    tau_positive: float | None = Field(
        None, gt=0, description="Temperature of sapo's gate, advantage above 0. null: 1."
    )
    tau_negative: float | None = Field(
        None, gt=0, description="Temperature of sapo's gate, other advantages. null: 1.05."
    )
    kl: KlConfig = Field(KlConfig(), description="KL penalty against a reference model.")
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus in the loss. 0: no bonus.")
    mini_steps: int = Field(1, gt=0, description="Mini-batches per global step and epoch; one optimizer update each.")
    epochs: int = Field(1, gt=0, description="Passes over the samples of a global step.")
    microbatch_tokens: int = Field(
        8192,
        gt=0,
        description="Maximum tokens of a packed micro-batch, over all context-parallel ranks; must be at least "
        "rollout.max_tokens.",
    )
    dtype: Precision = Field("float32", description="Data type of the trainer's forward and backward passes.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the trainer. auto: cuda if a GPU is available, else cpu."
    )
    recompute: Recompute = Field(
        "none",
        description="Activation recomputation. none: keep all activations. selective: recompute recompute_modules. "
        "full: recompute whole layers.",
    )
    recompute_modules: tuple[Literal["core_attn", "layernorm", "mlp", "moe"], ...] = Field(
        ("core_attn",),
        description="Modules that selective recomputation runs again; layernorm means the norms before attention and "
        "MLP or experts, mlp the MLP of dense layers.",
    )
    offload_optimizer: bool = Field(
        False, description="Keep optimizer state in host memory between updates. Results are equal."
    )
    optimizer_moments: Precision = Field(
        "float32", description="Data type of Adam's moments between updates. bfloat16 is rounded without bias."
    )
    offload_activations: bool = Field(
        False,
        description="Keep layer inputs in host memory until the backward pass; requires recompute full. Results are "
        "unchanged.",
    )
    parallel: ParallelConfig = Field(ParallelConfig(), description="Parallel layout.")
    balance: BalanceConfig = Field(BalanceConfig(), description="Expert load balancing.")
    ray_address: str | None = Field(None, description="HOST:PORT of the Ray cluster. null: start Ray on this node.")
    restarts: int = Field(
        3,
        ge=0,
        description="Restarts of failed trainer ranks allowed between two checkpoints. Ranks restart from the last "
        "checkpoint.",
    )
    measure_without_replay_every: int = Field(
        1, ge=0, description="Steps between measurements of `mismatch_without_replay/*`. 0: never."
    )
    checkpoint_every: int = Field(5, ge=0, description="Steps between checkpoints. 0: only the last step.")
    keep_checkpoints: int = Field(2, gt=0, description="Number of newest checkpoints to keep.")
    keep_every: int = Field(0, ge=0, description="Also keep checkpoints at multiples of this step. 0: only the newest.")

    @model_validator(mode="after")
    def _check_objective(self) -> TrainConfig:
        spec, tau = objective_spec(self.objective), self.tau_positive or self.tau_negative
        if problem := spec.conflict(
            self.objective, self.eps_low, self.eps_high, self.dual_clip, tau, self.objective_options
        ):
            raise ValueError(problem)
        scale = self.advantage_scale
        if baseline_spec(self.baseline).over != "group" and scale != "none" and scale_spec(scale).over == "group":
            raise ValueError(
                f"train.advantage_scale {scale} conflicts with train.baseline {self.baseline}: set advantage_scale to "
                "batch or none"
            )
        if self.correction.router_shift is not None and self.replay == "off":
            raise ValueError(
                "train.correction.router_shift compares the gates of replayed experts: set train.replay to r3 or r2"
            )
        if self.offload_activations and self.recompute != "full":
            raise ValueError(f"train.offload_activations requires train.recompute full; it is {self.recompute}")
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> TrainConfig:
        if not self.uses_critic:
            if self.critic != CriticConfig():
                raise ValueError(f"train.critic requires train.baseline critic; it is {self.baseline}")
            return self
        conflicts = {
            f"train.advantage_scale {self.advantage_scale}: set it to batch or none": self.advantage_scale
            not in ("batch", "none"),
            "train.distill, whose advantages are of single tokens: remove one of them": self.distill is not None,
            "train.kl.apply_to reward: set it to loss": self.kl.coefficient > 0 and self.kl.apply_to == "reward",
        }
        if messages := [message for message, conflict in conflicts.items() if conflict]:
            raise ValueError(f"train.baseline critic conflicts with {messages[0]}")
        return self

    @property
    def clip(self) -> Clip:
        """The configured bounds, else the objective's defaults. Infinite bounds for an objective without a clip."""
        spec = objective_spec(self.objective)
        low, high = spec.clip or (math.inf, math.inf)
        tau = spec.tau and (self.tau_positive or spec.tau[0], self.tau_negative or spec.tau[1])
        options = {**spec.options, **self.objective_options}
        distance = spec.distance if spec.ratio == "token" else None
        return Clip(self.eps_low or low, self.eps_high or high, self.dual_clip, tau, options, distance)

    @property
    def loss_aggregation(self) -> Aggregation:
        """The configured aggregation, else the objective's default."""
        return self.aggregation or objective_spec(self.objective).aggregation

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Whether a group of equal rewards has an effect: its baseline is not that of the group, or something else than
        the reward teaches."""
        return bool(self.other_lessons) or baseline_spec(self.baseline).over != "group"

    @property
    def other_lessons(self) -> tuple[str, ...]:
        """The keys by which trajectories teach whatever their rewards."""
        keys = {"distill": self.distill, "echo": self.echo, "turn_rewards": self.turn_rewards}
        return tuple(f"train.{key}" for key, section in keys.items() if section is not None)

    @property
    def uses_critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def normalizes_on_ranks(self) -> bool:
        """Whether ranks normalize advantages over the step: after GAE, or after subtracting the KL penalty
        (REINFORCE++, arXiv 2501.03262, eq. 8 to 10)."""
        penalty = bool(self.kl.coefficient) and self.kl.apply_to == "reward"
        return (penalty or self.uses_critic) and self.advantage_scale == "batch"

    @property
    def needs_trainer_logprobs(self) -> bool:
        """Whether every step runs the trainer's pass before the update, for another reason than to measure."""
        correction, penalized = self.correction, bool(self.kl.coefficient) and self.kl.apply_to == "reward"
        selects = objective_spec(self.objective).selection is not None
        compares = correction.mask is not None or correction.veto is not None
        owns_routes = self.replay == "r2" or self.balance.enabled
        # From the gap to the teacher; by values and by the gates of this pass.
        learns = self.distill is not None or self.uses_critic or correction.router_shift is not None
        recomputes = self.old_logprob.source == "recompute"
        return recomputes or owns_routes or compares or penalized or selects or learns

    @property
    def total_updates(self) -> int:
        """Number of optimizer updates of the whole run, at least 1."""
        return max(1, self.steps * self.updates_per_step)

    @property
    def updates_per_step(self) -> int:
        return self.mini_steps * self.epochs
