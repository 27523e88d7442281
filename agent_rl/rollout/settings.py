"""How episodes are driven: the limits and the sampling, frozen, apart from where they were configured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from agent_rl.config import RunConfig
from agent_rl.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """The limits of one episode. Times are in seconds, ``max_tokens`` counts prompt, sampled and observation tokens.

    ``describe_tools`` tells the agent its tools in the opening prompt; off for models trained on these very tools.
    ``routes`` asks the engine for every token's routes; off for dense models and for evaluation. ``source`` says which
    are kept (the ``sampled`` ones, or the ``latest`` prefill's); ``allow_missing`` goes on where an answer has none.
    ``start_timeout`` and ``grade_timeout`` bound waits that ``time_limit`` doesn't cover, since starting and grading
    are the infrastructure's work: passing them is an infrastructure failure, not an ending of the policy's.
    """

    max_turns: int = 50
    max_tokens: int = 65536
    max_new_tokens: int = 4096
    temperature: float = 1.0
    top_p: float = 1.0
    time_limit: float = 3600.0
    max_parse_failures: int = 3
    describe_tools: bool = True
    routes: bool = True
    source: Literal["sampled", "latest"] = "sampled"
    allow_missing: bool = False
    start_timeout: float = 600.0
    grade_timeout: float = 900.0

    @classmethod
    def from_config(cls, config: RunConfig) -> RolloutSettings:
        """What ``rollout`` and ``r3`` of a config say."""
        rollout = config.rollout
        return cls(
            max_turns=rollout.max_turns,
            max_tokens=rollout.max_tokens,
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            time_limit=rollout.time_limit,
            max_parse_failures=rollout.max_parse_failures,
            describe_tools=rollout.describe_tools,
            source=config.r3.source,
            allow_missing=config.r3.missing != "error",
        )

    def for_evaluation(self, *, greedy: bool) -> RolloutSettings:
        """The same limits without routes; ``greedy`` also sets the temperature to 0."""
        return replace(self, routes=False, temperature=0.0 if greedy else self.temperature)

    def sampling(self, room: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        """How the next turn is sampled where ``room`` tokens are left in the context."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_new_tokens=min(self.max_new_tokens, room),
            stop_token_ids=stop_token_ids,
        )
