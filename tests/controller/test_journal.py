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
from hypothesis import given
from hypothesis import strategies as st
from support.plain_values import plain
from support.routed_trajectories import routed

from agent_rl.controller.journal import Journal, lineage
from agent_rl.rollout.episode_recovery import LoggedRunner, TurnLog
from agent_rl.types import StopReason, Trajectory, Turn
from envs import Task


def trajectory(task: str, seed: int, stop: StopReason = StopReason.SUBMITTED) -> Trajectory:
    turn = Turn("hi", "bash", {"cmd": "ls"}, None, "a", 3, 2, 0, 0, "3", 0.5, 0.25)
    reward, messages = None if stop.infrastructure else 1.0, ({"role": "user", "content": "x"},)
    return replace(routed(seed, task), stop=stop, reward=reward, turns=(turn,), messages=messages)


def same(a: Trajectory, b: Trajectory) -> bool:
    """Whether they are the same but for which start ran them."""
    return plain(a, "recovered") == plain(b, "recovered")


def giving(*trajectories: Trajectory) -> LoggedRunner:
    """An episode runner that returns these, one after the other."""
    waiting = list(trajectories)

    async def run(task: Task, log: TurnLog | None = None) -> Trajectory:
        return waiting.pop(0)

    return run


async def opened(path: Path, run_id: str = "run", *, step: int = 8, weights: str = "w7", after: Any = None) -> Opened:
    """The journal of a run that goes on after ``after``, or the step before ``step``, which begins."""
    journal = Journal(path, run_id)
    journal.recover(step - 1 if after is None else after, {}, lambda position: True)
    return Opened(journal, await journal.begin(step, weights), path / f"step-{step:06d}.journal")


@dataclass
class Opened:
    """A journal, how many trajectories the step had that began, and where they are."""

    journal: Journal
    found: int
    path: Path

    async def run(self, name: str, *fresh: Trajectory, position: int | None = None) -> Trajectory:
        """The next episode of a task: one that the journal holds, or the first of ``fresh``."""
        at = POSITIONS[name] if position is None else position
        return await self.journal.runner(at, giving(*fresh))(Task(name, "mini", {}))

    async def finish(self, *trajectories: Trajectory) -> None:
        """Episodes that end while the journal is open."""
        for each in trajectories:
            await self.run(each.task_id, each)
        self.journal.close()


TASK, POSITIONS = Task("a", "mini", {}), {name: at for at, name in enumerate("abc")}
FIRST, SECOND, OTHER, FRESH = (trajectory(task, seed) for task, seed in (("a", 1), ("a", 2), ("b", 3), ("a", 9)))


async def test_a_finished_episode_is_returned_once_bit_for_bit(tmp_path: Path) -> None:
    await (await opened(tmp_path)).finish(FIRST, OTHER, SECOND)
    again = await opened(tmp_path)
    assert again.found == 3
    found = [await again.run(name, FRESH) for name in ("a", "b", "a", "a")]
    assert all(map(same, found, (FIRST, OTHER, SECOND, FRESH)))
    assert [trajectory.recovered for trajectory in found] == [True, True, True, False]
    again.journal.close()
    assert (await opened(tmp_path)).found == 4, "and written down too"


async def test_one_task_in_flight_twice_is_kept_apart_by_its_positions(tmp_path: Path) -> None:
    """At the edge of an epoch: the last of one, and the first of the next."""
    journal = await opened(tmp_path)
    for position, each in ((7, FIRST), (8, SECOND)):
        await journal.run("a", each, position=position)
    journal.journal.close()
    again = await opened(tmp_path)
    assert same(await again.run("a", position=8), SECOND)
    assert same(await again.run("a", position=7), FIRST)


@pytest.mark.parametrize(("run_id", "weights"), [("other", "w7"), ("run", "w7b")])
async def test_other_weights_or_another_run_ignore_the_journal(tmp_path: Path, run_id: str, weights: str) -> None:
    await (await opened(tmp_path)).finish(FIRST)
    other = await opened(tmp_path, run_id, weights=weights)
    assert other.found == 0
    await other.finish(OTHER)
    assert (await opened(tmp_path, run_id, weights=weights)).found == 1
    assert (await opened(tmp_path)).found == 0


async def test_an_episode_of_later_weights_waits_for_them(tmp_path: Path) -> None:
    """Sampling ran ahead: it ended while step 9 was collected, and the run goes on after step 7. In its debug mode the
    loop raises where a thread wakes what waits on it."""
    asyncio.get_running_loop().set_debug(True)
    await (await opened(tmp_path)).finish(OTHER)
    await (await opened(tmp_path, step=9, weights="w8", after=7)).finish(FIRST)
    again = await opened(tmp_path)
    waiting = asyncio.create_task(again.journal.wait_usable(POSITIONS["a"]))
    await again.journal.wait_usable(POSITIONS["b"])
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await again.journal.begin(9, "w8") == 1
    await waiting
    assert same(await again.run("a"), FIRST)


async def test_episodes_after_a_repeated_step_with_other_weights_are_forgotten(tmp_path: Path) -> None:
    await (await opened(tmp_path)).finish(OTHER)
    await (await opened(tmp_path, step=9, weights="w8", after=7)).finish(FIRST)
    await (await opened(tmp_path, step=10, weights="w9", after=7)).finish(SECOND)
    again = await opened(tmp_path)
    waiting = asyncio.create_task(again.journal.wait_usable(POSITIONS["a"]))
    assert await again.journal.begin(9, "another") == 0
    await waiting
    assert same(await again.run("a", FRESH), FRESH)
    assert sorted(os.listdir(tmp_path)) == ["step-000008.journal", "step-000009.journal"]


class TakenMeanwhile(list[Any]):
    """A list whose first item is taken as soon as it has been looked through for the first time."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(super().__iter__())
        if self:
            self.pop(0)


async def test_an_episode_returned_while_files_are_forgotten_is_not_returned_again(tmp_path: Path) -> None:
    """Sampling continues while a step begins, and takes one of the usable episodes at that moment."""
    await (await opened(tmp_path)).finish(FIRST)
    await (await opened(tmp_path, step=9, weights="w8", after=7)).finish(OTHER)
    journal = (await opened(tmp_path)).journal
    journal._unread[POSITIONS["a"]] = TakenMeanwhile(journal._unread[POSITIONS["a"]])
    await journal.begin(9, "another")
    assert not journal._unread[POSITIONS["a"]]
    assert not journal._unread[POSITIONS["b"]]


async def test_the_positions_of_a_batch_are_kept(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    assert first.journal.recorded_batch(8) == ()
    first.journal.record_batch(8, (3, 4, 7))
    await first.finish(FIRST)
    again = await opened(tmp_path)
    assert (again.journal.recorded_batch(8), again.found) == ((3, 4, 7), 1)
    again.journal.record_batch(8, (3, 4, 7))
    again.journal.close()
    assert (await opened(tmp_path, weights="another")).journal.recorded_batch(8) == ()


async def test_files_with_episodes_of_open_positions_stay(tmp_path: Path) -> None:
    await (await opened(tmp_path, step=1, weights="start")).finish(FIRST)
    await (await opened(tmp_path, step=2, weights="w1", after=0)).finish(OTHER)
    journal = Journal(tmp_path, "run")
    journal.recover(2, {0: "start", 1: "w1"}, lambda position: position == POSITIONS["b"])
    assert os.listdir(tmp_path) == ["step-000002.journal"]
    await journal.wait_usable(POSITIONS["b"])
    assert same(await Opened(journal, 0, tmp_path).run("b"), OTHER)
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


async def test_frames_after_a_flipped_bit_are_ignored(tmp_path: Path) -> None:
    journal = await opened(tmp_path)
    await journal.finish(FIRST, SECOND, OTHER)
    data = bytearray(journal.path.read_bytes())
    data[frame_ends(bytes(data))[1] + 100] ^= 1  # in the second trajectory
    journal.path.write_bytes(bytes(data))
    again = await opened(tmp_path)
    assert again.found == 1
    for _ in range(2):  # just as long as the damaged one: what came after that must not be believed again
        await again.run("a", SECOND)
    again.journal.close()
    assert (await opened(tmp_path)).found == 2


@pytest.mark.parametrize("slow", ["_write", "_read"])
async def test_members_keep_the_order_of_frames(tmp_path: Path, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        runner, order = journal.runner(0, giving(FIRST, SECOND)), list[int]()

        async def member(runner: LoggedRunner = runner, order: list[int] = order) -> None:
            order.append(int((await runner(TASK)).tokens[0]))

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
