"""Sub-agents of the built-in loop (``rollout.subagents``): the tool ``task`` and what a call of it leaves behind.

::

    branch 0   system, task            t1 [calls task]                    o1 = last words   t5 ...
    branch 1   system, prompt + part                      t2 o2 t3 o3 t4

A sub-agent is the same policy in a conversation of its own, with the episode's tools and sandbox. It ends with a turn
without a call, with a submit, at its own limits, or where its context is full. Sub-agents have no sub-agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agent_rl.config import SubagentsConfig
from agent_rl.rollout.compaction import Message, OpenBranch
from tools import ToolResult

TASK = "task"
SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": TASK,
        "description": "Give a part of the work to a sub-agent. It has the same tools and does not see this "
        "conversation. Its last words are the result.",
        "parameters": {
            "type": "object",
            "properties": {"prompt": {"type": "string", "description": "What to do, and what to report."}},
            "required": ["prompt"],
        },
    },
}
SILENT = "The sub-agent said nothing."


class Delegation(NamedTuple):
    """A running sub-agent: its branch, the branch and the number of the turn that called it, and that turn's stop
    token."""

    child: OpenBranch
    parent: OpenBranch
    turn: int
    stop: int | None

    @property
    def turns(self) -> int:
        return len(self.child.turns)


class Subagents:
    """The sub-agents of an episode. ``limits`` None: it has none. ``request``: what a call asked for, until
    :meth:`begin`. ``running``: the present sub-agent."""

    def __init__(self, limits: SubagentsConfig | None) -> None:
        self._limits, self._begun = limits, 0
        self.request: str | None = None
        self.running: Delegation | None = None

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return [SCHEMA] if self._limits else []

    def takes(self, tool: str) -> bool:
        """Whether a call of ``tool`` is for :meth:`accept`."""
        return tool == TASK and self._limits is not None and self.running is None

    async def accept(self, prompt: object) -> ToolResult:
        """Accept a call of the tool ``task``, or say why not."""
        assert self._limits is not None, "see takes"
        if not isinstance(prompt, str) or not prompt.strip():
            return ToolResult(f"{TASK}: prompt must be a text", failed=True)
        if self._begun >= (most := self._limits.max_per_episode):
            return ToolResult(f"{TASK}: at most {most} sub-agents per episode", failed=True)
        self.request = prompt
        return ToolResult("")

    def take_request(self, task: Sequence[Message]) -> tuple[list[Message], int]:
        """The first messages of the conversation that was asked for, and its maximum tokens. ``task``: the episode's
        first messages."""
        assert self._limits is not None, "only then a request is accepted"
        system = [message for message in task[:1] if message["role"] == "system"]
        said = {"role": "user", "content": f"{self._limits.prompt}\n\n{self.request}"}
        self.request = None
        self._begun += 1
        return [*system, said], self._limits.max_tokens

    def is_over(self) -> bool:
        """Whether the running sub-agent has no turn left."""
        return self._limits is not None and self.running is not None and self.running.turns >= self._limits.max_turns

    def end(self) -> Delegation:
        assert self.running is not None, "only a running sub-agent ends"
        ended, self.running = self.running, None
        return ended
