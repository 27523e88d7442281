"""R2E-Gym's own agent: prompts, the countdown of its steps, and its limits (github.com/R2E-Gym/R2E-Gym at 69bc953).

The prompts are those of ``src/r2egym/agenthub/config/edit_non_fn_calling.yaml``, for models that write calls as text;
countdown and limits those of ``src/r2egym/agenthub/agent/agent.py`` and ``run/edit.py``: 40 steps that the agent is
told, 10 more that it has, 32,768 tokens, 1,200 s, and no limit of turns without a call. Tools: :mod:`tools.r2egym`.
"""

from __future__ import annotations

import re
from types import MappingProxyType

from envs.scaffold import Scaffold, shipped_text
from envs.types import Message
from tools import Style, ToolCall
from tools.r2egym import r2egym_tools

_GRACE = 10
"""Turns that an agent has beyond those that it is told."""

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)


def opening(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
    """The prompts name /testbed, which is where tasks are."""
    marked = _ISSUE.search(statement)
    issue = marked[1] if marked else statement
    user = shipped_text("r2egym-instance.txt").replace("{problem_statement}", issue)
    return {"role": "system", "content": shipped_text("r2egym-system.txt")}, {"role": "user", "content": user}


def countdown(turns: int, max_turns: int) -> str:
    left = max_turns - _GRACE - turns
    if left > 0:
        return f"Steps Remaining: {left}"
    return "You have reached the maximum number of steps. Please submit your answer NOW."


R2EGYM = Scaffold(
    name="r2egym",
    opening=opening,
    tools=r2egym_tools,
    shell=lambda cmd: ToolCall("execute_bash", {"cmd": cmd}),
    submit=ToolCall("finish", {"command": "submit"}),
    remark=countdown,
    observation_role="user",
    fixed=MappingProxyType({"tool_format": "r2egym", "describe_tools": False}),
    defaults=MappingProxyType(
        {
            "max_turns": 40 + _GRACE,
            "max_tokens": 32_768,
            "max_new_tokens": 32_768,
            "tool_timeout": 90.0,
            "time_limit": 1_200.0,
            "max_parse_failures": None,
        }
    ),
)
