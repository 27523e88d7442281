"""An episode in R2E-Gym's interface: its prompts, its countdown, its limits; and the config that asks for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.scripted_engine import ScriptedEngine

from agent_rl.config import EnvConfig, RolloutConfig, RunConfig
from agent_rl.config.loader import load_config
from agent_rl.errors import ConfigError
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.scripted_policies import ByteRenderer, solver_runner
from agent_rl.types import StopReason
from envs import EnvContext, Task, load_scaffold
from envs.mini import MiniEnvironment, generate, to_record
from envs.scaffolds.published import R2EGYM, countdown
from tools import tool_format
from tools.r2egym.toolset import CONTINUE

CONFIG = Path(__file__).parents[2] / "configs/swebench-verified.yaml"


def test_the_prompts() -> None:
    system, user = R2EGYM.initial_messages("[ISSUE]\n**Title** {x}\n[/ISSUE]", "/testbed", "full")
    assert system["content"].startswith(
        "You are a programming agent who is provided a github issue and repository bash"
    )
    assert "–– BEGIN FUNCTION #4: finish ––" in system["content"]
    assert user["content"].startswith("Consider the following github issue:\n<github_issue>\n\n**Title** {x}\n\n</")
    assert user["content"].endswith("reproduction python files. ")
    _, user = R2EGYM.initial_messages("plain", "/testbed", "full")
    assert "<github_issue>\nplain\n</github_issue>" in user["content"]


def test_the_countdown() -> None:
    assert [countdown(turns, 50) for turns in (0, 1, 39)] == [f"Steps Remaining: {left}" for left in (40, 39, 1)]
    assert countdown(40, 50) == countdown(49, 50)
    assert countdown(40, 50) == "You have reached the maximum number of steps. Please submit your answer NOW."


def test_a_config_is_filled_in() -> None:
    rollout = load_config(CONFIG, ["env.scaffold=r2egym"]).rollout
    assert (rollout.tool_format, rollout.describe_tools, rollout.max_parse_failures) == ("r2egym", False, None)
    assert (rollout.max_turns, rollout.max_tokens) == (50, 65_536), "what the config says goes before"
    strip = RunConfig.model_validate({"name": "n", "model": "m", "env": {"scaffold": "r2egym"}})
    assert (strip.rollout.max_tokens, strip.rollout.time_limit, strip.rollout.tool_timeout) == (32_768, 1_200, 90)
    again = RunConfig.model_validate(strip.model_dump())
    assert again == strip, "as a run writes it down, so it is read"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.tool_format=hermes"], "rollout.tool_format is hermes; env.scaffold r2egym requires r2egym"),
        (["env.tool_style=concise"], "env.tool_style concise requires env.scaffold agent-rl"),
        (["env.scaffold=r2e-gym"], "env.scaffold: unknown scaffold 'r2e-gym': did you mean 'r2egym'?"),
        (["env.scaffold=tools:Style"], "env.scaffold: scaffold 'tools:Style' is a"),
    ],
)
def test_a_config_that_cannot_be(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, ["env.scaffold=r2egym", *overrides])
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def context(context: EnvContext) -> EnvContext:
    return replace(context, scaffold=load_scaffold("r2egym"))


@pytest.mark.bubblewrap
async def test_an_episode(context: EnvContext) -> None:
    env = MiniEnvironment(context)
    record = to_record(generate("train", 1, 0)[0])
    task = Task(record.id, "mini", record.model_dump())
    turns = ["I think.", "<function=execute_bash><parameter=cmd>exit 7</parameter></function>"]
    rules = EpisodeRules(RolloutConfig(describe_tools=False, max_turns=12, max_parse_failures=None, max_tokens=1 << 20))
    rules = replace(rules, env=EnvConfig(scaffold="r2egym"), routes=None)
    renderer = ByteRenderer()
    engine = ScriptedEngine(lambda session, turn, tokens: renderer.encode([*turns, *["Hm."] * 10][turn]))
    trajectory = await run_episode(env, task, engine, renderer, tool_format("r2egym"), rules)
    assert trajectory.stop is StopReason.MAX_TURNS
    contents = [message["content"] for message in trajectory.messages]
    assert contents[1].endswith("reproduction python files. \nSteps Remaining: 2")
    assert contents[3] == f"{CONTINUE}\nSteps Remaining: 1"
    assert contents[5] == (
        "Exit code: Error: Exit code 7\nExecution output of [execute_bash]:\nError executing command:\n\n"
        "[STDOUT]\n\n \n\n[STDERR]\n\n\n\n"
        "You have reached the maximum number of steps. Please submit your answer NOW."
    )
    gold = await solver_runner(env, "gold", rules)(task)
    assert (gold.stop, gold.resolved) == (StopReason.SUBMITTED, True)
