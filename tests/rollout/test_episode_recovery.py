"""An episode that was interrupted between turns continues after its last whole turn, or starts over."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import memory_env
from support.memory_env import FIX, SUBMIT, TASK, InterruptedEngine, MemoryEnvironment, TurnsEngine, call
from support.plain_values import CLOCKS, plain

from agent_rl.config import R3Config, RolloutConfig, RunConfig
from agent_rl.controller.journal import EpisodeLog, Journal
from agent_rl.errors import AgentRlError, UserError
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.episode_recovery import LoggedTurn, TurnLog, decode_turn, encode_turn
from agent_rl.rollout.group import GroupCollector, GroupSettings, Limiter
from agent_rl.types import Completion, Group, StopReason, Trajectory
from envs import Task
from sandbox import SandboxLostError, SandboxNodeLostError

TURNS = [call("echo", text="look"), "no call", FIX, call("echo", text="é"), SUBMIT]
VERSIONS = ["3", "3", "4", "5", "5"]


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


async def drive(engine: Any, log: TurnLog | None = None, env: Any = None, time_limit: float = 100.0) -> Trajectory:
    rules = EpisodeRules(RolloutConfig(describe_tools=False, time_limit=time_limit, top_p=0.9), routes=R3Config())
    return await memory_env.run_memory_episode(engine, env, rules=rules, log=log)


def alike(a: Trajectory, b: Trajectory) -> bool:
    """Whether they are equal but for clocks, and for how often they were interrupted."""
    ignored = (*CLOCKS, "recovered", "replayed_turns")
    return plain(a, *ignored) == plain(b, *ignored)


async def whole() -> tuple[Trajectory, list[LoggedTurn]]:
    """The episode without interruption, and its turns."""
    log = ListLog([])
    return await drive(TurnsEngine(TURNS, VERSIONS), log), log.turns


@pytest.mark.parametrize("turns", range(6))
async def test_an_episode_interrupted_after_any_turn_equals_the_uninterrupted_one(turns: int) -> None:
    uninterrupted, kept = await whole()
    engine, log = TurnsEngine(TURNS[turns:] or ["never"], VERSIONS[turns:]), ListLog(kept[:turns])
    resumed = await drive(engine, log)
    assert alike(resumed, uninterrupted)
    assert resumed.replayed_turns == turns
    assert len(engine.prompts) == 5 - turns, "what was sampled is not sampled again"
    assert resumed.turns[:turns] == tuple(logged.turn for logged in kept[:turns]), "with the times it took then"
    assert [logged.turn for logged in log.turns] == list(resumed.turns)
    if turns < 5:
        assert engine.prompts[0] == uninterrupted.tokens[: len(engine.prompts[0])].tolist()
        routings = [logged.completions[0].routing for logged in kept[:turns]]
        assert engine.routes_from[0] == sum(routing.tokens for routing in routings if routing is not None)


async def test_a_turn_interrupted_by_an_update_is_kept_in_its_parts() -> None:
    log = ListLog([])
    uninterrupted = await drive(InterruptedEngine([FIX, SUBMIT], [1], published=True), log)
    assert [len(logged.completions) for logged in log.turns] == [2, 1]
    resumed = await drive(TurnsEngine([SUBMIT], ["2"]), ListLog(log.turns[:1]))
    assert alike(resumed, uninterrupted)
    assert resumed.weight_versions == ("0", "1", "2")


class DifferingEnvironment(MemoryEnvironment):
    """Its tools return another text in every sandbox."""

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[Any]:
        async with super().start(task) as episode:
            call, sandbox = episode.tools.call, self.started

            async def differing(asked: Any) -> Any:
                result = await call(asked)
                return replace(result, text=f"{result.text} in sandbox {sandbox}")

            episode.tools.call = differing
            yield episode


async def test_an_episode_starts_over_where_a_tool_returns_another_result() -> None:
    env, log = DifferingEnvironment(), ListLog([])
    await drive(TurnsEngine([FIX, SUBMIT]), log, env)
    kept, log = log.turns[:1], ListLog(log.turns[:1])
    fresh = TurnsEngine([FIX, SUBMIT], ["7", "7"])
    again = await drive(fresh, log, env)
    assert (log.over, again.replayed_turns, len(fresh.prompts), env.open) == (1, 0, 2, 0)
    assert again.weight_versions == ("7",), "nothing sampled before is left in it"
    assert again.turns[0].observation == "fix in sandbox 3"
    log = ListLog([replace(kept[0], prompt_hash="another prompt")])
    await drive(TurnsEngine([FIX, SUBMIT]), log)
    assert log.over == 1


async def test_the_time_limit_counts_earlier_time_and_not_replayed_calls() -> None:
    _, kept = await whole()
    assert 0 < kept[2].seconds_left < kept[0].seconds_left <= 100
    engine = TurnsEngine(TURNS[3:], before=partial(asyncio.sleep, 1))
    ended = await drive(engine, ListLog([*kept[:2], replace(kept[2], seconds_left=0.001)]))
    assert (ended.stop, ended.reward, len(ended.turns)) == (StopReason.TIME_LIMIT, 1.0, 3)


async def test_replayed_calls_that_hang_are_a_sandbox_failure() -> None:
    _, kept = await whole()
    env = MemoryEnvironment(on_call=asyncio.Event().wait)
    async with asyncio.timeout(10):
        ended = await drive(TurnsEngine([]), ListLog(kept[:1]), env, time_limit=0.01)
    assert ended.stop is StopReason.SANDBOX_FAILURE
    assert "replaying the tool calls took longer than 0.01 s" in ended.error
    assert env.open == 0


async def started(directory: Path) -> Journal:
    """A journal of a run whose last checkpoint is of step 5, in step 6."""
    journal = Journal(directory, "run", turns=True)
    journal.recover(5, {}, lambda position: True)
    await journal.begin(6, "w5")
    return journal


def runner(journal: Journal, engine: Any, env: Any = None, oldest: int = 0) -> Callable[[Task], Any]:
    """Runs the episode of position 0."""
    return journal.runner(0, lambda task, log=None: drive(engine, log, env), oldest)


def failing(error: Exception, numbers: Iterable[int]) -> MemoryEnvironment:
    """Its tool calls of these numbers, over all sandboxes, raise ``error``."""
    calls = itertools.count()

    async def fail() -> None:
        if next(calls) in numbers:
            raise error

    return MemoryEnvironment(on_call=fail)


async def test_an_episode_whose_node_is_lost_continues_in_another_sandbox(tmp_path: Path) -> None:
    """Its node is lost within the third turn's call, and again when the second turn's call is replayed."""
    env, engine = failing(SandboxNodeLostError("node 2 is gone"), (2, 4)), TurnsEngine([FIX, FIX, FIX, FIX, SUBMIT])
    journal, events = await started(tmp_path), list[Any]()
    collector = GroupCollector(GroupSettings(1, retries=0), Limiter(1), events.append)
    group = await collector.collect(TASK, runner(journal, engine, env))
    assert isinstance(group, Group)
    ended = group.trajectories[0]
    assert [event.trajectory.stop for event in events if event.trajectory] == ["node_lost", "node_lost", "submitted"]
    assert (len(ended.turns), ended.replayed_turns, ended.reward) == (4, 2, 1.0)
    assert len(engine.prompts) == 5, "of all turns only the one that was lost with the sandbox was sampled again"
    metrics = journal.metrics(6)
    assert (metrics["recover/episodes"], metrics["recover/turns"], metrics["recover/differed"]) == (1, 2, 0)


async def test_an_episode_whose_sandbox_broke_starts_over(tmp_path: Path) -> None:
    """Its own calls could have broken the sandbox, and would break the next one."""
    env, journal = failing(SandboxLostError("out of memory"), (1,)), await started(tmp_path)
    run = runner(journal, TurnsEngine([FIX, SUBMIT]), env)
    assert (await run(TASK)).stop is StopReason.SANDBOX_FAILURE
    assert (await run(TASK)).replayed_turns == 0
    journal.close()
    again = await started(tmp_path)
    assert again.metrics(6)["recover/turns"] == 0
    found = [await runner(again, TurnsEngine([SUBMIT]), env)(TASK) for _ in range(2)]
    assert [(each.recovered, each.replayed_turns) for each in found] == [(True, 0), (False, 0)]


@pytest.mark.parametrize(("oldest", "turns"), [(3, 2), (4, 0)])
async def test_an_episode_whose_first_tokens_are_too_old_starts_over(tmp_path: Path, oldest: int, turns: int) -> None:
    uninterrupted, _ = await whole()
    await killed_after(tmp_path, 2)
    journal = await started(tmp_path)
    ended = await runner(journal, TurnsEngine(TURNS[turns:], VERSIONS[turns:]), oldest=oldest)(TASK)
    assert ended.replayed_turns == turns
    assert alike(ended, uninterrupted)
    counts = {"episodes": float(turns > 0), "turns": turns, "differed": 0, "too_old": float(turns == 0)}
    expected = {f"recover/{name}": count for name, count in counts.items()}
    assert journal.metrics(6) == expected
    journal.close()
    again = await started(tmp_path)
    assert again.metrics(6) == expected, "a run killed before it wrote its step's row reports them in the next start"


async def killed_after(directory: Path, turns: int) -> Path:
    """A run is killed when the episode of position 0 has kept ``turns`` turns; its journal."""
    journal, reached = await started(directory), asyncio.Event()

    async def waits() -> None:
        if len(engine.prompts) > turns:
            reached.set()
            await asyncio.Event().wait()

    engine = TurnsEngine(TURNS, VERSIONS, before=waits)
    running = asyncio.ensure_future(runner(journal, engine)(TASK))
    await asyncio.wait({running, asyncio.create_task(reached.wait())}, return_when="FIRST_COMPLETED")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    journal.close()
    return directory / "step-000006.journal"


def test_a_journal_truncated_anywhere_changes_no_episode(tmp_path_factory: pytest.TempPathFactory) -> None:
    data = asyncio.run(killed_after(tmp_path_factory.mktemp("whole"), 9)).read_bytes()
    uninterrupted, kept = asyncio.run(whole())

    class Engine(TurnsEngine):
        """Samples the turn that belongs to the prompt."""

        async def generate(self, tokens: Any, *args: Any, **how: Any) -> Completion:
            turn = [logged.turn.prompt_tokens for logged in kept].index(len(tokens))
            self.prompts.append(turn)
            return await TurnsEngine(TURNS[turn:], VERSIONS[turn:]).generate(tokens, *args, **how)

    async def start(directory: Path) -> tuple[Trajectory, list[Any]]:
        journal, engine = await started(directory), Engine([])
        ended = await runner(journal, engine)(TASK)
        journal.close()
        return ended, engine.prompts

    async def resume(directory: Path, at: int) -> None:
        (directory / "step-000006.journal").write_bytes(data[:at])
        ended, sampled = await start(directory)
        assert alike(ended, uninterrupted)
        assert sampled == ([] if ended.recovered else list(range(ended.replayed_turns, 5)))
        again, sampled = await start(directory)
        assert alike(again, uninterrupted)
        assert (again.recovered, sampled) == (True, []), "it finished, and is not run a second time"

    @settings(max_examples=60)
    @given(st.integers(0, len(data)))
    def truncated(at: int) -> None:
        asyncio.run(resume(tmp_path_factory.mktemp("cut"), at))

    truncated()


async def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    env, journal = MemoryEnvironment(), await started(tmp_path)
    journal._file = os.fdopen(os.open("/dev/full", os.O_RDWR), "r+b", buffering=0)
    with pytest.raises(UserError, match=r"step-000006\.journal: the disk is full"):
        await runner(journal, TurnsEngine([SUBMIT]), env)(TASK)
    assert env.open == 0


async def test_turns_sampled_with_weights_of_another_lineage_are_forgotten(tmp_path: Path) -> None:
    """One turn is in the file of step 6, the next in that of step 7, whose weights are others after the repeat."""
    _, kept = await whole()
    first = await started(tmp_path)

    async def two_turns(task: Task, log: TurnLog | None = None) -> Trajectory:
        await log.keep(kept[0])
        await first.begin(7, "w6")
        await log.keep(kept[1])
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await first.runner(0, two_turns)(TASK)
    first.close()
    for weights, turns in (("w6", 2), ("another", 1)):
        journal = await started(tmp_path)
        waiting = asyncio.create_task(journal.wait_usable(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await journal.begin(7, weights)
        await waiting
        assert len(await EpisodeLog(journal, 0, 0).kept()) == turns
        journal.close()


def test_a_malformed_turn_is_refused_in_a_line() -> None:
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
