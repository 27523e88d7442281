"""The sections ``rollout`` and ``pipeline``: how episodes are driven, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agent_rl.config.base import MAX_STALENESS, OFF, Section, registered
from tools import ToolFormatError, tool_format

ToolFormat = Annotated[str, registered("rollout.tool_format", tool_format, ToolFormatError)]


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476): groups whose rewards are all equal are thrown away, and further tasks
    drawn until a step has its ``tasks_per_step`` groups."""

    enabled: bool = Field(False, description="Draw a further task for every group that teaches nothing.")
    max_draws: int = Field(4, gt=0, description="Tasks drawn for a step at most, in multiples of tasks_per_step.")
    when_short: Literal["train", "stop"] = Field(
        "train", description="A step that still lacks groups then: train on those it has, or end the run."
    )


class HarnessConfig(Section):
    """An agent program that drives the episodes, over the endpoint that serves it; see docs/harness.md."""

    command: str = Field(
        ..., description="What bash runs for an episode; its standard input is the task's text.", min_length=1
    )
    location: Literal["sandbox", "host"] = Field(
        "sandbox",
        description="Where it runs: in the task's sandbox, or on this machine, its tools' calls in the sandbox.",
    )
    directory: Path | None = Field(
        None, description="Directory that the sandbox sees read-only as /opt/agent-rl/harness: the program's own files."
    )
    dialects: tuple[Literal["chat", "responses", "messages"], ...] = Field(
        ("chat", "responses", "messages"), description="The APIs served: OpenAI's two, and Anthropic's Messages."
    )
    history: Literal["keep", "follow"] = Field(
        "keep",
        description="After a user's message: keep the thoughts of turns before, or render the conversation again as "
        "the chat template does, which may drop them and begin a branch.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Further environment variables of the program.")


class RolloutConfig(Section):
    """How episodes are driven."""

    group_size: int = Field(8, gt=0, description="Trajectories a task (n).")
    tasks_per_step: int = Field(8, gt=0, description="Tasks a global step.")
    concurrency: int = Field(64, gt=0, description="Episodes in flight at once.")
    max_turns: int = Field(50, gt=0, description="Turns an episode may take.")
    max_tokens: int = Field(65536, gt=0, description="Tokens a trajectory may hold.")
    max_new_tokens: int = Field(4096, gt=0, description="Tokens one turn may sample.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; below 1 the log-probs are not renormalized.")
    tool_format: ToolFormat = Field(
        "hermes",
        description="Text format of tool calls: hermes, xml, or one of your own (docs/tools.md).",
    )
    describe_tools: bool = Field(
        True, description="Tell the agent its tools in the opening prompt; off for a model trained on these very tools."
    )
    tool_timeout: float = Field(90.0, gt=0, description="Seconds one tool call may take.")
    time_limit: float = Field(3600.0, gt=0, description="Seconds one episode may take.")
    max_parse_failures: int | None = Field(
        3, gt=0, description="Turns in a row without a well-formed call that end an episode; None: no number does."
    )
    sandbox_retries: int = Field(
        3, ge=0, description="Episodes of a group that may be run again after an infrastructure failure."
    )
    recover: Annotated[Literal["off", "turns"], OFF] = Field(
        "off",
        description="Episodes that a kill or the loss of a sandbox host interrupts: begun anew, or gone on with from "
        "their last whole turn, by calling their tools again in a new sandbox (docs/async.md).",
    )
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    harness: HarnessConfig | None = Field(None, description="An agent program in place of the built-in loop.")

    @property
    def logprob_temperature(self) -> float:
        """The temperature that log-probs are compared at; those of a greedy rollout (0) are the raw ones, of 1."""
        return self.temperature or 1.0

    @model_validator(mode="after")
    def _can_recover(self) -> RolloutConfig:
        if self.recover == "turns" and self.harness is not None:
            raise ValueError(
                "rollout.recover turns and rollout.harness: what an agent program holds in its memory can't be brought "
                "back; set recover to off"
            )
        return self


class AsyncRolloutConfig(Section):
    """Sampling beside training."""

    depth: int = Field(
        0,
        ge=0,
        le=MAX_STALENESS,
        description="Batches that sampling may run ahead of training; 0: a step samples, then trains.",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        le=MAX_STALENESS,
        description="Updates by which a trained token's weights may be older than those before its step; beyond depth, "
        "younger groups may overtake slow ones. None: as many as depth.",
    )

    @property
    def staleness(self) -> int:
        """The bound that holds."""
        return self.depth if self.max_staleness is None else self.max_staleness

    @model_validator(mode="after")
    def _makes_sense(self) -> AsyncRolloutConfig:
        if self.staleness < self.depth or (self.staleness and not self.depth):
            raise ValueError(
                f"async_rollout.max_staleness is {self.staleness} and async_rollout.depth {self.depth}: it is depth "
                "or more, and "
                "0 where depth is 0"
            )
        return self
