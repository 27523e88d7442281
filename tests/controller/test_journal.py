"""What finished is used again, once, if it was sampled with the same weights; whatever a kill tore off."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support.trajectories
from hypothesis import given
from hypothesis import strategies as st
from support.plain_values import plain

from agent_rl.controller.journal import Journal, lineage
from agent_rl.rollout.turn_log import LoggedRunner, TurnLog
from agent_rl.types import StopReason, Trajectory, Turn
from envs import Task
from r3.routing import Routing, Span, SpanKind


def trajectory(task: str, seed: int, stop: StopReason = StopReason.SUBMITTED) -> Trajectory:
    """Five tokens, routed to two of four experts in two layers, in no order within a row."""
    generator, made = np.random.default_rng(seed), support.trajectories.trajectory(1.0, stop=stop, task_id=task)
    experts = generator.random((5, 2, 4)).argsort(axis=-1)[..., :2].astype(np.uint8)
    experts[-1] = 0
    spans = (Span(0, 4, "3", "http://e", SpanKind.SAMPLED), Span(4, 5, "3", "http://e", SpanKind.MISSING))
    turn = Turn("hi", "bash", {"cmd": "ls"}, None, "a", 3, 2, 0, 0, "3", 0.5, 0.25)
    logprobs = np.where(made.loss_mask, generator.standard_normal(5), 0).astype(np.float32)
    arrays = {"tokens": made.tokens + np.int32(seed), "logprobs": logprobs}
    routing = Routing(experts, np.arange(5) < 4, spans, 4)
    reward, messages = None if stop.infrastructure else 1.0, ({"role": "user", "content": "x"},)
    return replace(made, **arrays, routing=routing, reward=reward, turns=(turn,), messages=messages)


def same(a: Trajectory, b: Trajectory) -> bool:
    """Whether they are the same but for which start ran them."""
    return plain(a, "recovered") == plain(b, "recovered")


def task(name: str) -> Task:
    return Task(name, "mini", {})


def giving(*trajectories: Trajectory) -> tuple[LoggedRunner, list[str]]:
    """An episode runner that gives these, one after the other, and the tasks that it ran."""
    waiting, ran = list(trajectories), []

    async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
        ran.append(task.id)
        return waiting.pop(0)

    return run, ran


async def opened(
    directory: Path, run_id: str = "run", step: int = 8, weights: str = "w7", after: int | None = None
) -> Opened:
    """The journal of a run that goes on after ``after``, or the step before ``step``, which begins."""
    journal = Journal(directory, run_id)
    journal.recover(step - 1 if after is None else after, {}, lambda position: True)
    return Opened(journal, await journal.begin(step, weights), directory / f"step-{step:06d}.journal")


@dataclass
class Opened:
    """A journal, how many trajectories the step had that began, and where they are."""

    journal: Journal
    found: int
    path: Path

    async def finish(self, *trajectories: Trajectory, position: int | None = None) -> None:
        """Episodes that end while the journal is open, each at the position that its task's name is of."""
        run, _ = giving(*trajectories)
        for each in trajectories:
            at = POSITIONS[each.task_id] if position is None else position
            await self.journal.runner(at, run)(task(each.task_id))
        self.journal.close()


POSITIONS = {name: at for at, name in enumerate("abc")}
FIRST, SECOND, OTHER = trajectory("a", 1), trajectory("a", 2), trajectory("b", 3)


async def test_what_finished_is_given_again_bit_for_bit_and_once(tmp_path: Path) -> None:
    await (await opened(tmp_path)).finish(FIRST, OTHER, SECOND)
    again = await opened(tmp_path)
    assert again.found == 3
    fresh = trajectory("a", 9)
    run, ran = giving(fresh)
    found = [await again.journal.runner(POSITIONS[name], run)(task(name)) for name in ("a", "b", "a", "a")]
    assert all(map(same, found, (FIRST, OTHER, SECOND, fresh)))
    assert ran == ["a"], "only the fourth was sampled"
    assert [trajectory.recovered for trajectory in found] == [True, True, True, False]
    again.journal.close()
    assert (await opened(tmp_path)).found == 4, "and written down too"


async def test_one_task_in_flight_twice_is_kept_apart_by_its_positions(tmp_path: Path) -> None:
    """At the edge of an epoch: the last of one, and the first of the next."""
    journal = await opened(tmp_path)
    for position, each in ((7, FIRST), (8, SECOND)):
        await journal.journal.runner(position, giving(each)[0])(task("a"))
    journal.journal.close()
    again = (await opened(tmp_path)).journal
    second, first = [await again.runner(position, giving()[0])(task("a")) for position in (8, 7)]
    assert same(second, SECOND)
    assert same(first, FIRST)


@pytest.mark.parametrize(("run_id", "weights"), [("other", "w7"), ("run", "w7b")])
async def test_other_weights_or_another_run_start_anew(tmp_path: Path, run_id: str, weights: str) -> None:
    await (await opened(tmp_path)).finish(FIRST)
    other = await opened(tmp_path, run_id, weights=weights)
    assert other.found == 0
    await other.finish(OTHER)
    assert (await opened(tmp_path, run_id, weights=weights)).found == 1
    assert (await opened(tmp_path)).found == 0


async def test_an_episode_of_weights_that_are_yet_to_come_waits_for_them(tmp_path: Path) -> None:
    """Sampling ran ahead: it ended while step 9 was collected, and the run goes on after step 7. In its debug mode the
    loop raises where a thread wakes what waits on it."""
    asyncio.get_running_loop().set_debug(True)
    await (await opened(tmp_path)).finish(OTHER)
    await (await opened(tmp_path, step=9, weights="w8", after=7)).finish(FIRST)
    journal = (await opened(tmp_path)).journal
    waiting = asyncio.create_task(journal.wait_usable(POSITIONS["a"]))
    await journal.wait_usable(POSITIONS["b"])
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await journal.begin(9, "w8") == 1
    await waiting
    run, ran = giving()
    assert same(await journal.runner(POSITIONS["a"], run)(task("a")), FIRST)
    assert ran == []


async def test_when_a_step_done_again_gives_other_weights_what_came_after_it_is_forgotten(tmp_path: Path) -> None:
    await (await opened(tmp_path)).finish(OTHER)
    await (await opened(tmp_path, step=9, weights="w8", after=7)).finish(FIRST)
    await (await opened(tmp_path, step=10, weights="w9", after=7)).finish(SECOND)
    journal = (await opened(tmp_path)).journal
    waiting = asyncio.create_task(journal.wait_usable(POSITIONS["a"]))
    assert await journal.begin(9, "another") == 0
    await waiting
    fresh = trajectory("a", 9)
    run, ran = giving(fresh)
    assert same(await journal.runner(POSITIONS["a"], run)(task("a")), fresh)
    assert ran == ["a"]
    assert sorted(os.listdir(tmp_path)) == ["step-000008.journal", "step-000009.journal"]


class TakenMeanwhile(list[Any]):
    """A list whose first item is taken as soon as it has been looked through for the first time."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(super().__iter__())
        if self:
            self.pop(0)


async def test_what_is_given_out_while_later_files_are_forgotten_is_not_given_again(tmp_path: Path) -> None:
    """Sampling runs on while a step begins: of the episodes that it may use, it may take one just then."""
    await (await opened(tmp_path)).finish(FIRST)
    await (await opened(tmp_path, step=9, weights="w8", after=7)).finish(OTHER)
    journal = (await opened(tmp_path)).journal
    journal._unread[POSITIONS["a"]] = TakenMeanwhile(journal._unread[POSITIONS["a"]])
    await journal.begin(9, "another")
    assert not journal._unread[POSITIONS["a"]]
    assert not journal._unread[POSITIONS["b"]]


async def test_what_a_batch_took_is_kept(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    assert first.journal.recorded_batch(8) == ()
    first.journal.record_batch(8, (3, 4, 7))
    await first.finish(FIRST)
    again = await opened(tmp_path)
    assert (again.journal.recorded_batch(8), again.found) == ((3, 4, 7), 1)
    again.journal.record_batch(8, (3, 4, 7))
    again.journal.close()
    assert (await opened(tmp_path, weights="another")).journal.recorded_batch(8) == ()


async def test_a_checkpoint_s_files_stay_while_they_hold_episodes_of_open_positions(tmp_path: Path) -> None:
    await (await opened(tmp_path, step=1, weights="start")).finish(FIRST)
    await (await opened(tmp_path, step=2, weights="w1", after=0)).finish(OTHER)
    journal = Journal(tmp_path, "run")
    journal.recover(2, {0: "start", 1: "w1"}, lambda position: position == POSITIONS["b"])
    assert os.listdir(tmp_path) == ["step-000002.journal"]
    await journal.wait_usable(POSITIONS["b"])
    run, _ = giving()
    assert same(await journal.runner(POSITIONS["b"], run)(task("b")), OTHER)
    other = Journal(tmp_path, "run")
    other.recover(2, {1: "another"}, lambda position: True)
    assert os.listdir(tmp_path) == [], "sampled with weights of which the checkpoint knows nothing"


async def test_infrastructure_failures_are_not_kept(tmp_path: Path) -> None:
    await (await opened(tmp_path)).finish(trajectory("a", 1, StopReason.SANDBOX_FAILURE), FIRST)
    assert (await opened(tmp_path)).found == 1


@given(keep=st.floats(0, 1), noise=st.binary(max_size=40))
def test_whole_frames_survive_a_kill(tmp_path_factory: pytest.TempPathFactory, keep: float, noise: bytes) -> None:
    asyncio.run(tear(tmp_path_factory.mktemp("torn"), keep, noise))


async def tear(directory: Path, keep: float, noise: bytes) -> None:
    """Cut a journal of three off at ``keep`` of its length, with ``noise`` in place of the rest, and go on."""
    journal = await opened(directory)
    await journal.finish(FIRST, SECOND, OTHER)
    data = journal.path.read_bytes()
    ends = frame_ends(data)
    cut = int(keep * len(data))
    journal.path.write_bytes(data[:cut] + noise)
    torn = await opened(directory)
    assert torn.found == max(0, sum(end <= cut for end in ends) - 1)
    await torn.finish(trajectory("c", 5))
    assert (await opened(directory)).found == torn.found + 1, "what is written after a tear can be read"


def frame_ends(data: bytes) -> list[int]:
    ends, at = [], 0
    while at < len(data):
        at += 8 + int.from_bytes(data[at : at + 4], "little")
        ends.append(at)
    return ends


async def test_a_flipped_bit_ends_what_is_believed(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.finish(FIRST, SECOND, OTHER)
    data = bytearray(journal.path.read_bytes())
    data[frame_ends(bytes(data))[1] + 100] ^= 1  # in the second trajectory
    journal.path.write_bytes(bytes(data))
    again = await opened(tmp_path)
    assert again.found == 1
    run, _ = giving(SECOND)  # just as long as the damaged one: what came after that must not be believed again
    for _ in range(2):
        await again.journal.runner(POSITIONS["a"], run)(task("a"))
    again.journal.close()
    assert (await opened(tmp_path)).found == 2


@pytest.mark.parametrize("slow", ["_write", "_read"])
async def test_members_are_in_the_order_of_their_frames_however_slow_one_thread_is(
    tmp_path: Path, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update adds up over a group's members in their order: another one gave other weights after a restart."""
    ended: list[tuple[int, ...]] = []

    def first_waits(plain: Callable[..., object]) -> Callable[..., object]:
        """The first call ends when another has ended, or after a while where none does."""
        calls, other = itertools.count(), threading.Event()

        def call(*arguments: object) -> object:
            first = next(calls) == 0
            if first:
                other.wait(0.2)
            try:
                return plain(*arguments)
            finally:
                other.set()

        return call

    for _ in range(2):
        journal = (await opened(tmp_path)).journal
        monkeypatch.setattr(journal, slow, first_waits(getattr(journal, slow)))
        runner, order = journal.runner(0, giving(FIRST, SECOND)[0]), list[int]()

        async def member(runner: LoggedRunner = runner, order: list[int] = order) -> None:
            order.append(int((await runner(task("a"))).tokens[0]))

        await asyncio.gather(member(), member())
        journal.close()
        ended.append(tuple(order))
    assert ended[0] == ended[1] == (1, 2)


async def test_episodes_that_end_while_a_step_begins_come_after_the_header(tmp_path: Path, monkeypatch: Any) -> None:
    """Sampling runs on meanwhile; a file whose header does not come first is believed to be another run's."""
    journal = (await opened(tmp_path)).journal
    monkeypatch.setattr(journal, "_writing", Overtaken(lambda: journal._write(0, FIRST, None)))
    await journal.begin(9, "w8")
    journal.close()
    again = Journal(tmp_path, "run")
    again.recover(8, {}, lambda position: True)
    assert await again.begin(9, "w8") == 1


class Overtaken:
    """A lock that another thread gets as soon as it is let go of for the first time."""

    def __init__(self, other: Callable[[], object]) -> None:
        self._lock, self._others = threading.Lock(), [other]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        if self._others:
            self._others.pop()()


def test_a_lineage_tells_updates_apart_by_their_last_bit() -> None:
    metrics = {"train/loss": 0.1, "train/grad_norm": 2.0, "train/updates": 1.0, "time/step": 3.0}
    assert lineage("a", metrics) == lineage("a", {**metrics, "time/step": 4.0})
    others = [("b", metrics), ("a", {**metrics, "train/loss": float(np.nextafter(0.1, 1))}), ("a", {})]
    assert lineage("a", metrics) not in [lineage(*other) for other in others]
