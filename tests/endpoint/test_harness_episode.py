"""Episodes that a program drives: how each ends, and that a linear one is the built-in loop's token by token."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.endpoint_sessions import MemoryEnvironment, MemoryEpisode, call

from agent_rl.config import HarnessConfig, RolloutConfig
from agent_rl.endpoint.server import EndpointServer
from agent_rl.errors import EngineOverloaded, EngineUnreachable, RoutesMissingError
from agent_rl.render import ChatRenderer
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.records import write_trajectories
from agent_rl.types import BranchCause, Group, StopReason
from agent_rl.viewer.api import Resources
from envs import Task
from tools import ToolResult, tool_format

PROGRAMS = Path(__file__).parent / "programs"
TASK = Task("t", "memory", {})


def on_host(*command: str) -> HarnessConfig:
    program, *arguments = command
    run = shlex.join([sys.executable, str(PROGRAMS / program), *arguments])
    return HarnessConfig(command=run, location="host")


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
async def test_a_program_ends(
    say: Any, drive: Any, endpoint: EndpointServer, how: str, stop: StopReason, turns: int
) -> None:
    engine = say(call("ls"))
    limits = {"time_limit": 1.5} if how == "hangs" else {}
    trajectory = await drive(engine, on_host("talk.py", how), max_turns=5, **limits)
    assert (trajectory.stop, len(trajectory.turns)) == (stop, turns)
    assert (trajectory.reward is None) == stop.infrastructure
    assert len(trajectory.branches) == 1
    if how == "early":
        assert trajectory.error == "HarnessError: the program ended before a reply reached it (exit code 1: no key)"
    assert endpoint.failures == (how in ("silent", "early", "fails"))
    if turns:
        assert trajectory.sampled_tokens == sum(turn.completion_tokens for turn in trajectory.turns)
        assert trajectory.routes_missing == 0


async def test_a_policy_that_kills_its_program_is_graded(say: Any, drive: Any) -> None:
    """The episode is not repeated: the policy could otherwise undo an expected loss."""
    engine = say(call("true"), call("kill -9 $PPID"))
    trajectory = await drive(engine, on_host("talk.py", "obeys"))
    assert (trajectory.stop, trajectory.reward) == (StopReason.PROGRAM_FAILED, 0.0)
    assert trajectory.error == "HarnessError: the program failed (exit code -9: it printed nothing)"
    assert trajectory.sampled_tokens == sum(turn.completion_tokens for turn in trajectory.turns) > 0


REQUESTS = """
import contextlib, json, os, urllib.error, urllib.request
for tokens in (-1, 5, 6, 7, 8, 9):
    body = {"messages": [{"role": "user", "content": str(tokens)}], "max_tokens": tokens}
    url, head = os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"content-type": "application/json"}
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
"""


async def test_the_policys_own_requests_to_the_endpoint_count_as_turns(say: Any, drive: Any) -> None:
    """It has its program's environment. A wrong request of it is refused and is no failure of the engine."""
    requests = f"python3 -c {shlex.quote(REQUESTS)}"
    engine = say(call(requests), "hi")
    trajectory = await drive(engine, on_host("talk.py", "obeys"), max_turns=4)
    assert (trajectory.stop, trajectory.reward, len(trajectory.turns)) == (StopReason.MAX_TURNS, 0.0, 4)
    assert engine.requests == 4


async def test_each_turn_has_its_weight_version_and_kept_tokens(say: Any, drive: Any) -> None:
    async def before(number: int) -> None:
        engine.scripted.weight_version = f"v{number}"

    engine = say(call("ls"), before=before)
    trajectory = await drive(engine, on_host("talk.py", "ends"), top_k=2)
    assert trajectory.weight_versions == ("v1", "v2", "v3")
    trajectory.kept.check(trajectory.tokens[trajectory.loss_mask])
    assert set(trajectory.kept.counts) == {2}
    assert [turn.weight_version for turn in trajectory.turns] == ["v1", "v2", "v3"]
    assert len(trajectory.branches) == 1


async def test_a_program_killed_within_a_request_cancels_it(say: Any, drive: Any) -> None:
    never = asyncio.Event()

    async def before(number: int) -> None:
        await never.wait()

    engine = say("x", before=before)
    trajectory = await drive(engine, on_host("talk.py", "killed"))
    assert trajectory.stop is StopReason.HARNESS_FAILURE
    assert (engine.requests, engine.cancelled) == (1, 1)


@pytest.mark.parametrize(
    ("failure", "stop", "message"),
    [
        (EngineUnreachable("it is gone"), StopReason.ENGINE_FAILURE, "EngineUnreachable: it is gone"),
        (EngineOverloaded("it is full"), StopReason.ENGINE_FAILURE, "EngineOverloaded: it is full"),
        (KeyError("choices"), StopReason.ENVIRONMENT_ERROR, "KeyError: 'choices' ("),
    ],
)
async def test_a_failure_of_the_engine_ends_the_episode(
    say: Any, drive: Any, failure: Exception, stop: StopReason, message: str
) -> None:
    async def before(number: int) -> None:
        if number == 2:
            raise failure

    trajectory = await drive(say(call("ls"), before=before), on_host("talk.py", "hangs"))
    assert (trajectory.stop, trajectory.reward) == (stop, None)
    assert trajectory.error.startswith(message)
    assert ("Traceback (most recent call last):" in trajectory.error) == (stop is StopReason.ENVIRONMENT_ERROR)


async def test_missing_routes_stop_the_run(say: Any, drive: Any) -> None:
    engine = say("x")
    engine.scripted._routing = lambda *rows: None
    with pytest.raises(RoutesMissingError, match="received none"):
        await drive(engine, on_host("talk.py", "hangs"))


async def test_the_quickstarts_agent_equals_the_built_in_loop_token_by_token(
    say: Any, drive: Any, renderer: ChatRenderer
) -> None:
    texts = [call("ls"), "no call", "<tool_call>{", call("fix"), call("fix").replace("bash", "submit")]
    rules = EpisodeRules(RolloutConfig(max_tokens=4000))
    native = await run_episode(MemoryEnvironment(), TASK, say(*texts), renderer, tool_format("hermes"), rules)
    engine = say(*texts)
    driven = await drive(engine, on_host("quickstart_agent.py"))
    assert (driven.stop, driven.reward) == (native.stop, native.reward) == (StopReason.SUBMITTED, 1.0)
    for name in ("tokens", "loss_mask", "logprobs"):
        assert getattr(driven, name).tolist() == getattr(native, name).tolist()
    assert driven.routing is not None
    assert native.routing is not None
    assert np.array_equal(driven.routing.experts, native.routing.experts)
    assert driven.routing.spans == native.routing.spans
    assert [turn.text for turn in driven.turns] == [turn.text for turn in native.turns]
    assert [turn.observation for turn in driven.turns[:-1]] == [turn.observation for turn in native.turns[:-1]]
    assert engine.scripted.rows_sent == len(driven.tokens) - 1
    assert driven.further == ()


async def test_the_viewer_shows_each_branch_of_a_rewritten_history(say: Any, drive: Any, tmp_path: Path) -> None:
    driven = await drive(say(call("ls"), call("fix")), on_host("talk.py", "compacts"), max_turns=5)
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


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_episode_without_tools_gets_the_programs_last_reply(
    say: Any, drive: Any, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    received: list[str] = []

    async def respond(self: object, text: str) -> ToolResult:
        received.append(text)
        if hangs:
            await asyncio.Event().wait()
        return ToolResult("", submitted=True)

    monkeypatch.setattr(MemoryEpisode, "respond", respond, raising=False)
    refused = await drive(say("first"), on_host("talk.py", "ends"))
    assert refused.error == "HarnessError: environment memory has a user beside its tools: omit rollout.harness"
    monkeypatch.delattr(MemoryEpisode, "tools")
    limits = {"time_limit": 1.5} if hangs else {}
    async with asyncio.timeout(60):
        trajectory = await drive(say("first", "second", "last"), on_host("talk.py", "ends"), **limits)
    assert received == [trajectory.turns[-1].text]
    assert trajectory.stop is (StopReason.SANDBOX_FAILURE if hangs else StopReason.SUBMITTED)
    assert ("handling the program's last reply took longer than 1.5 s" in trajectory.error) == hangs
