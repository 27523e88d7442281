"""Tasks, grades, and the protocols of episodes and environments."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

from sandbox import Sandbox, printable
from tools import ToolCall, ToolResult, ToolSet

Message = Mapping[str, str]
"""A chat message, ``{"role": ..., "content": ...}``."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task. ``id`` is unique in its environment; ``record`` is the environment's data of the task (a row).
    ``noop_resolves``: doing nothing is the right answer, e.g. where the agent has to refuse."""

    id: str
    env: str
    record: Mapping[str, Any]
    noop_resolves: bool = False


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a finished episode.

    The trainer uses ``reward``, Pass@1 counts ``resolved``. ``tests`` maps each test's name to its status; ``log`` is
    the end of the tests' output. ``mutant_seconds`` is the part of ``seconds`` that the negative control of a success
    took. A failed grading raises ``GradingError`` or ``SandboxError`` instead.

    ``parts`` are the named parts of the reward. Where the config has ``reward_weights``, the reward becomes their
    weighted sum. ``metrics`` are figures that are logged and not trained on. ``turn_rewards`` is empty, or has a number
    for each turn of the agent: what this turn earned, beside ``reward`` at the end (``train.turn_rewards``).
    """

    reward: float
    resolved: bool
    patch: str = ""
    tests: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    suspected_hack: Sequence[str] = ()
    seconds: float = 0.0
    mutant_seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class GradedEpisode:
    """A finished episode of a group, for :class:`GradesGroups`: all messages, how it ended, and its own grade."""

    messages: Sequence[Message]
    stop: str
    grade: Grade


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``check`` is its name, ``detail`` one line of explanation."""

    check: str
    ok: bool
    detail: str = ""


class EnvsError(Exception):
    """Base of the package's errors. The message is made printable, because it may quote output of a sandbox."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ProtocolError(EnvsError):
    """An environment that does not keep its protocol: one line for its author."""


class TaskRecordError(EnvsError):
    """A broken task record. The message names the row, the field and the expected value."""


class GradingError(EnvsError):
    """The grading failed, e.g. without a parseable log: an infrastructure failure, not a reward of 0."""


class UndecidableError(GradingError):
    """The task cannot be graded, whatever the patch, because of its own files. It is not retried.

    Not for failures of the machine, such as a limit that stopped the tests.
    """


class Episode(Protocol):
    """One started task: its initial messages, its tools and its grade.

    With the method ``respond`` of :class:`Dialogue` it has a user beside its tools, who hears turns without a call.
    """

    @property
    def messages(self) -> Sequence[Message]:
        """The initial messages: system and user."""
        ...

    @property
    def tools(self) -> ToolSet: ...

    async def grade(self) -> Grade:
        """Grade the agent's result, e.g. in a fresh sandbox with the hidden tests."""
        ...


@runtime_checkable
class Dialogue(Protocol):
    """An episode without tools, in place of :class:`Episode`. It takes each turn of the agent as text."""

    @property
    def messages(self) -> Sequence[Message]:
        """The initial messages: system and user."""
        ...

    async def respond(self, text: str) -> ToolResult:
        """Take a turn of the agent. The result is the next message of the user; ``submitted`` ends the episode."""
        ...

    async def grade(self) -> Grade:
        """Grade what the agent said."""
        ...


def target_of(episode: Episode | Dialogue) -> ToolSet | Dialogue:
    """What executes the turns of ``episode``: its tools, or the episode itself."""
    return episode.tools if isinstance(episode, HasTools) else cast(Dialogue, episode)


def user_of(episode: Episode | Dialogue) -> Callable[[str], Awaitable[ToolResult]] | None:
    """The user of an episode with tools, who hears the turns without a call (:meth:`Dialogue.respond`); None without
    one."""
    return episode.respond if isinstance(episode, HasTools) and isinstance(episode, Dialogue) else None


@runtime_checkable
class HasTools(Protocol):
    """An episode with tools: with ``respond`` as well it has a user beside them."""

    @property
    def tools(self) -> ToolSet: ...


@runtime_checkable
class HasSandbox(Protocol):
    """Optional: an episode whose agent works in a sandbox, where an agent program can run."""

    @property
    def sandbox(self) -> Sandbox: ...


class Environment(Protocol):
    """A source of tasks that can start them. Selected by registry name, dotted path or entry point.

    An environment that starts no sandbox sets the class attribute ``needs_sandbox = False``.
    """

    @property
    def name(self) -> str: ...

    async def prepare(self, *splits: str) -> None:
        """Download, build and verify the tasks of ``splits`` for :meth:`tasks`. Completed work is skipped."""
        ...

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of ``split`` (``train``, ``heldout`` or an environment-specific name), in a fixed order."""
        ...

    def start(self, task: Task) -> AbstractAsyncContextManager[Episode | Dialogue]:
        """Start ``task``. Leaving the context closes its sandbox, also on cancellation."""
        ...

    def gold(self, task: Task) -> str:
        """The reference fix as a git diff, for the gold policy and the doctor."""
        ...


@runtime_checkable
class Solvable(Protocol):
    """Optional: an environment whose reference solutions are turns, not a patch. The gold policy uses them."""

    def solution(self, task: Task) -> Sequence[ToolCall | str]:
        """The turns that solve ``task``: tool calls without the submitting call, and texts for the user. Empty if
        unknown."""
        ...


@runtime_checkable
class GradesGroups(Protocol):
    """Optional: an environment whose rewards compare the episodes of a task. Training uses it."""

    async def grade_group(self, task: Task, episodes: Sequence[GradedEpisode]) -> Sequence[Grade]:
        """The final grade of each of ``episodes``, in order. Called once for each complete group.

        An exception drops the group as an infrastructure failure. Parts with a weight must be in the own grades, too.
        """
        ...


@runtime_checkable
class Auditable(Protocol):
    """Optional: an environment that checks whether a task rewards a reward hack. The doctor uses it."""

    async def audit(self, task: Task) -> Sequence[Finding]:
        """Try to win ``task`` without solving it, in separate sandboxes. Returns one finding for each check, in order.

        Raises ``SandboxError`` or ``GradingError`` if a check could not run.
        """
        ...
