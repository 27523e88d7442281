"""mini-swe-agent's SWE-bench agent for models without native function calling.

The prompts and the limits are those of ``src/minisweagent/config/benchmarks/swebench_backticks.yaml`` in
github.com/SWE-agent/mini-swe-agent at a83fcae: 250 steps, 60 s for each command, and an end after three consecutive
turns without exactly one command. Its cost limit has no counterpart. Tool: :mod:`tools.mini_swe_agent`.
"""

from __future__ import annotations

from types import MappingProxyType

from envs.scaffold import Scaffold, shipped_text
from envs.types import Message
from tools import Style, ToolCall
from tools.mini_swe_agent import SUBMIT, mini_swe_agent_tools


def initial_messages(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
    """``workdir`` is not used: the prompts contain /testbed, the directory of the tasks."""
    user = shipped_text("mini-swe-agent-instance.txt").replace("{{task}}", statement)
    return {"role": "system", "content": shipped_text("mini-swe-agent-system.txt")}, {"role": "user", "content": user}


def shell(cmd: str) -> ToolCall:
    return ToolCall("bash", {"command": cmd})


MINI_SWE_AGENT = Scaffold(
    name="mini-swe-agent",
    initial_messages=initial_messages,
    tools=mini_swe_agent_tools,
    shell=shell,
    submit=shell(f"echo {SUBMIT}"),
    observation_role="user",
    required_rollout=MappingProxyType({"tool_format": "mini-swe-agent", "describe_tools": False}),
    default_rollout=MappingProxyType({"max_turns": 250, "tool_timeout": 60.0, "max_parse_failures": 3}),
)
