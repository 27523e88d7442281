"""Tool calls, their results and errors, and the protocols of tool sets and call formats.

::

    ToolsError
    ├── ToolFormatError      a tool-call format cannot be loaded: a mistake of the user, one line
    ├── ToolDefinitionError  a function cannot become a tool: a mistake of its author, raised when the set is created
    └── ToolError            a tool raises it for a wrong call; the tool set turns it into a ``failed`` result
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


class ToolsError(Exception):
    """Base of the package's errors."""


class ToolFormatError(ToolsError):
    """A tool-call format that cannot be loaded."""


class ToolDefinitionError(ToolsError):
    """A function that cannot become a tool."""


class ToolError(ToolsError):
    """A wrong call. The message is the agent's observation."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed call: the tool's name and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """Model text that is not a well-formed tool call. ``reason`` is one line, the agent's next observation. ``words``:
    no call begins in the text."""

    reason: str
    words: bool = field(default=False, compare=False)


CallBlock = tuple[tuple[ToolCall, ...], int, int]
"""Calls that stand together, one at least, and where their text starts and ends."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One turn of a model: its reasoning, its text and all its calls in order.

    ``text`` is the stripped text around the calls. Without a well-formed call ``failure`` is the reason, one line, and
    ``text`` the whole turn after the reasoning. A malformed call after a well-formed one stays in the text.
    """

    reasoning: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The observation after a call. ``submitted`` ends the episode; ``failed`` marks an error."""

    text: str
    submitted: bool = False
    failed: bool = False


class ToolCallFormat(Protocol):
    """One text format of tool calls: its parser, its renderer and its description for the system prompt."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str) -> ToolCall | ParseFailure: ...

    def render(self, call: ToolCall) -> str:
        """The text a model would write for ``call``; ``parse(render(call)) == call``."""
        ...

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """The part of the system prompt that lists the tools and explains how to call them."""
        ...


@runtime_checkable
class CallScanner(Protocol):
    """A format that can find every call of a turn. Optional: other formats yield the first call only."""

    def scan(self, content: str, position: int) -> CallBlock | ParseFailure | None:
        """The next calls that stand together, from ``position`` on; a failure if the first one is malformed; None if no
        further call begins. ``content`` is a turn without its reasoning."""
        ...


@runtime_checkable
class MarksText(Protocol):
    """A format that also marks the text of a turn. Optional."""

    def plain_text(self, content: str) -> str:
        """``content`` without the format's markers."""
        ...


Form = Mapping[str, Any]
"""What a text may be, as data (:mod:`tools.formats.grammars`)."""


@runtime_checkable
class ConstrainsCalls(Protocol):
    """A format whose calls a grammar can express. Optional."""

    def call_form(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """The text of a call of the tool ``name`` whose arguments have the JSON schema ``parameters``, without the
        token that ends the turn. Raises ``ValueError`` for a call that the format or a grammar cannot write."""
        ...


@runtime_checkable
class WritesTurns(Protocol):
    """A format of whole turns, not of calls inside a turn's text. Optional."""

    def render_turn(self, thoughts: str, text: str, calls: Sequence[ToolCall]) -> str:
        """A turn after the prompt, with the marker that ends it. Raises ``ValueError`` for one that it cannot write."""
        ...


class ToolSet(Protocol):
    """The tools of one episode."""

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """OpenAI function schemas, ``{"type": "function", "function": {...}}``."""
        ...

    async def call(self, call: ToolCall) -> ToolResult:
        """Run a call. A wrong name or argument is a ``failed`` result, not an exception; a broken sandbox raises."""
        ...
