"""R2E-Gym's agent: prompts, step countdown and limits (github.com/R2E-Gym/R2E-Gym at 69bc953).

The prompts are those of ``src/r2egym/agenthub/config/edit_non_fn_calling.yaml``, for models without native function
calling. Countdown and limits are those of ``src/r2egym/agenthub/agent/agent.py`` and ``run/edit.py``: 40 steps in the
countdown and 10 more, 32,768 tokens, 1,200 s, no limit of turns without a call. Tools: :mod:`tools.r2egym`.
"""

from __future__ import annotations

import re
from types import MappingProxyType

from envs.scaffold import Scaffold, shipped_text
from envs.types import Message
from tools import Style, ToolCall
from tools.r2egym import r2egym_tools

_GRACE_TURNS = 10
"""Turns after the end of the countdown."""

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)


def initial_messages(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
    """``workdir`` is not used: the prompts contain /testbed, the directory of the tasks."""
    match = _ISSUE.search(statement)
    issue = match[1] if match else statement
    user = shipped_text("r2egym-instance.txt").replace("{problem_statement}", issue)
    return {"role": "system", "content": shipped_text("r2egym-system.txt")}, {"role": "user", "content": user}


def countdown(turns: int, max_turns: int) -> str:
    remaining = max_turns - _GRACE_TURNS - turns
    if remaining > 0:
        return f"Steps Remaining: {remaining}"
    return "You have reached the maximum number of steps. Please submit your answer NOW."


R2EGYM = Scaffold(
    name="r2egym",
    initial_messages=initial_messages,
    tools=r2egym_tools,
    shell=lambda cmd: ToolCall("execute_bash", {"cmd": cmd}),
    submit=ToolCall("finish", {"command": "submit"}),
    turn_note=countdown,
    observation_role="user",
    required_rollout=MappingProxyType({"tool_format": "r2egym", "describe_tools": False}),
    default_rollout=MappingProxyType(
        {
            "max_turns": 40 + _GRACE_TURNS,
            "max_tokens": 32_768,
            "max_new_tokens": 32_768,
            "tool_timeout": 90.0,
            "time_limit": 1_200.0,
            "max_parse_failures": None,
        }
    ),
)
