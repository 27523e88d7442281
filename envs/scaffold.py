"""How an agent meets a task: its prompts, its tools, the form of its calls, what it is answered, and its limits.

A model that was trained in another project's scaffold knows that scaffold's words. ``env.scaffold`` chooses whose an
agent meets here; ``agent-rl``, the default, is this project's own. docs/interfaces.md describes those that there are.
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
    """An interface that cannot be loaded, or that an environment cannot serve: a user's mistake, in one line."""


class Opening(Protocol):
    """The system and the user message of a task."""

    def __call__(self, statement: str, workdir: str, style: Style) -> tuple[Message, Message]: ...


class OpenTools(Protocol):
    """The tools of one episode in its sandbox. ``timeout`` is in seconds, for each command."""

    def __call__(self, sandbox: Sandbox, *, style: Style, timeout: float) -> ToolSet: ...


def no_remark(turns: int, max_turns: int) -> str:
    """Nothing stands beside what the tools answer."""
    return ""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """An interface as data.

    ``opening`` and ``tools`` are what an environment takes from it. ``shell`` makes the call that runs a shell command,
    and ``submit`` is the one that ends the task: policies without a model use them. ``remark`` is given how many turns
    were taken and how many may be; what it returns stands on a line of its own at the end of what the agent reads next.
    ``observation_role`` is the role of the messages that hold what tools answer; None: what the chat template prefers.
    ``fixed`` and ``defaults`` are keys of the config's section ``rollout``: those that the interface cannot do without,
    and those that hold where the config says nothing.
    """

    name: str
    opening: Opening
    tools: OpenTools
    shell: Callable[[str], ToolCall]
    submit: ToolCall
    remark: Callable[[int, int], str] = no_remark
    observation_role: Literal["tool", "user"] | None = None
    fixed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def with_remark(self, text: str, turns: int, max_turns: int) -> str:
        """``text`` as the agent reads it before its next turn."""
        remark = self.remark(turns, max_turns)
        return f"{text}\n{remark}" if remark else text


@runtime_checkable
class HasScaffold(Protocol):
    """An environment whose agents meet its tasks through an :class:`Scaffold`. Optional; others have tools of their
    own."""

    @property
    def scaffold(self) -> Scaffold: ...


OWN = "agent-rl"

INTERFACES = Registry(
    "scaffold",
    "agent_rl.interfaces",
    {
        OWN: "envs.scaffolds.own:AGENT_RL",
        "r2egym": "envs.scaffolds.r2egym:R2EGYM",
        "mini-swe-agent": "envs.scaffolds.mini_swe_agent:MINI_SWE_AGENT",
        "openhands": "envs.scaffolds.openhands:OPENHANDS",
    },
    ScaffoldError,
)


def shipped_text(name: str) -> str:
    """A prompt that stands in a file of its own, since a model must see it to the character; NOTICE.txt says whose."""
    return (Path(__file__).parent / "scaffolds" / name).read_text(encoding="utf-8")


def find_scaffold(name: str) -> Scaffold:
    """The interface ``name``, or at the path ``package.module:attribute``. Raises ``ScaffoldError`` in one line."""
    found = INTERFACES.load(name)
    if not isinstance(found, Scaffold):
        raise ScaffoldError(f"interface {name!r} is a {type(found).__name__}, not an envs.scaffold.Interface")
    return found
