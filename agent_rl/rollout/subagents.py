"""Sub-agents of the built-in loop (``rollout.subagents``): the tool ``task`` and what a call of it leaves behind.

::

    branch 0   system, task            t1 [calls task]                    o1 = last words   t5 ...
    branch 1   system, prompt + part                      t2 o2 t3 o3 t4

A sub-agent is the same policy in a conversation of its own, with the episode's tools and sandbox. It ends with a turn
without a call, with a submit, at its own limits, or where its context is full. Sub-agents have no sub-agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agent_rl.rollout.compaction import OpenBranch

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
