"""The branches of an episode of the built-in loop, and how a compaction begins one (``rollout.compaction``).

Once a conversation passes ``at_tokens``, the policy writes a summary as the last turn of its branch. A new branch
begins with the summary and the last turns. Example with ``keep_turns: 1`` (``t`` turns, ``o`` observations)::

    branch 0   system, task            t1 o1 t2 o2 t3   request, summary
    branch 1   system, task + summary              t3 o3   t4 o4 t5

The request takes the place of the last observation, so that it fits however long the observation is. The kept turns
have the tokens that were sampled; they are trained in branch 0 and are context in branch 1. The rows of routes of each
branch are those that the engine used for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agent_rl.config import CompactionConfig, RolloutConfig
from agent_rl.errors import ConfigError
from agent_rl.render.prefix_check import Role
from agent_rl.rollout.initial_prompt import Renderer
from agent_rl.rollout.transcript import Transcript
from agent_rl.types import Branch, BranchCause, SampledCall

Message = Mapping[str, str]
Prompt = tuple[list[Message], list[int]]
SUMMARY = "Summary of the work so far:"
"""Stands before the summary, at the end of the new branch's task."""


class Observation(NamedTuple):
    """The ``text`` after a turn that ended with the token ``stop`` (None: at its limit) and made ``call``. ``role``
    None: that of a tool's result."""

    text: str
    role: Role | None
    stop: int | None
    call: SampledCall | None


class TurnStart(NamedTuple):
    """Where a turn begins: its ``number`` in the episode, its first token, and its message."""

    number: int
    token: int
    message: int

    def moved(self, tokens: int, messages: int) -> TurnStart:
        return TurnStart(self.number, self.token + tokens, self.message + messages)


class KeptTurns(NamedTuple):
    """The last turns of a branch. ``starts`` are counted from the first of ``tokens`` and ``messages``."""

    starts: Sequence[TurnStart]
    tokens: Sequence[int]
    messages: Sequence[Message]


def check_compaction(rollout: RolloutConfig, compaction: CompactionConfig, renderer: Renderer) -> None:
    """Raises ConfigError where the request for a summary does not fit after ``at_tokens`` and a turn, TemplateError
    where the chat template cannot append it."""
    request = len(renderer.observation(compaction.prompt, "user", stop=None))
    most = rollout.max_tokens - 2 * rollout.max_new_tokens - request - 1
    if compaction.at_tokens > most:
        raise ConfigError(
            f"rollout.compaction.at_tokens is {compaction.at_tokens} and its prompt has {request} tokens: lower "
            f"at_tokens to {most}, or raise rollout.max_tokens ({rollout.max_tokens})"
        )


@dataclass(eq=False)
class OpenBranch:
    """A branch of a running episode. ``cause``, ``parent`` and ``shared`` as in :class:`agent_rl.types.Branch`."""

    transcript: Transcript
    messages: list[Message] = field(default_factory=list)
    turns: list[TurnStart] = field(default_factory=list)
    cause: BranchCause = BranchCause.START
    parent: int | None = None
    shared: int = 0

    def closed(self) -> Branch:
        """The branch up to its last sampled token."""
        arrays, versions = self.transcript.arrays(), self.transcript.versions
        origin, kept = (self.parent, self.shared, self.cause), self.transcript.kept_tokens
        return Branch(*arrays, versions, *origin, kept, tuple(self.messages))

    def last_turns(self, keep: int) -> list[KeptTurns]:
        """The last turns in all numbers from ``keep`` to 1, most turns first."""
        return [self._turns_from(index) for index in range(max(0, len(self.turns) - keep), len(self.turns))]

    def _turns_from(self, index: int) -> KeptTurns:
        _, token, message = self.turns[index]
        starts = [start.moved(-token, -message) for start in self.turns[index:]]
        return KeptTurns(starts, self.transcript.tokens[token:], self.messages[message:])

    def child(self, number: int, messages: Sequence[Message], prompt: Sequence[int], max_tokens: int) -> OpenBranch:
        """The branch of a sub-agent that begins with ``prompt``, the tokens of ``messages``. This branch has
        ``number``."""
        transcript, shared = self.transcript.fork(prompt, max_tokens)
        return OpenBranch(transcript, list(messages), [], BranchCause.SUBAGENT, number, shared)

    def followed_by(
        self, number: int, messages: Sequence[Message], prompt: Sequence[int], max_tokens: int, kept: KeptTurns
    ) -> OpenBranch:
        """The branch that begins with ``prompt``, the tokens of ``messages``, and the ``kept`` turns of this branch,
        which has ``number``."""
        following = self.child(number, [*messages, *kept.messages], [*prompt, *kept.tokens], max_tokens)
        starts = [start.moved(len(prompt), len(messages)) for start in kept.starts]
        return replace(following, turns=starts, cause=BranchCause.COMPACTION)


class Compactions:
    """When the conversation of an episode is compacted, and what it goes on with. ``held_back``: the observation that
    made a compaction necessary, until :meth:`take_held_back`."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self._rollout, self.done = rollout, 0
        self.held_back: Observation | None = None

    @property
    def config(self) -> CompactionConfig:
        assert self._rollout.compaction is not None, "only a compaction holds an observation back"
        return self._rollout.compaction

    def needed(self, tokens: int, turns: int) -> bool:
        """Whether a conversation of so many ``tokens`` is compacted after ``turns``. At least two must be left."""
        compaction = self._rollout.compaction
        return (
            compaction is not None
            and tokens > compaction.at_tokens
            and self.done < compaction.max_per_episode
            and turns + 2 <= self._rollout.max_turns
        )

    def take_held_back(self) -> Observation:
        assert self.held_back is not None, "see needed"
        taken, self.held_back = self.held_back, None
        return taken

    def next_branch(
        self, before: OpenBranch, number: int, prompts: Callable[[int], Prompt], kept: Sequence[KeptTurns], last: int
    ) -> OpenBranch | None:
        """The branch after ``before``, which has ``number``, with as many of the ``kept`` turns as fit before the
        ``last`` tokens; None if none fits. ``prompts``: the messages and tokens that it begins with, by the number of
        turns before it."""
        for turns in kept:
            messages, prompt = prompts(turns.starts[0].number)
            if len(prompt) + len(turns.tokens) + last <= self.config.at_tokens:
                return before.followed_by(number, messages, prompt, self._rollout.max_tokens, turns)
        return None
