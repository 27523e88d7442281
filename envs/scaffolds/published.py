"""The agents of published projects, for models without native function calling: prompts, tools and limits.

- R2E-Gym (github.com/R2E-Gym/R2E-Gym at 69bc953). The prompts are those of
  ``src/r2egym/agenthub/config/edit_non_fn_calling.yaml``. Countdown and limits are those of
  ``src/r2egym/agenthub/agent/agent.py`` and ``run/edit.py``: 40 steps in the countdown and 10 more, 32,768 tokens,
  1,200 s, no limit of turns without a call. Tools: :mod:`tools.r2egym`.
- OpenHands' CodeAct agent on SWE-bench (github.com/SWE-Gym/OpenHands at e644a2ca, OpenHands 0.13.1): its system prompt,
  its tool descriptions, its example and ``get_instruction`` of ``evaluation/swe_bench/run_infer.py``. The task's
  directory replaces OpenHands' workspace and the repository below it. Tools: :mod:`tools.openhands`.
- mini-swe-agent's SWE-bench agent. The prompts and the limits are those of
  ``src/minisweagent/config/benchmarks/swebench_backticks.yaml`` in github.com/SWE-agent/mini-swe-agent at a83fcae: 250
  steps, 60 s for each command, and an end after three consecutive turns without exactly one command. Its cost limit has
  no counterpart. Tool: :mod:`tools.mini_swe_agent`.

The prompts of R2E-Gym and mini-swe-agent contain /testbed, the directory of the tasks; they do not use ``workdir``.
"""

from __future__ import annotations

import posixpath
import re
from types import MappingProxyType

from envs.scaffold import Scaffold, shipped_text
from envs.types import Message
from tools import Style, ToolCall
from tools.mini_swe_agent import SUBMIT, mini_swe_agent_tools
from tools.openhands import openhands_tools
from tools.r2egym import r2egym_tools

_GRACE_TURNS = 10
"""Turns after the end of the countdown."""

_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)


def _r2egym_messages(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
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
    initial_messages=_r2egym_messages,
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


def _openhands_messages(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
    system, user = (shipped_text(f"openhands-{role}.txt").replace("{workdir}", workdir) for role in ("system", "user"))
    user = user.replace("{name}", posixpath.basename(workdir)).replace("{statement}", statement)
    return {"role": "system", "content": system}, {"role": "user", "content": user}


OPENHANDS = Scaffold(
    name="openhands",
    initial_messages=_openhands_messages,
    tools=openhands_tools,
    shell=lambda cmd: ToolCall("execute_bash", {"command": cmd}),
    submit=ToolCall("finish", {}),
    observation_role="user",
    required_rollout=MappingProxyType({"tool_format": "openhands", "describe_tools": False}),
    default_rollout=MappingProxyType({"tool_timeout": 300.0, "max_parse_failures": None}),
)


def _mini_swe_agent_messages(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
    user = shipped_text("mini-swe-agent-instance.txt").replace("{{task}}", statement)
    return {"role": "system", "content": shipped_text("mini-swe-agent-system.txt")}, {"role": "user", "content": user}


def _bash(cmd: str) -> ToolCall:
    return ToolCall("bash", {"command": cmd})


MINI_SWE_AGENT = Scaffold(
    name="mini-swe-agent",
    initial_messages=_mini_swe_agent_messages,
    tools=mini_swe_agent_tools,
    shell=_bash,
    submit=_bash(f"echo {SUBMIT}"),
    observation_role="user",
    required_rollout=MappingProxyType({"tool_format": "mini-swe-agent", "describe_tools": False}),
    default_rollout=MappingProxyType({"max_turns": 250, "tool_timeout": 60.0, "max_parse_failures": 3}),
)
