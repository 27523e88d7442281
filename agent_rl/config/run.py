"""The complete config, and the checks across its sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_rl.config.base import Section
from agent_rl.config.engine import EngineConfig
from agent_rl.config.monitoring import GuardConfig, MonitoringConfig
from agent_rl.config.r3 import R3Config
from agent_rl.config.rollout import AsyncRolloutConfig, RolloutConfig
from agent_rl.config.sft import SftConfig
from agent_rl.config.tasks import DEFAULT_SCAFFOLD, EnvConfig, EvalConfig, EvalSettings, SandboxConfig, TaskSource
from agent_rl.config.train import TrainConfig

GpuName = Literal["A100 SXM", "H100 SXM", "H200 SXM", "B200 SXM"]


class HardwareConfig(Section):
    """The target hardware. Only `agent-rl plan` and `agent-rl dry-run` read it."""

    gpu: GpuName = Field("H100 SXM", description="GPU model whose speed `agent-rl dry-run` assumes.")
    gpu_memory_gb: float | None = Field(
        None, gt=0, description="Memory of one GPU, in GiB. null: plan for CPU ranks, or for this node's GPU."
    )
    gpus_per_node: int = Field(8, gt=0, description="GPUs per node.")
    trainer_nodes: int | None = Field(None, gt=0, description="Nodes for trainer ranks. null: as many as needed.")
    host_memory_gb: float | None = Field(None, gt=0, description="Host memory per node, in GiB. null: this node's.")
    disk_gb: float | None = Field(None, gt=0, description="Disk space for runs_dir, in GiB. null: what is free there.")


class RunConfig(Section):
    """A complete config file."""

    name: str = Field(..., pattern=r"^[\w.-]+$", description="Name of the run; its directory is runs_dir/name.")
    runs_dir: Path = Field(Path("runs"), description="Directory that contains the run directories.")
    seed: int = Field(0, ge=0, description="Random seed of the run.")
    model: Path = Field(
        ...,
        description="Starting model: the directory of a Hugging Face checkpoint, a hub id (OWNER/NAME or "
        "OWNER/NAME@REVISION), or a shipped model (tiny-moe, paper-moe).",
    )
    engine: EngineConfig = Field(EngineConfig(), description="Inference engines.")
    sandbox: SandboxConfig = Field(SandboxConfig(), description="Sandboxes for the agent's commands.")
    env: EnvConfig = Field(EnvConfig(), description="Environment and tasks.")
    rollout: RolloutConfig = Field(RolloutConfig(), description="Sampling of episodes.")
    train: TrainConfig = Field(TrainConfig(), description="Trainer.")
    sft: SftConfig | None = Field(
        None, description="Supervised fine-tuning with `agent-rl sft`. null: the config is one of RL."
    )
    r3: R3Config = Field(R3Config(), description="Rollout routing replay.")
    guard: GuardConfig = Field(GuardConfig(), description="Detection of collapsing runs.")
    async_rollout: AsyncRolloutConfig = Field(AsyncRolloutConfig(), description="Asynchronous training.")
    eval: EvalConfig = Field(EvalConfig(), description="Evaluation before, during and after training.")
    monitoring: MonitoringConfig = Field(MonitoringConfig(), description="Recorded details and metric services.")
    hardware: HardwareConfig = Field(HardwareConfig(), description="Target hardware of plan and dry-run.")

    @model_validator(mode="before")
    @classmethod
    def _with_scaffold_defaults(cls, data: Any) -> Any:
        """Returns ``data`` with the scaffold's values for keys of ``rollout`` that ``data`` omits."""
        env, rollout = (data.get("env") or {}, data.get("rollout") or {}) if isinstance(data, dict) else (None, None)
        if not isinstance(env, dict) or not isinstance(rollout, dict):
            return data
        name = env.get("scaffold", DEFAULT_SCAFFOLD)
        if name == DEFAULT_SCAFFOLD or not isinstance(name, str):
            return data
        from envs import ScaffoldError, load_scaffold

        try:
            scaffold = load_scaffold(name)
        except ScaffoldError:
            return data  # the section env rejects it and names the key
        return {**data, "rollout": {**scaffold.default_rollout, **scaffold.required_rollout, **rollout}}

    @model_validator(mode="after")
    def _check_scaffold(self) -> RunConfig:
        if self.env.scaffold == DEFAULT_SCAFFOLD:
            return self
        from envs import load_scaffold

        for key, value in load_scaffold(self.env.scaffold).required_rollout.items():
            if getattr(self.rollout, key) != value:
                raise ValueError(
                    f"rollout.{key} is {getattr(self.rollout, key)}; env.scaffold {self.env.scaffold} requires "
                    f"{value}: remove rollout.{key}"
                )
        if self.env.tool_style != "full":
            raise ValueError(
                f"env.tool_style {self.env.tool_style} requires env.scaffold {DEFAULT_SCAFFOLD}; remove it with "
                f"env.scaffold {self.env.scaffold}"
            )
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> RunConfig:
        for name, source in self.eval.sources.items():
            same = self.train.sources.get(name)
            if same is not None and any(getattr(same, key) != getattr(source, key) for key in TaskSource.model_fields):
                raise ValueError(
                    f"eval.sources.{name} and train.sources.{name} differ in {', '.join(TaskSource.model_fields)}: "
                    "rename one"
                )
        if reserved := {"train", self.eval.split} & self.environments.keys():
            raise ValueError(f"train.sources and eval.sources: {reserved.pop()!r} is the name of a split: rename it")
        return self

    @model_validator(mode="after")
    def _check_rescore(self) -> RunConfig:
        if self.train.old_logprob.source == "rescore" and self.rollout.temperature not in (0.0, 1.0):
            raise ValueError(
                "train.old_logprob.source rescore requires rollout.temperature 1: SGLang returns prompt log-probs at "
                f"temperature 1 only, and rollout.temperature is {self.rollout.temperature:g}"
            )
        if self.train.old_logprob.source == "rescore" and self.rollout.truncated:
            raise ValueError(
                "train.old_logprob.source rescore conflicts with rollout.top_p, top_k and min_p: SGLang returns prompt "
                "log-probs over the whole vocabulary only: set source to recompute or rollout"
            )
        return self

    @model_validator(mode="after")
    def _check_distill(self) -> RunConfig:
        if self.train.distill is not None and self.rollout.temperature != 1.0:
            raise ValueError(
                "train.distill requires rollout.temperature 1: SGLang returns a teacher's log-probs at temperature 1 "
                f"only, and rollout.temperature is {self.rollout.temperature:g}"
            )
        if self.train.distill is not None and self.rollout.truncated:
            raise ValueError(
                "train.distill conflicts with rollout.top_p, top_k and min_p: SGLang returns a teacher's log-probs "
                "over the whole vocabulary; remove them"
            )
        return self

    @model_validator(mode="after")
    def _check_harness(self) -> RunConfig:
        harness = self.rollout.harness
        on_nodes = harness is not None and harness.location == "sandbox" and self.sandbox.placement == "ray"
        if harness is not None and on_nodes and harness.bind is None:
            raise ValueError(
                "rollout.harness.location sandbox with sandbox.placement ray: sandboxes on other nodes need the "
                "endpoint's address: set rollout.harness.bind to this machine's address in the cluster, or location to "
                "host"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> RunConfig:
        from_equal, lessons = self.train.learns_from_equal_rewards, self.train.other_lessons
        if self.rollout.dynamic_sampling.enabled and from_equal:
            key = lessons[0] if lessons else f"train.baseline {self.train.baseline}"
            raise ValueError(
                f"rollout.dynamic_sampling conflicts with {key}, which also learns from groups with equal rewards: "
                "disable dynamic_sampling, or that"
            )
        by_turn = [key for key in lessons if key != "train.distill"]
        if by_turn and self.rollout.harness is not None:
            raise ValueError(
                f"{by_turn[0]} conflicts with rollout.harness: turns and observations of an agent program are not told "
                "apart; remove one of them"
            )
        if self.train.echo is not None and self.rollout.temperature != 1.0:
            raise ValueError(
                "train.echo requires rollout.temperature 1, at which observations are predicted; it is "
                f"{self.rollout.temperature:g}"
            )
        if self.rollout.group_size == 1 and not from_equal:
            raise ValueError(
                f"rollout.group_size is 1; train.baseline {self.train.baseline} requires at least 2. Alternatively set "
                "train.baseline to critic, or to batch, and train.advantage_scale to batch"
            )
        return self

    @model_validator(mode="after")
    def _check_overlong(self) -> RunConfig:
        if self.train.overlong.buffer >= self.rollout.max_tokens:
            raise ValueError(
                f"train.overlong.buffer is {self.train.overlong.buffer}; it must be below rollout.max_tokens "
                f"({self.rollout.max_tokens})"
            )
        return self

    @model_validator(mode="after")
    def _check_async(self) -> RunConfig:
        if not self.async_rollout.depth:
            return self
        source, correction = self.train.old_logprob.source, self.train.correction
        if source == "rescore":
            raise ValueError(
                "async_rollout.depth above 0 conflicts with train.old_logprob.source rescore, which needs the weights "
                "that sampled: set source to rollout, or to recompute with train.correction"
            )
        if source == "recompute" and correction.weight is None and correction.mask is None:
            raise ValueError(
                "async_rollout.depth above 0 with train.old_logprob.source recompute requires a correction: set "
                "train.correction.weight, or source to rollout"
            )
        if self.engine.pause_mode == "retract" and self.captures_routes:
            raise ValueError(
                "async_rollout.depth above 0 and train.replay r3 conflict with engine.pause_mode retract, which "
                "recomputes routes with other weights: set pause_mode to turn"
            )
        return self

    @model_validator(mode="after")
    def _check_colocation(self) -> RunConfig:
        """Colocated engines use the GPUs of all ranks, in turn with the trainer."""
        gpus, world = self.engine.count * self.engine.gpus, self.train.parallel.world_size
        conflicts = {
            "conflicts with async_rollout.depth above 0: set it to 0": self.async_rollout.depth > 0,
            "needs GPUs, and train.device is cpu: set engine.colocate to false": self.train.device == "cpu",
            "requires the trainer on this node: remove train.ray_address": self.train.ray_address is not None,
            f"requires engine.count x engine.gpus ({gpus}) equal to train.parallel.world_size ({world})": gpus != world,
        }
        if self.engine.colocate and (messages := [message for message, conflict in conflicts.items() if conflict]):
            raise ValueError(f"engine.colocate {messages[0]}")
        return self

    @model_validator(mode="after")
    def _check_weight_sync(self) -> RunConfig:
        if self.engine.weight_sync == "delta" and self.train.lora is not None:
            raise ValueError(
                "engine.weight_sync delta conflicts with train.lora, which sends only the adapters: set weight_sync to "
                "full"
            )
        return self

    @model_validator(mode="after")
    def _check_recovery(self) -> RunConfig:
        if self.rollout.recover == "turns" and self.captures_routes and self.r3.source == "latest":
            raise ValueError(
                "rollout.recover turns requires r3.source sampled: with latest every turn would write the routes of "
                "all earlier turns again"
            )
        return self

    @model_validator(mode="after")
    def _check_ablation(self) -> RunConfig:
        """An ablation changes the rows of one rank, so nothing else may rely on complete routes."""
        parallel = self.train.parallel
        conflicts = {
            f"requires train.replay r3; it is {self.train.replay}": not self.captures_routes,
            "conflicts with train.balance, which plans with complete routes: disable it": self.train.balance.enabled,
            "conflicts with r3.trace, which verifies complete routes: remove r3.trace.steps": bool(self.r3.trace.steps),
            "requires train.parallel.tensor 1 and context 1": parallel.tensor * parallel.context > 1,
        }
        if self.r3.ablation != "none" and (messages := [text for text, conflict in conflicts.items() if conflict]):
            raise ValueError(f"r3.ablation {self.r3.ablation} {messages[0]}")
        return self

    @model_validator(mode="after")
    def _check_sft(self) -> RunConfig:
        conflicts = {
            "train.mini_steps above 1: sft.batch_rows sets the rows of an update": self.train.mini_steps > 1,
            "train.epochs above 1: use sft.epochs": self.train.epochs > 1,
            "train.kl, which needs sampled log-probs: remove it": self.train.kl.coefficient > 0,
            "train.entropy_coefficient: set it to 0": self.train.entropy_coefficient > 0,
            "train.balance, which plans from replayed routes: disable it": self.train.balance.enabled,
            "engine.urls: sft.eval_every starts its own engines": self.evaluates_sft and not self.engine.launched,
            "engine.colocate: engines of sft.eval_every need GPUs of their own": self.evaluates_sft
            and self.engine.colocate,
            "train.baseline critic, which learns from rewards: remove it": self.train.uses_critic,
        }
        if self.sft is not None and (messages := [message for message, conflict in conflicts.items() if conflict]):
            raise ValueError(f"sft conflicts with {messages[0]}")
        return self

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def environments(self) -> dict[str, TaskSource]:
        """The environments of training and evaluation by source; "" is that of the section ``env``."""
        env = self.env
        single = TaskSource(env=env.name, options=env.options, reward_weights=env.reward_weights)
        own = {} if self.train.sources else {"": single}
        return own | self.train.sources | self.eval.sources

    @property
    def evaluations(self) -> dict[str, EvalSettings]:
        """The settings of evaluation by source; "" is the environment of the section ``env``."""
        return {name: self.eval.settings_of(name) for name in self.eval.sources or self.train.sources or ("",)}

    @property
    def evaluates_sft(self) -> bool:
        """Whether `agent-rl sft` evaluates by Pass@1."""
        return self.sft is not None and self.sft.eval_every > 0

    @property
    def captures_routes(self) -> bool:
        """Whether rollouts capture routes. Only train.replay r3 needs them, and an engine that captures routes."""
        return self.train.replay == "r3"

    @property
    def routes_config(self) -> R3Config | None:
        """The section ``r3`` if rollouts capture routes, else None."""
        return self.r3 if self.captures_routes else None

    @property
    def reference_dir(self) -> Path | None:
        """The checkpoint of the KL penalty's reference model; None if there is no penalty."""
        kl = self.train.kl
        return (kl.reference or self.model) if kl.coefficient else None
