"""What the episode loop takes of an interface: remarks beside observations, their role, and no limit of failures."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any

import pytest
from support.memory_environment import FIX, SUBMIT, TurnsEngine

from agent_rl.config import EnvConfig, RolloutConfig
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.scripted_policies import ByteRenderer, noop
from agent_rl.types import StopReason
from envs import EnvContext, Message, Scaffold, ScaffoldError, Task, load_environment
from tools import Style, ToolCall
from tools.formats import tool_format

HERE = "tests_an_interface"
CONTEXT = EnvContext(backend=None)  # type: ignore[arg-type]


def no_messages(statement: str, workdir: str, style: Style) -> tuple[Message, Message]:
    raise NotImplementedError


def no_tools(*given: Any, **named: Any) -> Any:
    raise NotImplementedError


COUNTS = Scaffold(
    name="counts",
    initial_messages=no_messages,
    tools=no_tools,
    shell=lambda cmd: ToolCall("run", {"line": cmd}),
    submit=ToolCall("submit", {}),
    turn_note=lambda turns, max_turns: f"{turns} of {max_turns}",
    observation_role="user",
    default_rollout=MappingProxyType({"max_turns": 9}),
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module under a name of its own, since pytest's importlib mode gives it none to import by."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


async def test_what_is_said_beside_observations(env: Any, task: Task) -> None:
    rules = EpisodeRules(
        RolloutConfig(describe_tools=False, max_turns=9, max_parse_failures=None),
        EnvConfig(scaffold=f"{HERE}:COUNTS"),
        None,
    )
    engine = TurnsEngine(["no call"] * 5 + [FIX, SUBMIT])
    trajectory = await run_episode(env, task, engine, ByteRenderer(), tool_format("hermes"), rules)
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.SUBMITTED, 7)
    contents = [(message["role"], message["content"]) for message in trajectory.messages]
    assert contents[:2] == [("system", "S"), ("user", "U\n0 of 9")]
    assert contents[-2] == ("user", "fix\n6 of 9")
    assert trajectory.turns[5].observation == "fix"
    assert b"fix\n6 of 9" in bytes(token for token in trajectory.tokens if token < 256)


def test_an_environment_with_tools_of_its_own_refuses_another_interface() -> None:
    class Own:
        name = "own"

        def __init__(self, context: EnvContext) -> None: ...

        prepare = tasks = start = gold = no_tools

    sys.modules[HERE].Own = Own  # type: ignore[attr-defined]
    assert load_environment(f"{HERE}:Own", CONTEXT).name == "own"
    context = EnvContext(backend=None, scaffold=COUNTS)  # type: ignore[arg-type]
    with pytest.raises(
        ScaffoldError, match=r"env.scaffold counts: environment 'tests_an_interface:Own' has its own tools"
    ):
        load_environment(f"{HERE}:Own", context)
    assert load_environment("swe", context, {"path": "tasks.jsonl"}).scaffold.name == "counts"  # type: ignore[attr-defined]


def test_policies_without_a_model_call_as_the_interface_does() -> None:
    context = EnvContext(backend=None, scaffold=COUNTS)  # type: ignore[arg-type]
    env = load_environment("mini", context)
    assert noop(env, Task("t", "mini", {})) == [ToolCall("submit", {})]
