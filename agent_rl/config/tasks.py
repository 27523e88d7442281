"""The sections ``sandbox``, ``env`` and ``eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from agent_rl.config.base import Section

DEFAULT_SCAFFOLD = "agent-rl"
RewardWeights = dict[str, Annotated[float, Field(allow_inf_nan=False, ge=-1e6, le=1e6)]]
SourceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*$")]


def _check_scaffold(name: str) -> str:
    """Returns ``name`` if a scaffold has it. The default scaffold needs no import of the package envs."""
    if name == DEFAULT_SCAFFOLD:
        return name
    from envs import ScaffoldError, load_scaffold

    try:
        load_scaffold(name)
    except ScaffoldError as error:
        raise ValueError(f"env.scaffold: {error}") from None
    return name


def _check_backend(name: str) -> str:
    """Returns ``name`` if a sandbox backend has it."""
    from sandbox import BACKENDS, SandboxUnavailableError

    try:
        BACKENDS.find(name)
    except SandboxUnavailableError as error:
        raise ValueError(f"sandbox.backend: {error}") from None
    return name


class SandboxConfig(Section):
    """The sandboxes in which an agent's commands run."""

    backend: Annotated[str, AfterValidator(_check_backend)] = Field(
        "auto",
        description="auto, docker, podman, bubblewrap, modal, or a registered backend (docs/reference/sandboxes.md). "
        "auto: docker if a container engine responds, else bubblewrap.",
    )
    runtime: str | None = Field(
        None,
        description="OCI runtime of the container engine, for example runsc for gVisor. null: the engine's default.",
    )
    image: str | None = Field(None, description="Image for tasks that name none. null: the backend's default image.")
    image_root: Path | None = Field(
        None,
        description="Directory that contains the image directories of tasks; bubblewrap only. null: bubblewrap rejects "
        "tasks that name an image.",
    )
    memory_mb: int = Field(512, gt=0, description="Memory limit of one sandbox, in MiB.")
    pids: int = Field(128, gt=0, description="Process limit of one sandbox.")
    cpus: float = Field(1.0, gt=0, description="CPU limit of one sandbox, in cores.")
    disk_mb: int = Field(
        4096, gt=0, description="Disk limit of one sandbox, in MiB written. Exceeding it ends the sandbox."
    )
    inodes: int = Field(200_000, gt=0, description="Limit of files, directories and links that one sandbox may create.")
    placement: Literal["local", "ray"] = Field(
        "local",
        description="Where sandboxes run. local: on this node. ray: on the nodes of the Ray cluster "
        "(train.ray_address).",
    )
    sandboxes_per_node: int = Field(
        64, gt=0, description="Agent sandboxes per node of the Ray cluster. Grading sandboxes are not counted."
    )
    max_starts: int = Field(8, gt=0, description="Sandboxes started concurrently per node.")
    max_execs: int = Field(64, gt=0, description="Commands run concurrently in a node's sandboxes.")
    pull: bool = Field(False, description="Download missing container images.")
    image_budget_gb: float | None = Field(
        None,
        gt=0,
        description="Disk limit for downloaded images, in GB. The least recently used images are removed. null "
        "disables the limit.",
    )
    prewarmed: int = Field(
        0, ge=0, description="Idle sandboxes ready on each node, with the newest requested settings."
    )


class EnvConfig(Section):
    """The environment, which provides the tasks."""

    name: str = Field(
        "mini",
        description="A registered environment (`agent-rl envs list`), an entry point, or a path "
        "`package.module:Class`.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of the environment's constructor.")
    scaffold: Annotated[str, AfterValidator(_check_scaffold)] = Field(
        DEFAULT_SCAFFOLD,
        description="Prompt, tools and limits of the agent in the environments swe and mini: agent-rl, r2egym, "
        "mini-swe-agent, openhands, or a registered scaffold (docs/reference/tools.md). It sets the keys of rollout "
        "that the config omits.",
    )
    tool_style: Literal["full", "concise"] = Field(
        "full", description="Length of prompts and tool results. concise: short, for models with a short context."
    )
    start_timeout: float = Field(
        600.0,
        gt=0,
        description="Timeout of starting a task, in seconds. Time in the queue and image pulls are not counted.",
    )
    grade_timeout: float = Field(300.0, gt=0, description="Timeout of one run of the hidden tests, in seconds.")
    reward_weights: RewardWeights = Field(
        default_factory=dict,
        description="Weights of the named parts of a grade. The reward is their weighted sum. Empty: the environment's "
        "reward.",
    )
    quarantine: Path | None = Field(
        None, description="File with tasks to skip, from `agent-rl doctor`. null: skip none."
    )

    @property
    def grading_timeout(self) -> float:
        """Timeout of a whole grading, in seconds: up to eight commands of a grading, each in a new sandbox.

        They are a run of the hidden tests, and for a success the reading of the tests, a traced run and line-ups of the
        tests, with the agent's patch and with the reference fix.
        """
        return 8 * (self.start_timeout + self.grade_timeout)


class TaskSource(Section):
    """An environment that provides tasks beside others. The other keys of the section `env` hold for all of them."""

    env: str = Field(..., description="Name of the environment, as in `env.name`.")
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of its constructor.")
    grade_timeout: float | None = Field(None, gt=0, description="As `env.grade_timeout`, its value where null.")
    reward_weights: RewardWeights = Field(
        default_factory=dict, description="As `env.reward_weights`, for the tasks of this source."
    )


class TrainSource(TaskSource):
    """An environment to train on beside others."""

    split: str = Field("train", description="Split of the environment.")
    weight: float = Field(1.0, gt=0, description="Share of the drawn tasks, relative to the other sources.")


class EvalSource(TaskSource):
    """An environment to evaluate on beside others. A null key takes the value of the section `eval`."""

    split: str | None = Field(None, description="Split of the environment.")
    tasks: int | None = Field(None, ge=0, description="Number of tasks. 0 disables the evaluation on this source.")
    every: int | None = Field(None, ge=0, description="Steps between evaluations.")
    greedy: bool | None = Field(None, description="Whether greedy decoding is evaluated too.")
    samples: int | None = Field(None, gt=0, description="Sampled episodes per task.")
    temperature: float | None = Field(None, gt=0, description="Sampling temperature.")


class EvalSettings(Section):
    """How often an environment is evaluated, on which tasks, and how."""

    tasks: int = Field(256, ge=0, description="Number of held-out tasks. 0 disables evaluation.")
    every: int = Field(0, ge=0, description="Steps between evaluations. 0: only before and after training.")
    greedy: bool = Field(True, description="Also evaluate with greedy decoding before and after training.")
    split: str = Field("heldout", description="Split of the environment to evaluate on.")
    samples: int = Field(1, gt=0, description="Sampled episodes per task. Greedy decoding takes one.")
    temperature: float | None = Field(
        None, gt=0, description="Sampling temperature of evaluations. null: that of `rollout`."
    )


class EvalConfig(EvalSettings):
    """Evaluation on held-out tasks before, during and after training."""

    sources: dict[SourceName, EvalSource] = Field(
        default_factory=dict,
        description="Environments to evaluate on, by name. Empty: the environments of training (docs/how-to/train.md).",
    )

    def settings_of(self, name: str) -> EvalSettings:
        """The settings of the source ``name``: its own keys, and those of this section where it has none."""
        common = {key: getattr(self, key) for key in EvalSettings.model_fields}
        source = self.sources.get(name)
        own = {} if source is None else source.model_dump(exclude=set(TaskSource.model_fields), exclude_none=True)
        return EvalSettings(**common | own)
