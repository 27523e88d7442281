"""Agents of libraries, with one tool: ``code`` and ``calls`` are smolagents' two agents, ``output`` is pydantic-ai's
agent with a typed result."""

from __future__ import annotations

import os
import sys


def shell(command: str) -> str:
    """Runs a command.

    Args:
        command: the command
    """
    return f"seen {command}"


def smolagents(kind: str, task: str) -> object:
    from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    agent = {"code": CodeAgent, "calls": ToolCallingAgent}[kind]
    model = OpenAIServerModel(os.environ["AGENT_RL_MODEL"], api_base=url, api_key=key)
    return agent(tools=[tool(shell)], model=model, max_steps=5).run(task)


def pydantic_ai(task: str) -> object:
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    class City(BaseModel):
        name: str
        people: int

    agent = Agent(OpenAIChatModel(os.environ["AGENT_RL_MODEL"]), output_type=City)
    agent.tool_plain(shell)
    return agent.run_sync(task).output


if __name__ == "__main__":
    kind, task = sys.argv[1], sys.stdin.read()
    result = pydantic_ai(task) if kind == "output" else smolagents(kind, task)
    sys.exit(0 if str(result) in ("good", "name='Rome' people=3") else 1)
