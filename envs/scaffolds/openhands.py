"""OpenHands' CodeAct agent on SWE-bench, for models without native function calling.

The prompts are those of github.com/SWE-Gym/OpenHands at e644a2ca (OpenHands 0.13.1): its system prompt, its tool
descriptions, its example and ``get_instruction`` of ``evaluation/swe_bench/run_infer.py``. The task's directory
replaces OpenHands' workspace and the repository below it. Tools: :mod:`tools.openhands`.
"""

from __future__ import annotations

import posixpath
from types import MappingProxyType

from envs.scaffold import Scaffold, shipped_text
from envs.types import Message
from tools import Style, ToolCall
from tools.openhands import openhands_tools


def initial_messages(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
    system, user = (shipped_text(f"openhands-{role}.txt").replace("{workdir}", workdir) for role in ("system", "user"))
    user = user.replace("{name}", posixpath.basename(workdir)).replace("{statement}", statement)
    return {"role": "system", "content": system}, {"role": "user", "content": user}


OPENHANDS = Scaffold(
    name="openhands",
    initial_messages=initial_messages,
    tools=openhands_tools,
    shell=lambda cmd: ToolCall("execute_bash", {"command": cmd}),
    submit=ToolCall("finish", {}),
    observation_role="user",
    required_rollout=MappingProxyType({"tool_format": "openhands", "describe_tools": False}),
    default_rollout=MappingProxyType({"tool_timeout": 300.0, "max_parse_failures": None}),
)
