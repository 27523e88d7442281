"""What an agent may call: calls, results, and the set of tools an environment offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed call: the tool's name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """Model text that is not a well-formed tool call. ``reason`` is one line that the agent is shown."""

    reason: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """One turn of a model in its parts: what it thought, what it said, and all its calls in their order.

    ``text`` is what stands around the calls, without outer blanks. Where there is no well-formed call ``failure`` says
    why, in a line, and ``text`` is all that was said; a malformed call after a good one is left in the text."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the agent is shown after a call. ``submitted`` ends the episode; ``failed`` marks a call that went wrong."""

    text: str
    submitted: bool = False
    failed: bool = False


class ToolCallFormat(Protocol):
    """One text format of tool calls: how they are parsed, written, and described in the system prompt."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str) -> ToolCall | ParseFailure: ...

    def render(self, call: ToolCall) -> str:
        """The text a model would write for ``call``; ``parse(render(call)) == call``."""
        ...

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """The part of the system prompt that tells the agent which tools there are and how to call them."""
        ...


@runtime_checkable
class CallScanner(Protocol):
    """A format that finds one call after another. Optional: of others, a turn's first call is taken."""

    def scan(self, answer: str, position: int) -> tuple[ToolCall, int, int] | ParseFailure | None:
        """The next call from ``position`` on, with where it begins and ends; a failure where it is malformed; None
        where no further one begins. ``answer`` is a turn without its thoughts."""
        ...


class ToolSet(Protocol):
    """The tools one episode may call."""

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """OpenAI function schemas, ``{"type": "function", "function": {...}}``."""
        ...

    async def call(self, call: ToolCall) -> ToolResult:
        """Run a call. A wrong name or argument is a ``failed`` result, not an exception; a broken sandbox raises."""
        ...
