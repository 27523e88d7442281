"""The sections ``sandbox``, ``env`` and ``eval``: where tasks are worked on, and which."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from agent_rl.config.base import Section

OWN_SCAFFOLD = "agent-rl"


def _scaffold(name: str) -> str:
    """``name``, if it is an interface's. The usual one is known without a look at the environments' package."""
    if name == OWN_SCAFFOLD:
        return name
    from envs import ScaffoldError, find_scaffold

    try:
        find_scaffold(name)
    except ScaffoldError as error:
        raise ValueError(f"env.scaffold: {error}") from None
    return name


def _sandbox_backend(name: str) -> str:
    """``name``, if it is a sandbox backend's."""
    from sandbox import BACKENDS, SandboxUnavailableError

    try:
        BACKENDS.find(name)
    except SandboxUnavailableError as error:
        raise ValueError(f"sandbox.backend: {error}") from None
    return name


class SandboxConfig(Section):
    """Where the agent's commands run."""

    backend: Annotated[str, AfterValidator(_sandbox_backend)] = Field(
        "auto",
        description="auto, docker, podman, bubblewrap, or one of your own (docs/sandboxes.md). auto takes docker where "
        "an engine answers, bubblewrap where none does.",
    )
    runtime: str | None = Field(
        None,
        description="What the container engine starts sandboxes with: runsc for gVisor, where the engine knows it; "
        "None "
        "takes the engine's default.",
    )
    image: str | None = Field(None, description="Image for tasks that name none; None takes the backend's default.")
    image_root: Path | None = Field(
        None,
        description="Directory below which the images that tasks name must lie under bubblewrap, where an image is a "
        "directory of this machine. None: tasks with images of their own are refused there.",
    )
    memory_mb: int = Field(512, gt=0, description="Memory limit of one sandbox.")
    pids: int = Field(128, gt=0, description="Process limit of one sandbox.")
    cpus: float = Field(1.0, gt=0, description="CPU limit of one sandbox.")
    disk_mb: int = Field(4096, gt=0, description="Disk in MiB by which one sandbox may grow, or it is ended.")
    inodes: int = Field(200_000, gt=0, description="Files, directories and links by which one sandbox may grow.")
    placement: Literal["local", "ray"] = Field(
        "local",
        description="Which machines sandboxes are on: this one, or the nodes of the Ray cluster (train.ray_address).",
    )
    sandboxes_per_node: int = Field(
        64, gt=0, description="Sandboxes on one host of the Ray cluster; those that grade an episode come on top."
    )
    max_starts: int = Field(8, gt=0, description="Sandboxes being started on a host at once.")
    max_execs: int = Field(64, gt=0, description="Commands running in a host's sandboxes at once.")
    pull: bool = Field(False, description="Fetch container images that are not on the machine.")
    image_budget_gb: float | None = Field(
        None, gt=0, description="Disk for fetched images, in GB; those used longest ago are removed. None: no limit."
    )
    prewarmed: int = Field(0, ge=0, description="Idle sandboxes that a host keeps ready, like those asked for lately.")


class EnvConfig(Section):
    """Which tasks. ``name`` is a registered environment, an entry point or a dotted path ``package.module:Class``."""

    name: str = Field("mini", description="The environment.")
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of the environment's constructor.")
    scaffold: Annotated[str, AfterValidator(_scaffold)] = Field(
        OWN_SCAFFOLD,
        description="How agents meet the tasks of swe and mini: agent-rl, r2egym, mini-swe-agent, openhands, or one of "
        "your own (docs/interfaces.md). It decides keys of rollout that the config leaves out.",
    )
    tool_style: Literal["full", "concise"] = Field(
        "full", description="concise shortens prompts and tool answers for models with a short context."
    )
    start_timeout: float = Field(
        600.0, gt=0, description="Seconds a task may take to start, beside waits for its turn and for image pulls."
    )
    grade_timeout: float = Field(300.0, gt=0, description="Seconds one run of the hidden tests may take.")
    quarantine: Path | None = Field(None, description="File of tasks to leave out, as `agent-rl doctor` writes it.")

    @property
    def grading_limit(self) -> float:
        """Seconds a whole grading may take: the hidden tests run twice at most (with the agent's patch, and with the
        true fix to compare with), each time in a sandbox that is started for it."""
        return 2 * (self.start_timeout + self.grade_timeout)


class EvalConfig(Section):
    """Evaluation on held-out tasks before and after training, and every so many steps."""

    tasks: int = Field(256, ge=0, description="Held-out tasks; 0 turns evaluation off.")
    every: int = Field(0, ge=0, description="Steps between evaluations; 0 only before and after.")
    greedy: bool = Field(True, description="Also evaluate with greedy decoding, before and after.")
    split: str = Field("heldout", description="The environment's split to evaluate on.")
