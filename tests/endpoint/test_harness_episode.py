"""Episodes that a program drives: how each ends, and that a linear one is the built-in loop's token by token."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent_rl.config import HarnessConfig, RolloutConfig
from agent_rl.endpoint.episode import HarnessRun
from agent_rl.endpoint.server import Gateway
from agent_rl.errors import EngineOverloaded, EngineUnreachable, RoutesMissingError
from agent_rl.render import ChatRenderer
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.records import write_trajectories
from agent_rl.types import BranchCause, Group, StopReason, Trajectory
from agent_rl.viewer.api import Resources
from envs import Task
from tools import ToolResult, tool_format

PROGRAMS = Path(__file__).parent / "programs"
TASK = Task("t", "memory", {})


def command(program: str, *arguments: str) -> str:
    return shlex.join([sys.executable, str(PROGRAMS / program), *arguments])


async def drive(
    gateway: Gateway, kit: SimpleNamespace, renderer: ChatRenderer, engine: Any, run: str, **limits: Any
) -> Trajectory:
    harness = HarnessConfig(command=run, place="host")
    rules = EpisodeRules(RolloutConfig(**{"max_tokens": 4000, **limits}, harness=harness))
    env = kit.MemoryEnvironment()
    return await HarnessRun(gateway, 4000, env, TASK, engine, renderer, tool_format("hermes"), rules).run()


@pytest.mark.parametrize(
    ("how", "stop", "turns"),
    [
        ("ends", StopReason.SUBMITTED, 3),
        ("limit", StopReason.MAX_TURNS, 5),
        ("silent", StopReason.HARNESS_FAILURE, 0),
        ("early", StopReason.HARNESS_FAILURE, 0),
        ("fails", StopReason.PROGRAM_FAILED, 3),
        ("hangs", StopReason.TIME_LIMIT, 3),
    ],
)
async def test_endings(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace, how: str, stop: StopReason, turns: int
) -> None:
    engine = kit.Saying(renderer, [kit.call("ls")])
    limits = {"time_limit": 1.5} if how == "hangs" else {}
    trajectory = await drive(gateway, kit, renderer, engine, command("talk.py", how), max_turns=5, **limits)
    assert (trajectory.stop, len(trajectory.turns)) == (stop, turns)
    assert (trajectory.reward is None) == stop.infrastructure
    assert len(trajectory.branches) == 1
    if how == "early":
        assert trajectory.error == "HarnessError: the program ended before a reply reached it (exit code 1: no key)"
    assert gateway.failures == (how in ("silent", "early", "fails"))
    if turns:
        assert trajectory.sampled_tokens == sum(turn.completion_tokens for turn in trajectory.turns)
        assert trajectory.routes_missing == 0


async def test_a_policy_that_ends_its_program_is_graded_and_not_run_again(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace
) -> None:
    """Else it could take back what it expects to lose."""
    engine = kit.Saying(renderer, [kit.call("true"), kit.call("kill -9 $PPID")])
    trajectory = await drive(gateway, kit, renderer, engine, command("talk.py", "obeys"))
    assert (trajectory.stop, trajectory.reward) == (StopReason.PROGRAM_FAILED, 0.0)
    assert trajectory.error == "HarnessError: the program failed (exit code -9: it printed nothing)"
    assert trajectory.sampled_tokens == sum(turn.completion_tokens for turn in trajectory.turns) > 0


ASKING = """
import contextlib, json, os, urllib.error, urllib.request
for tokens in (-1, 5, 6, 7, 8, 9):
    body = {"messages": [{"role": "user", "content": str(tokens)}], "max_tokens": tokens}
    url, head = os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"content-type": "application/json"}
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
"""


async def test_what_the_policy_asks_of_the_endpoint_itself_is_counted_and_ends_nothing_but_its_turns(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace
) -> None:
    """It has its program's environment. What it asks for that cannot be is refused, and no failure of the engine."""
    asking = f"python3 -c {shlex.quote(ASKING)}"
    engine = kit.Saying(renderer, [kit.call(asking), "hi"])
    trajectory = await drive(gateway, kit, renderer, engine, command("talk.py", "obeys"), max_turns=4)
    assert (trajectory.stop, trajectory.reward, len(trajectory.turns)) == (StopReason.MAX_TURNS, 0.0, 4)
    assert engine.asked == 4


async def test_weights_that_change_between_turns_are_told_by_token(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace
) -> None:
    async def before(number: int) -> None:
        engine.scripted.weight_version = f"v{number}"

    engine = kit.Saying(renderer, [kit.call("ls")], before)
    trajectory = await drive(gateway, kit, renderer, engine, command("talk.py", "ends"))
    assert trajectory.weight_versions == ("v1", "v2", "v3")
    assert [turn.weight_version for turn in trajectory.turns] == ["v1", "v2", "v3"]
    assert len(trajectory.branches) == 1


async def test_a_program_killed_within_a_request_ends_what_is_sampled(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace
) -> None:
    never = asyncio.Event()

    async def before(number: int) -> None:
        await never.wait()

    engine = kit.Saying(renderer, ["x"], before)
    trajectory = await drive(gateway, kit, renderer, engine, command("talk.py", "killed"))
    assert trajectory.stop is StopReason.HARNESS_FAILURE
    assert (engine.asked, engine.cancelled) == (1, 1)


@pytest.mark.parametrize("failure", [EngineUnreachable, EngineOverloaded])
async def test_an_engine_that_dies_or_has_no_room_ends_the_episode_at_once(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace, failure: type[Exception]
) -> None:
    async def before(number: int) -> None:
        if number == 2:
            raise failure("it is gone")

    engine = kit.Saying(renderer, [kit.call("ls")], before)
    trajectory = await drive(gateway, kit, renderer, engine, command("talk.py", "hangs"))
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENGINE_FAILURE, None)
    assert trajectory.error == f"{failure.__name__}: it is gone"


async def test_an_unexpected_error_is_a_failure_of_the_episode(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace
) -> None:
    async def before(number: int) -> None:
        raise KeyError("choices")

    engine = kit.Saying(renderer, [kit.call("ls")], before)
    trajectory = await drive(gateway, kit, renderer, engine, command("talk.py", "hangs"))
    assert (trajectory.stop, trajectory.reward) == (StopReason.ENVIRONMENT_ERROR, None)
    assert trajectory.error.startswith("KeyError: 'choices' (")
    assert "Traceback (most recent call last):" in trajectory.error


async def test_routes_that_are_missing_stop_the_run(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace
) -> None:
    engine = kit.Saying(renderer, ["x"])
    engine.scripted._routing = lambda *rows: None
    with pytest.raises(RoutesMissingError, match="received none"):
        await drive(gateway, kit, renderer, engine, command("talk.py", "hangs"))


async def test_the_quickstarts_agent_is_the_built_in_loop_token_by_token(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace
) -> None:
    texts = [kit.call("ls"), "no call", "<tool_call>{", kit.call("fix"), kit.call("fix").replace("bash", "submit")]
    rules = EpisodeRules(RolloutConfig(max_tokens=4000))
    native = await run_episode(
        kit.MemoryEnvironment(), TASK, kit.Saying(renderer, texts), renderer, tool_format("hermes"), rules
    )
    engine = kit.Saying(renderer, texts)
    driven = await drive(gateway, kit, renderer, engine, command("quickstart_agent.py"))
    assert (driven.stop, driven.reward) == (native.stop, native.reward) == (StopReason.SUBMITTED, 1.0)
    assert driven.tokens.tolist() == native.tokens.tolist()
    assert driven.loss_mask.tolist() == native.loss_mask.tolist()
    assert driven.logprobs.tolist() == native.logprobs.tolist()
    assert driven.routing is not None
    assert native.routing is not None
    assert np.array_equal(driven.routing.experts, native.routing.experts)
    assert driven.routing.spans == native.routing.spans
    assert [turn.text for turn in driven.turns] == [turn.text for turn in native.turns]
    assert [turn.observation for turn in driven.turns[:-1]] == [turn.observation for turn in native.turns[:-1]]
    assert engine.scripted.rows_sent == len(driven.tokens) - 1
    assert driven.further == ()


async def test_the_viewer_shows_each_branch_of_a_program_that_rewrites_its_history(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace, tmp_path: Path
) -> None:
    engine = kit.Saying(renderer, [kit.call("ls"), kit.call("fix")])
    driven = await drive(gateway, kit, renderer, engine, command("talk.py", "compacts"), max_turns=5)
    assert [branch.cause for branch in driven.branches] == [BranchCause.START, BranchCause.REWRITE]
    write_trajectories(tmp_path, 1, [Group("t", (driven,))])
    resources = Resources([tmp_path])
    found = resources.read("0/t/1-0")
    assert [turn["branch"] for turn in found["turns"]] == [0, 0, 1]
    for number, branch in enumerate(driven.branches):
        assert branch.routing is not None
        assert np.array_equal(found["branches"][number]["tokens"], branch.tokens)
        routes = resources.read(f"0/routes/1-0.{number}")
        assert routes["experts"] == np.sort(branch.routing.experts, axis=2).tolist()


async def test_an_episode_in_words_hears_the_program_s_last_reply(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    async def hear(self: object, text: str) -> ToolResult:
        heard.append(text)
        return ToolResult("", submitted=True)

    async with kit.MemoryEnvironment().start(TASK) as episode:
        monkeypatch.setattr(type(episode), "hear", hear, raising=False)
    engine = kit.Saying(renderer, ["first", "second", "last"])
    trajectory = await drive(gateway, kit, renderer, engine, command("talk.py", "ends"))
    assert (trajectory.stop, heard) == (StopReason.SUBMITTED, [trajectory.turns[-1].text])


async def test_an_episode_that_never_hears_the_reply_is_given_up(
    gateway: Gateway, renderer: ChatRenderer, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hear(self: object, text: str) -> ToolResult:
        await asyncio.Event().wait()
        raise AssertionError

    async with kit.MemoryEnvironment().start(TASK) as episode:
        monkeypatch.setattr(type(episode), "hear", hear, raising=False)
    engine = kit.Saying(renderer, ["words"])
    async with asyncio.timeout(60):
        trajectory = await drive(gateway, kit, renderer, engine, command("talk.py", "ends"), time_limit=1.5)
    assert trajectory.stop is StopReason.SANDBOX_FAILURE
    assert "hearing the program's last reply took longer than 1.5 s" in trajectory.error
