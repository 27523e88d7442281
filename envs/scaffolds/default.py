"""The default scaffold ``agent-rl``: its prompts and the tools of :mod:`tools.swe`. The config sets the call format."""

from __future__ import annotations

from envs.scaffold import DEFAULT_SCAFFOLD, Scaffold
from envs.types import Message
from tools import Style, ToolCall, swe_tools

_SYSTEM = (
    "You are a programming agent. You work in a repository and solve the issue you are given by calling tools. "
    "Call one tool at a time and wait for what it answers."
)

_USER = """The repository in {workdir} has this issue:

{statement}

Change the files in {workdir} so that the issue is solved. The tests that check it are not in the repository, and
changes to test files or to the tests' configuration are undone before they run. Look at the code first, reproduce the
problem, fix its cause, check the fix, think of edge cases, and call the submitting tool when you are done."""

_SYSTEM_CONCISE = "Fix the bug in {workdir}, then submit."


def initial_messages(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
    """The system and the user message."""
    if style == "concise":
        system, user = _SYSTEM_CONCISE.format(workdir=workdir), statement
    else:
        system, user = _SYSTEM, _USER.format(workdir=workdir, statement=statement)
    return {"role": "system", "content": system}, {"role": "user", "content": user}


def shell(cmd: str) -> ToolCall:
    return ToolCall("execute_bash", {"cmd": cmd})


AGENT_RL = Scaffold(
    name=DEFAULT_SCAFFOLD,
    initial_messages=initial_messages,
    tools=swe_tools,
    shell=shell,
    submit=ToolCall("finish", {"command": "submit"}),
)
