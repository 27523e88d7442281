"""mini-swe-agent as it works on SWE-bench with a model that writes its commands as text.

The prompts and the limits are those of ``src/minisweagent/config/benchmarks/swebench_backticks.yaml`` in
github.com/SWE-agent/mini-swe-agent at a83fcae: 250 steps, 60 s a command, an end after three turns in a row without
exactly one command. Its limit of cost has no counterpart. The tool: :mod:`tools.mini_swe_agent`.
"""

from __future__ import annotations

from types import MappingProxyType

from envs.scaffold import Scaffold, shipped_text
from envs.types import Message
from tools import Style, ToolCall
from tools.mini_swe_agent import SUBMIT, mini_swe_agent_tools


def opening(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
    """The prompts name /testbed, which is where tasks are; the directory of an example is called otherwise."""
    user = shipped_text("mini-swe-agent-instance.txt").replace("{{task}}", statement)
    return {"role": "system", "content": shipped_text("mini-swe-agent-system.txt")}, {"role": "user", "content": user}


def shell(cmd: str) -> ToolCall:
    return ToolCall("bash", {"command": cmd})


MINI_SWE_AGENT = Scaffold(
    name="mini-swe-agent",
    opening=opening,
    tools=mini_swe_agent_tools,
    shell=shell,
    submit=shell(f"echo {SUBMIT}"),
    observation_role="user",
    fixed=MappingProxyType({"tool_format": "mini-swe-agent", "describe_tools": False}),
    defaults=MappingProxyType({"max_turns": 250, "tool_timeout": 60.0, "max_parse_failures": 3}),
)
