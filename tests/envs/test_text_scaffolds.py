"""mini-swe-agent and OpenHands as interfaces: their prompts, and that each solves a task by its own calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent_rl.config import RunConfig
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.scripted_policies import solver_runner
from agent_rl.types import StopReason
from envs import EnvContext, Task, load_scaffold
from envs.mini import MiniEnvironment, generate, to_record


def initial_messages(name: str) -> list[str]:
    messages = load_scaffold(name).initial_messages("An {issue}.", "/testbed", "full")
    assert [message["role"] for message in messages] == ["system", "user"]
    return [message["content"] for message in messages]


def test_the_prompts_of_mini_swe_agent() -> None:
    system, user = initial_messages("mini-swe-agent")
    assert system.startswith("You are a helpful assistant that can interact multiple times with a computer shell")
    assert user.startswith("<pr_description>\nConsider the following PR description:\nAn {issue}.\n</pr_description>")
    assert user.endswith("</instructions>")


def test_the_prompts_of_openhands() -> None:
    system, user = initial_messages("openhands")
    assert system.startswith("You are OpenHands agent, a helpful AI assistant")
    assert "---- END FUNCTION #3 ----" in system
    assert user.startswith("Here's a running example of how to perform a task with the provided tools.\n")
    assert "<uploaded_files>\n/testbed\n</uploaded_files>" in user
    assert "in the directory testbed. Consider" in user
    assert "<pr_description>\nAn {issue}.\n</pr_description>" in user
    assert user.endswith("PLEASE EMIT ONE AND ONLY ONE FUNCTION CALL PER MESSAGE.\n")


@pytest.mark.bubblewrap
@pytest.mark.parametrize("name", ["mini-swe-agent", "openhands"])
async def test_gold_solves_a_task_by_the_interfaces_own_calls(context: EnvContext, name: str) -> None:
    config = RunConfig.model_validate({"name": "n", "model": "m", "env": {"scaffold": name}})
    assert (config.rollout.tool_format, config.rollout.describe_tools) == (name, False)
    env = MiniEnvironment(replace(context, scaffold=load_scaffold(name)))
    record = to_record(generate("train", 1, 0)[0])
    run = solver_runner(env, "gold", EpisodeRules.from_config(config), tool_format_name=name)
    trajectory = await run(Task(record.id, "mini", record.model_dump()))
    assert (trajectory.stop, trajectory.resolved) == (StopReason.SUBMITTED, True)
