"""A scaffold adds notes to observations, chooses their role, and lifts the limit of parse failures."""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any

import pytest
from support.memory_env import FIX, SUBMIT, TurnsEngine, run_memory_episode

from agent_rl.config import EnvConfig, RolloutConfig
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.scripted_policies import noop
from agent_rl.types import StopReason
from envs import EnvContext, Scaffold, ScaffoldError, Task, load_environment
from tools import ToolCall

HERE = "tests_a_scaffold"
CONTEXT = EnvContext(backend=None)


def unused(*given: Any, **named: Any) -> Any:
    raise NotImplementedError


COUNTS = Scaffold(
    name="counts",
    initial_messages=unused,
    tools=unused,
    shell=lambda cmd: ToolCall("run", {"line": cmd}),
    submit=ToolCall("submit", {}),
    turn_note=lambda turns, max_turns: f"{turns} of {max_turns}",
    observation_role="user",
    default_rollout=MappingProxyType({"max_turns": 9}),
)
COUNTING = EnvContext(backend=None, scaffold=COUNTS)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module under a name of its own, since pytest's importlib mode gives it none to import by."""
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


async def test_the_notes_and_the_role_of_observations_come_from_the_scaffold() -> None:
    limits = RolloutConfig(describe_tools=False, max_turns=9, max_parse_failures=None)
    rules = EpisodeRules(limits, EnvConfig(scaffold=f"{HERE}:COUNTS"), None)
    trajectory = await run_memory_episode(TurnsEngine(["no call"] * 5 + [FIX, SUBMIT]), rules=rules)
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.SUBMITTED, 7)
    contents = [(message["role"], message["content"]) for message in trajectory.messages]
    assert contents[:2] == [("system", "S"), ("user", "U\n0 of 9")]
    assert contents[-2] == ("user", "fix\n6 of 9")
    assert trajectory.turns[5].observation == "fix"
    assert b"fix\n6 of 9" in bytes(token for token in trajectory.tokens if token < 256)


def test_an_environment_with_tools_of_its_own_refuses_another_scaffold() -> None:
    class Own:
        name = "own"

        def __init__(self, context: EnvContext) -> None: ...

        prepare = tasks = start = gold = unused

    sys.modules[HERE].Own = Own
    assert load_environment(f"{HERE}:Own", CONTEXT).name == "own"
    with pytest.raises(ScaffoldError, match=f"env.scaffold counts: environment '{HERE}:Own' has its own tools"):
        load_environment(f"{HERE}:Own", COUNTING)
    assert load_environment("swe", COUNTING, {"path": "tasks.jsonl"}).scaffold.name == "counts"


def test_policies_without_a_model_call_as_the_scaffold_does() -> None:
    assert noop(load_environment("mini", COUNTING), Task("t", "mini", {})) == [ToolCall("submit", {})]
