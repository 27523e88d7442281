"""What a task is, how it starts, and how it is graded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sandbox import Sandbox, printable
from tools import ToolCall, ToolResult, ToolSet

Message = Mapping[str, str]
"""A chat message, ``{"role": ..., "content": ...}``."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. ``id`` is unique in its environment; ``record`` is the environment's own data (a row)."""

    id: str
    env: str
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one finished episode.

    ``reward`` is what the trainer sees, ``resolved`` what Pass@1 counts. ``tests`` maps a test's name to its status,
    ``log`` is the end of what they printed, for a person to read.
    A grading that broke is no Grade but an exception (``GradingError`` or ``SandboxError``).
    """

    reward: float
    resolved: bool
    patch: str = ""
    tests: Mapping[str, str] = field(default_factory=dict)
    log: str = ""
    suspected_hack: Sequence[str] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check of a task found. ``check`` is the check's name, ``detail`` one line of what was seen."""

    check: str
    ok: bool
    detail: str = ""


class EnvsError(Exception):
    """Base of the package's errors. The message is made printable: it may quote what was printed in a sandbox."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class TaskRecordError(EnvsError):
    """A task record is broken: the message names the row, the field and what would be right."""


class GradingError(EnvsError):
    """The grading itself broke (no parseable log, say): infrastructure, never a reward of 0."""


class UndecidableError(GradingError):
    """The task's own parts keep it from ever being graded, whatever the patch: no other try will tell more.

    Never raised for what a machine did, such as a limit that cut the tests off.
    """


class Episode(Protocol):
    """One started task: what the agent is told, what it may call, and the verdict at the end."""

    @property
    def messages(self) -> Sequence[Message]:
        """The opening messages: system and user."""
        ...

    @property
    def tools(self) -> ToolSet: ...

    async def grade(self) -> Grade:
        """Grade what the agent left behind, in a fresh sandbox with the hidden tests."""
        ...


@runtime_checkable
class Dialogue(Protocol):
    """An episode whose agent answers in words and has no tools to call. Optional: others have their tools called."""

    async def hear(self, text: str) -> ToolResult:
        """Take a whole turn of the agent. The result is what the agent reads next; ``submitted`` ends the episode."""
        ...


@runtime_checkable
class HasSandbox(Protocol):
    """An episode whose agent works in a sandbox, where a program of its own may run. Optional."""

    @property
    def sandbox(self) -> Sandbox: ...


class Environment(Protocol):
    """A source of tasks and the way to start one. Plugged in by registry name, dotted path or entry point.

    One that starts no sandboxes says so with the class attribute ``sandboxes = False``: then no sandbox is asked for.
    """

    @property
    def name(self) -> str: ...

    async def prepare(self, *splits: str) -> None:
        """Make the tasks of ``splits`` ready for :meth:`tasks` (download, build, verify); what is done is skipped."""
        ...

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of ``split`` (``train`` or ``heldout``, or a name of the environment's own), in a fixed order."""
        ...

    def start(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        """Start ``task``; leaving the context closes its sandbox, also when cancelled."""
        ...

    def gold(self, task: Task) -> str:
        """The true fix as a git diff, for the gold solver and the doctor."""
        ...


@runtime_checkable
class Solvable(Protocol):
    """An environment whose tasks are solved by tool calls or words, not by a patch. Optional; the gold solver asks."""

    def solution(self, task: Task) -> Sequence[ToolCall | str]:
        """The turns that solve ``task``: calls, without the last one that says so, or what is said in a
        :class:`Dialogue`; none where that is not known."""
        ...


@runtime_checkable
class Audited(Protocol):
    """An environment that can tell whether a task could be won without solving it. Optional; the doctor asks."""

    async def audit(self, task: Task) -> Sequence[Finding]:
        """Look at ``task`` as a cheating agent would, in sandboxes of its own: one finding a check, in a fixed order.

        Raises ``SandboxError`` or ``GradingError`` where a check could not be done: infrastructure, no finding.
        """
        ...
