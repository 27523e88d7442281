"""The sections ``rollout`` and ``async_rollout``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agent_rl.config.base import MAX_STALENESS, OFF, ON, Section, registered_name
from tools import ToolFormatError, tool_format

MAX_TOP_K = 4000
"""SGLang returns at most 4096 kept tokens (--sampling-mask-max-tokens); ties at the limit may exceed top_k."""

ToolFormat = Annotated[str, registered_name("rollout.tool_format", tool_format, ToolFormatError)]


class DynamicSamplingConfig(Section):
    """Dynamic sampling of DAPO (arXiv 2503.14476): a step discards groups whose rewards are all equal and draws further
    tasks until it has `tasks_per_step` groups."""

    enabled: bool = Field(False, description="Discard groups with equal rewards and draw further tasks.")
    max_draws: int = Field(4, gt=0, description="Upper limit of tasks drawn per step, as a multiple of tasks_per_step.")
    when_short: Literal["train", "stop"] = Field(
        "train",
        description="Action if a step has too few groups at that limit. train: use the groups it has. stop: end the "
        "run.",
    )


class TrainIfConfig(Section):
    """Which replies to an agent program are trained. The others are recorded and shown with the rule."""

    requests: Literal["main", "with-tools", "all"] = Field(
        "main",
        description="main: all but side requests, which have no tools and no earlier reply while other requests of the "
        "episode have tools (titles, topics). with-tools: only requests that offer tools. all: any.",
    )
    models: tuple[str, ...] | None = Field(
        None, description="Only requests that name one of these models, for example [agent-rl]. null: any model."
    )
    branches: Literal["all", "first"] = Field(
        "all", description="first: only the first branch, without sub-agents and without what follows a compaction."
    )


class HarnessConfig(Section):
    """An agent program that drives the episodes through agent-rl's HTTP endpoint; see docs/how-to/agent-programs.md."""

    command: str = Field(..., description="Shell command of each episode. Its stdin is the task's text.", min_length=1)
    location: Literal["sandbox", "host"] = Field(
        "sandbox",
        description="Where the program runs. sandbox: in the task's sandbox. host: on this node; its tool calls run in "
        "the sandbox.",
    )
    directory: Path | None = Field(
        None,
        description="Directory with the program's files. The sandbox sees it read-only at /opt/agent-rl/harness. null: "
        "no directory.",
    )
    dialects: tuple[Literal["chat", "responses", "messages"], ...] = Field(
        ("chat", "responses", "messages"),
        description="APIs to serve. chat: OpenAI Chat Completions. responses: OpenAI Responses. messages: Anthropic "
        "Messages.",
    )
    history: Literal["keep", "follow"] = Field(
        "keep",
        description="Handling of earlier thinking text after a user message. keep: keep it. follow: render the "
        "conversation as the chat template does, which may drop it and start a new branch.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Additional environment variables of the program.")
    bind: str | None = Field(
        None,
        description="Address of this machine in the cluster, where the endpoint listens too, for programs in "
        "sandboxes on other nodes (sandbox.placement ray). null: loopback only.",
    )
    train_if: TrainIfConfig = Field(TrainIfConfig(), description="Which replies are trained.")


class CompactionConfig(Section):
    """Compaction: a conversation that grows too long is summarized by the policy and goes on with the summary; see
    docs/how-to/train.md."""

    at_tokens: int = Field(
        ...,
        gt=0,
        description="Tokens beyond which a conversation is compacted. A turn and the summary must fit after them: at "
        "most max_tokens - 2 x max_new_tokens - the tokens of prompt.",
    )
    prompt: str = Field(
        "The conversation is shortened now. Write a summary of the work so far for yourself: what was found, what was "
        "changed, and what is left to do. Call no tool. The last turns and the result of your last call will follow.",
        min_length=1,
        description="The user message that asks for the summary.",
    )
    keep_turns: int = Field(
        2, gt=0, description="Last turns that are kept after the summary; fewer if they exceed at_tokens."
    )
    max_per_episode: int = Field(
        8, gt=0, description="Maximum compactions per episode. After them a full context ends the episode."
    )
    train_summary: bool = Field(True, description="Train the summaries' tokens. false is for comparisons only.")


class SubagentsConfig(Section):
    """Sub-agents: the tool `task` gives a part of the work to the same policy in a context of its own; see
    docs/how-to/train.md."""

    max_turns: int = Field(10, gt=0, description="Maximum turns of a sub-agent. They count towards rollout.max_turns.")
    max_tokens: int = Field(16384, gt=0, description="Maximum tokens of a sub-agent's conversation.")
    prompt: str = Field(
        "You help another agent with a part of its work. When you are done, answer in words without a call.",
        description="Stands before the task in a sub-agent's first message.",
    )
    max_per_episode: int = Field(4, gt=0, description="Maximum sub-agents per episode.")


class RolloutConfig(Section):
    """Sampling of episodes."""

    group_size: int = Field(8, gt=0, description="Trajectories per task (n).")
    tasks_per_step: int = Field(8, gt=0, description="Tasks per global step.")
    concurrency: int = Field(64, gt=0, description="Maximum number of concurrent episodes.")
    max_turns: int = Field(50, gt=0, description="Maximum turns per episode.")
    max_tokens: int = Field(
        65536,
        gt=0,
        description="Maximum tokens per trajectory, with prompts and observations; with compaction, per branch.",
    )
    max_new_tokens: int = Field(4096, gt=0, description="Maximum sampled tokens per turn.")
    temperature: float = Field(1.0, ge=0, description="Sampling temperature. 0: greedy decoding.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling threshold: draw from the likeliest tokens with this probability in total. The "
        "trainer normalizes over the same tokens (docs/how-to/train.md).",
    )
    top_k: int | None = Field(
        None, ge=1, le=MAX_TOP_K, description="Draw from this many likeliest tokens only. null: no such limit."
    )
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Draw no token less probable than this share of the likeliest token's probability."
    )
    tool_format: ToolFormat | None = Field(
        "hermes",
        description="Text format of tool calls: hermes, qwen3-coder, glm or another registered format "
        "(docs/reference/tools.md). null: the format of the model's family; hermes without a model.",
    )
    thinking: Annotated[Literal["default", "on", "off"], OFF, ON] = Field(
        "default",
        description="Whether the model thinks before it acts. default: as its chat template does. on, off: set the "
        "template's switch; refused for a template without one (docs/how-to/thinking-models.md).",
    )
    max_thinking_tokens: int | None = Field(
        None,
        ge=0,
        description="Maximum tokens sampled in the thoughts of one turn. Thoughts that are open then are closed and "
        "the turn goes on; the closing tokens are not trained (docs/how-to/thinking-models.md). null: no limit.",
    )
    template_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template, for example {reasoning_effort: low}. Unknown ones are refused.",
    )
    describe_tools: bool = Field(
        True,
        description="Describe the tools in the initial prompt. Set false for a model that was trained on these tools.",
    )
    tool_timeout: float = Field(90.0, gt=0, description="Timeout of one tool call, in seconds.")
    time_limit: float = Field(3600.0, gt=0, description="Time limit of one episode, in seconds.")
    max_parse_failures: int | None = Field(
        3,
        gt=0,
        description="Consecutive turns without a well-formed tool call that end an episode. null disables the limit.",
    )
    sandbox_retries: int = Field(
        3, ge=0, description="Episodes per group that may be run again after an infrastructure failure."
    )
    recover: Annotated[Literal["off", "turns"], OFF] = Field(
        "off",
        description="Recovery of episodes interrupted by a kill or the loss of a sandbox node. off: start them again. "
        "turns: resume after the last complete turn by repeating its tool calls in a new sandbox "
        "(docs/how-to/async.md).",
    )
    dynamic_sampling: DynamicSamplingConfig = Field(
        DynamicSamplingConfig(), description="Discard groups whose rewards are all equal (DAPO)."
    )
    harness: HarnessConfig | None = Field(None, description="Agent program of the episodes. null: built-in agent loop.")
    compaction: CompactionConfig | None = Field(
        None, description="Summaries by the policy in place of a full context. null: a full context ends the episode."
    )
    subagents: SubagentsConfig | None = Field(None, description="The tool task of the built-in agent loop. null: none.")

    @property
    def truncated(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary. Greedy decoding is not: see logprob_temperature."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k is not None or self.min_p > 0)

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the compared log-probs. Greedy decoding (0) returns log-probs at temperature 1."""
        return self.temperature or 1.0

    @property
    def tokens_per_trajectory(self) -> int:
        """The most tokens of a trajectory, over all its branches."""
        compaction, subagents = self.compaction, self.subagents
        own = self.max_tokens * (1 if compaction is None else 1 + compaction.max_per_episode)
        return own + (0 if subagents is None else subagents.max_tokens * subagents.max_per_episode)

    @model_validator(mode="after")
    def _check_branches(self) -> RolloutConfig:
        for key in ("compaction", "subagents"):
            if self.harness is not None and getattr(self, key) is not None:
                raise ValueError(
                    f"rollout.{key} is for the built-in loop, and an agent program (rollout.harness) has its own: "
                    "remove one of the two"
                )
        if self.subagents is not None and self.subagents.max_tokens > self.max_tokens:
            raise ValueError(
                f"rollout.subagents.max_tokens is {self.subagents.max_tokens}; it must be at most rollout.max_tokens "
                f"({self.max_tokens})"
            )
        if self.compaction is None:
            return self
        most = self.max_tokens - 2 * self.max_new_tokens - 1
        if self.compaction.at_tokens > most:
            raise ValueError(
                f"rollout.compaction.at_tokens is {self.compaction.at_tokens}; it must be at most {most}, so that a "
                f"turn and a summary of rollout.max_new_tokens ({self.max_new_tokens}) fit into rollout.max_tokens "
                f"({self.max_tokens})"
            )
        return self

    @model_validator(mode="after")
    def _check_thinking(self) -> RolloutConfig:
        if self.max_thinking_tokens is not None and self.max_thinking_tokens >= self.max_new_tokens:
            raise ValueError(
                f"rollout.max_thinking_tokens is {self.max_thinking_tokens}; it must be below rollout.max_new_tokens "
                f"({self.max_new_tokens}), so that a turn can go on after its thoughts"
            )
        return self

    @model_validator(mode="after")
    def _check_recovery(self) -> RolloutConfig:
        if self.recover == "turns" and self.harness is not None:
            raise ValueError(
                "rollout.recover turns cannot restore the state of an agent program (rollout.harness): "
                "set rollout.recover to off"
            )
        return self


class AsyncRolloutConfig(Section):
    """Asynchronous training: rollouts run while the trainer updates the weights."""

    depth: int = Field(
        0, ge=0, le=MAX_STALENESS, description="Batches that rollout may be ahead of training. 0: synchronous training."
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        le=MAX_STALENESS,
        description="Maximum age of a trained token's weights, in weight updates. Values above depth let finished "
        "groups overtake slow ones. null: equal to depth.",
    )

    @property
    def staleness(self) -> int:
        """The effective ``max_staleness``."""
        return self.depth if self.max_staleness is None else self.max_staleness

    @model_validator(mode="after")
    def _check_staleness(self) -> AsyncRolloutConfig:
        if self.staleness < self.depth or (self.staleness and not self.depth):
            raise ValueError(
                f"async_rollout.max_staleness is {self.staleness}; it must be at least async_rollout.depth "
                f"({self.depth}), and 0 if depth is 0"
            )
        return self
