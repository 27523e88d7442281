"""A whole config, and what must hold between its sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_rl.config.base import Section
from agent_rl.config.engine import EngineConfig
from agent_rl.config.r3 import R3Config
from agent_rl.config.rollout import AsyncRolloutConfig, RolloutConfig
from agent_rl.config.tasks import OWN_SCAFFOLD, EnvConfig, EvalConfig, SandboxConfig
from agent_rl.config.train import TrainConfig
from agent_rl.config.watch import GuardConfig, MonitoringConfig

GpuName = Literal["A100 SXM", "H100 SXM", "H200 SXM", "B200 SXM"]


class HardwareConfig(Section):
    """The machines a run is meant for. Nothing but `agent-rl plan` and `agent-rl dry-run` reads it; sizes in GiB."""

    gpu: GpuName = Field("H100 SXM", description="The GPU whose speed `agent-rl dry-run` reckons with.")

    gpu_memory_gb: float | None = Field(None, gt=0, description="Memory of a GPU; None plans for CPU ranks, or device.")
    gpus_per_node: int = Field(8, gt=0, description="GPUs of a host.")
    trainer_nodes: int | None = Field(None, gt=0, description="Hosts for trainer ranks; None: as many as they fill.")
    host_memory_gb: float | None = Field(None, gt=0, description="Memory of a host; None: this machine's.")
    disk_gb: float | None = Field(None, gt=0, description="Room for runs_dir; None: what is free where it is.")


class RunConfig(Section):
    """A whole config file."""

    name: str = Field(..., pattern=r"^[\w.-]+$", description="The run's name; its directory is runs/<name>.")
    runs_dir: Path = Field(Path("runs"), description="Where run directories go.")
    seed: int = Field(0, ge=0)
    model: Path = Field(
        ...,
        description="What to start from: the directory of a Hugging Face checkpoint, an id on the hub (OWNER/NAME, or "
        "OWNER/NAME@REVISION), or tiny-moe or paper-moe, which are shipped.",
    )
    engine: EngineConfig = EngineConfig()
    sandbox: SandboxConfig = SandboxConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    r3: R3Config = R3Config()
    guard: GuardConfig = GuardConfig()
    async_rollout: AsyncRolloutConfig = AsyncRolloutConfig()
    eval: EvalConfig = EvalConfig()
    monitoring: MonitoringConfig = MonitoringConfig()
    hardware: HardwareConfig = HardwareConfig()

    @model_validator(mode="before")
    @classmethod
    def _with_scaffold_defaults(cls, data: Any) -> Any:
        """``data`` with the keys of ``rollout`` that its interface decides and that it leaves out."""
        env, rollout = (data.get("env") or {}, data.get("rollout") or {}) if isinstance(data, dict) else (None, None)
        if not isinstance(env, dict) or not isinstance(rollout, dict):
            return data
        name = env.get("scaffold", OWN_SCAFFOLD)
        if name == OWN_SCAFFOLD or not isinstance(name, str):
            return data
        from envs import ScaffoldError, find_scaffold

        try:
            scaffold = find_scaffold(name)
        except ScaffoldError:
            return data  # the section env refuses it, with the key's name
        return {**data, "rollout": {**scaffold.defaults, **scaffold.fixed, **rollout}}

    @model_validator(mode="after")
    def _check_scaffold(self) -> RunConfig:
        if self.env.scaffold == OWN_SCAFFOLD:
            return self
        from envs import find_scaffold

        for key, value in find_scaffold(self.env.scaffold).fixed.items():
            if getattr(self.rollout, key) != value:
                raise ValueError(
                    f"rollout.{key} is {getattr(self.rollout, key)} and env.scaffold {self.env.scaffold} has "
                    f"{value}: leave rollout.{key} out"
                )
        if self.env.tool_style != "full":
            raise ValueError(
                f"env.tool_style {self.env.tool_style} is of the interface {OWN_SCAFFOLD}: leave it out with "
                f"env.scaffold {self.env.scaffold}"
            )
        return self

    @model_validator(mode="after")
    def _can_be_rescored(self) -> RunConfig:
        if self.train.old_logprob.source == "rescore" and self.rollout.temperature not in (0.0, 1.0):
            raise ValueError(
                "train.old_logprob.source rescore: SGLang gives a prompt's log-probs at temperature 1 whatever is "
                f"asked, and rollout.temperature is {self.rollout.temperature:g}: set it to 1, or take recompute or "
                "rollout"
            )
        return self

    @model_validator(mode="after")
    def _reaches_the_endpoint(self) -> RunConfig:
        harness = self.rollout.harness
        if harness is not None and harness.location == "sandbox" and self.sandbox.placement == "ray":
            raise ValueError(
                "rollout.harness.location sandbox and sandbox.placement ray: sandboxes on other machines do not "
                "reach the "
                "endpoint; "
                "set location to host, or placement to local"
            )
        return self

    @model_validator(mode="after")
    def _groups_teach(self) -> RunConfig:
        by_batch = self.train.baseline == "batch"
        if self.rollout.dynamic_sampling.enabled and by_batch:
            raise ValueError(
                "rollout.dynamic_sampling throws away groups whose rewards are all equal, which teach under "
                "train.baseline batch: turn it off, or set baseline to mean"
            )
        if self.rollout.group_size == 1 and not by_batch:
            raise ValueError(
                f"rollout.group_size is 1 and train.baseline {self.train.baseline} compares within a group: set it to "
                "2 or more, or baseline and advantage_scale to batch"
            )
        return self

    @model_validator(mode="after")
    def _leaves_room_before_the_penalty(self) -> RunConfig:
        if self.train.overlong.buffer >= self.rollout.max_tokens:
            raise ValueError(
                f"train.overlong.buffer is {self.train.overlong.buffer} and rollout.max_tokens "
                f"{self.rollout.max_tokens}: every trajectory would be punished; take a smaller buffer"
            )
        return self

    @model_validator(mode="after")
    def _corrects_what_is_stale(self) -> RunConfig:
        if not self.async_rollout.depth:
            return self
        source, correction = self.train.old_logprob.source, self.train.correction
        if source == "rescore":
            raise ValueError(
                "async_rollout.depth is above 0 and train.old_logprob.source rescore: the weights that sampled are "
                "gone "
                "when the engine is asked again; take rollout, or recompute with a train.correction"
            )
        if source == "recompute" and correction.weight is None and correction.mask is None:
            raise ValueError(
                "async_rollout.depth is above 0 and train.old_logprob.source recompute without a train.correction: the "
                "loss would take old weights' tokens for the present ones'; set train.correction.weight, or source to "
                "rollout"
            )
        if self.engine.pause_mode == "retract" and self.wants_routes:
            raise ValueError(
                "async_rollout.depth is above 0, train.replay r3 and engine.pause_mode retract: the routes of running "
                "requests would be computed again by other weights; take pause_mode turn"
            )
        return self

    @model_validator(mode="after")
    def _shares_its_gpus(self) -> RunConfig:
        """Colocated engines have the GPUs of all ranks, and engine and trainer never work at once."""
        held, world = self.engine.count * self.engine.gpus, self.train.parallel.world_size
        reasons = {
            "async_rollout.depth is above 0, where sampling goes on beside training: set it to "
            "0": self.async_rollout.depth > 0,
            "train.device is cpu: turn it off": self.train.device == "cpu",
            "train.ray_address may lead to other machines: leave it out": self.train.ray_address is not None,
            f"engine.count times engine.gpus is {held} and train.parallel.world_size {world}: make them equal": held
            != world,
        }
        if self.engine.colocate and (wrong := [reason for reason, holds in reasons.items() if holds]):
            raise ValueError(f"engine.colocate lets engine and trainer have the same GPUs in turn, and {wrong[0]}")
        return self

    @model_validator(mode="after")
    def _keeps_the_rows_of_turns(self) -> RunConfig:
        if self.rollout.recover == "turns" and self.wants_routes and self.r3.source == "latest":
            raise ValueError(
                "rollout.recover turns and r3.source latest: every turn would write the routes of all before it again; "
                "take r3.source sampled"
            )
        return self

    @model_validator(mode="after")
    def _ablates_what_is_replayed(self) -> RunConfig:
        """An ablation works on a rank's own rows, and nothing else may count on routes as they were."""
        parallel = self.train.parallel
        reasons = {
            f"train.replay {self.train.replay} replays no routes of the rollout: set it to r3": not self.wants_routes,
            "train.balance plans by the routes as they were: turn it off": self.train.balance.enabled,
            "r3.trace would prove that every route arrived: leave its steps out": bool(self.r3.trace.steps),
            "train.parallel cuts sequences over ranks: set tensor and context to 1": parallel.tensor * parallel.context
            > 1,
        }
        if self.r3.ablation != "none" and (wrong := [reason for reason, holds in reasons.items() if holds]):
            raise ValueError(f"r3.ablation {self.r3.ablation} is an experiment on replayed routes, and {wrong[0]}")
        return self

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def wants_routes(self) -> bool:
        """Whether a rollout brings its routes: only what replays the rollout's asks for them, and needs an engine that
        captures."""
        return self.train.replay == "r3"

    @property
    def reference_dir(self) -> Path | None:
        """The checkpoint of the KL penalty's reference model; None without a penalty."""
        kl = self.train.kl
        return (kl.reference or self.model) if kl.coefficient else None
