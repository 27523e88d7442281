"""An episode that was interrupted between turns goes on from its last whole one, or starts over; never as another."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.config import R3Config, RolloutConfig, RunConfig
from agent_rl.controller.journal import EpisodeLog, Journal
from agent_rl.errors import AgentRlError, UserError
from agent_rl.rollout.episode import EpisodeRules, run_episode
from agent_rl.rollout.group import GroupCollector, GroupSettings
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.scripted_policies import ByteRenderer
from agent_rl.rollout.turn_log import LoggedTurn, TurnLog, decode_turn, encode_turn
from agent_rl.types import Completion, FinishReason, Group, StopReason, Trajectory
from envs import Task
from sandbox import SandboxLostError, SandboxNodeLostError
from tools.formats import tool_format

RULES = EpisodeRules(RolloutConfig(describe_tools=False, time_limit=100.0), routes=R3Config())


@dataclass
class ListLog:
    """Turns kept in a list; ``over`` counts how often they were given up."""

    turns: list[LoggedTurn]
    over: int = 0

    async def kept(self) -> Sequence[LoggedTurn]:
        return tuple(self.turns)

    async def keep(self, turn: LoggedTurn) -> None:
        self.turns.append(decode_turn(encode_turn(turn), "a test"))

    async def start_over(self) -> None:
        self.turns.clear()
        self.over += 1


async def drive(env: Any, task: Task, engine: Any, log: TurnLog | None = None) -> Trajectory:
    return await run_episode(env, task, engine, ByteRenderer(), tool_format("hermes"), RULES, log=log)


def alike(a: Trajectory, b: Trajectory) -> bool:
    """Whether they are one but for clocks, and for how often they were interrupted."""

    def plain(trajectory: Trajectory) -> str:
        timed: Any = {"generate_seconds": 0.0, "tool_seconds": 0.0, "began": 0.0}
        strip: Any = {"tokens": None, "loss_mask": None, "logprobs": None, "routing": None, "replayed_turns": 0}
        clocks = {"seconds": 0.0, "grade_seconds": 0.0, "began": 0.0, "start_seconds": 0.0, "grade_began": 0.0}
        turns = tuple(replace(turn, **timed) for turn in trajectory.turns)
        return str(replace(trajectory, turns=turns, recovered=False, **strip, **clocks))

    assert a.routing is not None
    assert b.routing is not None
    arrays = [(a.tokens, b.tokens), (a.loss_mask, b.loss_mask), (a.logprobs, b.logprobs)]
    arrays += [(a.routing.experts, b.routing.experts), (a.routing.present, b.routing.present)]
    return plain(a) == plain(b) and all(np.array_equal(x, y) for x, y in arrays) and a.routing.spans == b.routing.spans


def story(kit: SimpleNamespace) -> list[str]:
    return [kit.call("echo", text="look"), "no call", kit.FIX, kit.call("echo", text="é"), kit.SUBMIT]


VERSIONS = ["3", "3", "4", "5", "5"]


async def whole(env: Any, task: Task, kit: SimpleNamespace) -> tuple[Trajectory, list[LoggedTurn]]:
    """The episode that nothing interrupts, and its turns."""
    log = ListLog([])
    return await drive(env, task, kit.ToldEngine(story(kit), VERSIONS), log), log.turns


@pytest.mark.parametrize("turns", range(6))
async def test_interrupted_after_any_turn_it_is_the_one_that_was_not(
    env: Any, task: Task, kit: SimpleNamespace, turns: int
) -> None:
    uninterrupted, kept = await whole(env, task, kit)
    engine, log = kit.ToldEngine(story(kit)[turns:] or ["never"], VERSIONS[turns:]), ListLog(kept[:turns])
    resumed = await drive(env, task, engine, log)
    assert alike(resumed, uninterrupted)
    assert resumed.replayed_turns == turns
    assert len(engine.prompts) == 5 - turns, "what was sampled is not sampled again"
    assert resumed.turns[:turns] == tuple(logged.turn for logged in kept[:turns]), "with the times it took then"
    assert [logged.turn for logged in log.turns] == list(resumed.turns)
    if turns < 5:
        assert engine.prompts[0] == uninterrupted.tokens[: len(engine.prompts[0])].tolist()
        assert engine.routes_from[0] == (kept[turns - 1].completions[-1].routing is not None) * (
            sum(logged.completions[0].routing.tokens for logged in kept[:turns] if logged.completions[0].routing)
        ), "rows that were sampled with are not asked for"


class AbortingEngine:
    """Cuts a turn after its first token, once, as an update of the weights does."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.cut = engine, False

    async def generate(self, tokens: Any, sampling: Any, **how: Any) -> Completion:
        if self.cut:
            return await self.engine.generate(tokens, sampling, **how)
        self.cut = True
        part = await self.engine.generate(tokens, replace(sampling, max_new_tokens=1), **how)
        self.engine.turns = [self.engine.turns[0], self.engine.turns[0][1:], *self.engine.turns[1:]]
        return replace(part, finish=FinishReason.ABORT, interrupted=True)


async def test_a_turn_cut_by_an_update_is_kept_in_its_parts(env: Any, task: Task, kit: SimpleNamespace) -> None:
    log = ListLog([])
    engine = AbortingEngine(kit.ToldEngine([kit.FIX, kit.SUBMIT], ["3", "4", "4"]))
    uninterrupted = await drive(env, task, engine, log)
    assert [len(logged.completions) for logged in log.turns] == [2, 1]
    resumed = await drive(env, task, kit.ToldEngine([kit.SUBMIT], ["4"]), ListLog(log.turns[:1]))
    assert alike(resumed, uninterrupted)
    assert resumed.weight_versions == ("3", "4")


class Forgetful:
    """An environment whose tools answer otherwise in every sandbox."""

    def __init__(self, env: Any) -> None:
        self.env, self.name = env, env.name

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[Any]:
        async with self.env.start(task) as episode:
            call, sandbox = episode.tools.call, self.env.started

            async def differing(asked: Any) -> Any:
                result = await call(asked)
                return replace(result, text=f"{result.text} in sandbox {sandbox}")

            episode.tools.call = differing
            yield episode


async def test_where_a_tool_answers_otherwise_it_starts_over(env: Any, task: Task, kit: SimpleNamespace) -> None:
    log = ListLog([])
    await drive(Forgetful(env), task, kit.ToldEngine([kit.FIX, kit.SUBMIT]), log)
    kept, log = log.turns[:1], ListLog(log.turns[:1])
    fresh = kit.ToldEngine([kit.FIX, kit.SUBMIT], ["7", "7"])
    again = await drive(Forgetful(env), task, fresh, log)
    assert (log.over, again.replayed_turns, len(fresh.prompts), env.open) == (1, 0, 2, 0)
    assert again.weight_versions == ("7",), "nothing sampled before is left in it"
    assert again.turns[0].observation == "fix in sandbox 3"
    other = replace(kept[0], prompt_hash="another prompt")
    log = ListLog([other])
    await drive(env, task, kit.ToldEngine([kit.FIX, kit.SUBMIT]), log)
    assert log.over == 1


async def test_the_time_limit_counts_what_was_spent_before_and_not_the_calls_made_again(
    env: Any, task: Task, kit: SimpleNamespace
) -> None:
    _, kept = await whole(env, task, kit)
    assert 0 < kept[2].seconds_left < kept[0].seconds_left <= 100
    engine = kit.ToldEngine(story(kit)[3:])
    engine.before = partial(asyncio.sleep, 1)
    ended = await drive(env, task, engine, ListLog([*kept[:2], replace(kept[2], seconds_left=0.001)]))
    assert (ended.stop, ended.reward, len(ended.turns)) == (StopReason.TIME_LIMIT, 1.0, 3)


async def test_calls_made_again_that_do_not_end_are_given_up_like_a_sandbox_that_failed(
    env: Any, task: Task, kit: SimpleNamespace
) -> None:
    _, kept = await whole(env, task, kit)
    env.on_call = asyncio.Event().wait
    rules = replace(RULES, rollout=RULES.rollout.model_copy(update={"time_limit": 0.01}))
    parts: Any = (env, task, kit.ToldEngine([]), ByteRenderer(), tool_format("hermes"), rules)
    async with asyncio.timeout(10):
        ended = await run_episode(*parts, log=ListLog(kept[:1]))
    assert ended.stop is StopReason.SANDBOX_FAILURE
    assert "replaying the tool calls took longer than 0.01 s" in ended.error
    assert env.open == 0


def opened(directory: Path) -> Journal:
    journal = Journal(directory, "run", turns=True)
    journal.recover(5, {}, lambda position: True)
    return journal


async def test_an_episode_whose_host_is_lost_goes_on_in_another_sandbox(
    tmp_path: Path, env: Any, task: Task, kit: SimpleNamespace
) -> None:
    """Through the group that runs it and the journal: its host is lost within the third turn's call, and again while
    the second's is made again."""
    calls = itertools.count()

    async def lost() -> None:
        if next(calls) in (2, 4):
            raise SandboxNodeLostError("host 2 is gone")

    env.on_call = lost
    journal, engine = opened(tmp_path), kit.ToldEngine([kit.FIX, kit.FIX, kit.FIX, kit.FIX, kit.SUBMIT])
    await journal.begin(6, "w5")
    run = journal.runner(0, lambda task, log=None: drive(env, task, engine, log))
    events: list[Any] = []
    group = await GroupCollector(GroupSettings(1, retries=0), Limiter(1), events.append).collect(task, run)
    assert isinstance(group, Group)
    ended = group.trajectories[0]
    assert [event.trajectory.stop for event in events if event.trajectory] == ["node_lost", "node_lost", "submitted"]
    assert (len(ended.turns), ended.replayed_turns, ended.reward) == (4, 2, 1.0)
    assert len(engine.prompts) == 5, "of all turns only the one that was lost with the sandbox was sampled again"
    metrics = journal.metrics(6)
    assert (metrics["recover/episodes"], metrics["recover/turns"], metrics["recover/differed"]) == (1, 2, 0)


async def test_one_whose_sandbox_broke_is_begun_anew(
    tmp_path: Path, env: Any, task: Task, kit: SimpleNamespace
) -> None:
    """What it had run may have broken it: it would break again."""
    calls = itertools.count()

    async def breaks() -> None:
        if next(calls) == 1:
            raise SandboxLostError("out of memory")

    env.on_call = breaks
    journal = opened(tmp_path)
    await journal.begin(6, "w5")
    run = journal.runner(0, lambda task, log=None: drive(env, task, kit.ToldEngine([kit.FIX, kit.SUBMIT]), log))
    assert (await run(task)).stop is StopReason.SANDBOX_FAILURE
    assert (await run(task)).replayed_turns == 0
    journal.close()
    again = opened(tmp_path)
    await again.begin(6, "w5")
    assert again.metrics(6)["recover/turns"] == 0
    found = [await again.runner(0, lambda task, log=None: drive(env, task, kit.ToldEngine([kit.SUBMIT]), log))(task)
             for _ in range(2)]  # fmt: skip
    assert [(each.recovered, each.replayed_turns) for each in found] == [(True, 0), (False, 0)]


@pytest.mark.parametrize(("oldest", "turns"), [(3, 2), (4, 0)])
async def test_one_whose_first_tokens_are_too_old_for_its_batch_is_begun_anew(
    tmp_path: Path, env: Any, task: Task, kit: SimpleNamespace, oldest: int, turns: int
) -> None:
    uninterrupted, _ = await whole(env, task, kit)
    await killed_after(tmp_path, env, task, kit, 2)
    journal = opened(tmp_path)
    await journal.begin(6, "w5")
    engine = kit.ToldEngine(story(kit)[turns:], VERSIONS[turns:])
    ended = await journal.runner(0, lambda task, log=None: drive(env, task, engine, log), oldest)(task)
    assert ended.replayed_turns == turns
    assert alike(ended, uninterrupted)
    counts = {
        "recover/episodes": float(turns > 0), "recover/turns": turns, "recover/differed": 0,
        "recover/too_old": float(turns == 0),
    }  # fmt: skip
    assert journal.metrics(6) == counts
    journal.close()
    again = opened(tmp_path)
    await again.begin(6, "w5")
    assert again.metrics(6) == counts, "a run that was killed before it wrote its step's row tells it in the next start"


async def killed_after(directory: Path, env: Any, task: Task, kit: SimpleNamespace, turns: int) -> Path:
    """A run is killed when the episode of position 0 has kept so many turns; its journal."""
    journal, reached = opened(directory), asyncio.Event()
    await journal.begin(6, "w5")

    async def waits() -> None:
        if len(engine.prompts) > turns:
            reached.set()
            await asyncio.Event().wait()

    engine = kit.ToldEngine(story(kit), VERSIONS, before=waits)
    running = asyncio.create_task(
        journal.runner(0, lambda task, log=None: drive(env, task, engine, log))(task)  # type: ignore[arg-type]
    )
    await asyncio.wait({running, asyncio.create_task(reached.wait())}, return_when="FIRST_COMPLETED")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    journal.close()
    return directory / "step-000006.journal"


def test_wherever_a_kill_cuts_the_journal_the_episode_is_the_one_that_was_not_killed(
    tmp_path_factory: pytest.TempPathFactory, env: Any, task: Task, kit: SimpleNamespace
) -> None:
    directory = tmp_path_factory.mktemp("whole")
    data = asyncio.run(killed_after(directory, env, task, kit, 9)).read_bytes()
    uninterrupted, kept = asyncio.run(whole(env, task, kit))

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(data)))
    def cut(at: int) -> None:
        asyncio.run(go_on(tmp_path_factory.mktemp("cut"), at))

    class Engine(kit.ToldEngine):  # type: ignore[misc]
        """Answers the turn whose prompt it is asked."""

        async def generate(self, tokens: Any, *args: Any, **how: Any) -> Completion:
            turn = [logged.turn.prompt_tokens for logged in kept].index(len(tokens))
            self.prompts.append(turn)
            return await kit.ToldEngine(story(kit)[turn:], VERSIONS[turn:]).generate(tokens, *args, **how)

    async def start(directory: Path) -> tuple[Trajectory, list[int]]:
        journal, engine = opened(directory), Engine([])
        await journal.begin(6, "w5")
        ended = await journal.runner(0, lambda task, log=None: drive(env, task, engine, log))(task)
        journal.close()
        return ended, engine.prompts

    async def go_on(directory: Path, at: int) -> None:
        (directory / "step-000006.journal").write_bytes(data[:at])
        ended, asked = await start(directory)
        assert alike(ended, uninterrupted)
        assert asked == ([] if ended.recovered else list(range(ended.replayed_turns, 5)))
        again, asked = await start(directory)
        assert alike(again, uninterrupted)
        assert (again.recovered, asked) == (True, []), "it finished, and is not run a second time"

    cut()


async def test_a_full_disk_is_one_line(tmp_path: Path, env: Any, task: Task, kit: SimpleNamespace) -> None:
    journal = opened(tmp_path)
    await journal.begin(6, "w5")
    journal._file = os.fdopen(os.open("/dev/full", os.O_RDWR), "r+b", buffering=0)
    run = journal.runner(0, lambda task, log=None: drive(env, task, kit.ToldEngine([kit.SUBMIT]), log))
    with pytest.raises(UserError, match=r"step-000006\.journal: the disk is full"):
        await run(task)
    assert env.open == 0


async def test_turns_of_weights_that_a_step_done_again_did_not_give_are_forgotten(
    tmp_path: Path, env: Any, task: Task, kit: SimpleNamespace
) -> None:
    """One turn lies in the file of step 6, the next in that of step 7, whose weights are others now."""
    _, kept = await whole(env, task, kit)
    first = opened(tmp_path)
    await first.begin(6, "w5")

    async def two_turns(task: Task, log: TurnLog | None = None) -> Trajectory:
        assert log is not None
        await log.keep(kept[0])
        await first.begin(7, "w6")
        await log.keep(kept[1])
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await first.runner(0, two_turns)(task)
    first.close()
    for weights, turns in (("w6", 2), ("another", 1)):
        journal = opened(tmp_path)
        await journal.begin(6, "w5")
        waiting = asyncio.create_task(journal.wait_usable(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await journal.begin(7, weights)
        await waiting
        taken_up = EpisodeLog(journal, 0, 0)
        assert len(await taken_up.kept()) == turns
        journal.close()


def test_what_is_no_turn_is_refused_in_a_line() -> None:
    with pytest.raises(AgentRlError, match=r"step-000006\.journal: not a turn"):
        decode_turn(b"\x08\0\0\0\0\0\0\0nonsense", "step-000006.journal")


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"rollout": {"recover": "turns", "harness": {"command": "x"}}}, "rollout.harness"),
        ({"rollout": {"recover": "turns"}, "r3": {"source": "latest"}}, "r3.source"),
    ],
)
def test_a_config_that_can_not_recover_is_refused(keys: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        RunConfig.model_validate({"name": "a", "model": "m", **keys})
