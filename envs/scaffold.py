"""Scaffolds: the prompts, tools, call format, observations and limits of an agent.

A model that was trained in the scaffold of another project is off its distribution in any other. ``env.scaffold``
selects one; the default is ``agent-rl``. docs/reference/tools.md describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from envs.types import EnvsError, Message
from sandbox import Sandbox
from sandbox.registry import Registry
from tools import Style, ToolCall, ToolSet


class ScaffoldError(EnvsError):
    """A scaffold that cannot be loaded, or that an environment does not support: one line for the user."""


class InitialMessages(Protocol):
    """Returns the system and the user message of a task."""

    def __call__(self, statement: str, workdir: str, style: Style) -> tuple[Message, Message]: ...


class ToolSetFactory(Protocol):
    """Returns the tools of one episode in its sandbox. ``timeout`` is in seconds for each command."""

    def __call__(self, sandbox: Sandbox, *, style: Style, timeout: float) -> ToolSet: ...


def no_turn_note(turns: int, max_turns: int) -> str:
    """Add nothing to observations."""
    return ""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """One scaffold.

    Environments use ``initial_messages`` and ``tools``. Policies without a model use ``shell``, which returns the call
    for a shell command, and ``submit``, the call that ends the task. ``turn_note`` gets the number of turns taken and
    the maximum; its text becomes the last line of the next observation. ``observation_role`` is the role of messages
    with tool results; None selects the role that the chat template prefers. ``required_rollout`` and
    ``default_rollout`` are keys of the config section ``rollout``: values that the config cannot change, and defaults.
    """

    name: str
    initial_messages: InitialMessages
    tools: ToolSetFactory
    shell: Callable[[str], ToolCall]
    submit: ToolCall
    turn_note: Callable[[int, int], str] = no_turn_note
    observation_role: Literal["tool", "user"] | None = None
    required_rollout: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    default_rollout: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def with_turn_note(self, text: str, turns: int, max_turns: int) -> str:
        """``text`` with the note for the next turn."""
        note = self.turn_note(turns, max_turns)
        return f"{text}\n{note}" if note else text


@runtime_checkable
class HasScaffold(Protocol):
    """Optional: an environment that supports every scaffold. Other environments have their own prompts and tools."""

    @property
    def scaffold(self) -> Scaffold: ...


DEFAULT_SCAFFOLD = "agent-rl"

SCAFFOLDS = Registry(
    "scaffold",
    "agent_rl.scaffolds",
    {
        DEFAULT_SCAFFOLD: "envs.scaffolds.default:AGENT_RL",
        "r2egym": "envs.scaffolds.published:R2EGYM",
        "mini-swe-agent": "envs.scaffolds.published:MINI_SWE_AGENT",
        "openhands": "envs.scaffolds.published:OPENHANDS",
    },
    ScaffoldError,
)


def shipped_text(name: str) -> str:
    """A prompt file of ``envs/scaffolds``, unchanged from its project; NOTICE.txt names the origin."""
    return (Path(__file__).parent / "scaffolds" / name).read_text(encoding="utf-8")


def load_scaffold(name: str) -> Scaffold:
    """The scaffold ``name``, registered or at ``package.module:attribute``. Raises ``ScaffoldError``."""
    scaffold = SCAFFOLDS.load(name)
    if not isinstance(scaffold, Scaffold):
        raise ScaffoldError(f"scaffold {name!r} is a {type(scaffold).__name__}, not an envs.scaffold.Scaffold")
    return scaffold
