"""When checkpoints are due, which are kept, and what a failed write does. The trainer here writes real directories
without weights; tests/train and tests/integration have the real one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.pipeline_run import Deaths, HashTrainer

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.controller.checkpoints import Checkpoints, Progress
from agent_rl.controller.journal import Journal
from agent_rl.controller.run_state import RunState
from agent_rl.errors import TrainerError
from agent_rl.train.checkpoint import directory as checkpoint


class Writer(HashTrainer):
    """A trainer whose writes end when ``may_end`` is set, or with ``failure``."""

    def __init__(self) -> None:
        super().__init__(Deaths())
        self.may_end, self.failure = asyncio.Event(), None
        self.may_end.set()

    async def _save(self, directory: Path, run: Mapping[str, object]) -> None:
        checkpoint.begin(directory)
        await self.may_end.wait()
        if self.failure:
            raise self.failure
        await super()._save(directory, run)


def opened(runs: Path, writer: Writer | None = None, **train: object) -> tuple[Checkpoints, RunState]:
    config = RunConfig(name="demo", runs_dir=runs, model=Path("m"), train=TrainConfig(**train))
    state = RunState(config)
    journal = Journal(state.dir / "journal", state.run_id)
    return Checkpoints(config.train, state, writer or Writer(), journal), state


async def saved(checkpoints: Checkpoints, state: RunState, *steps: int, good: int | None = None) -> None:
    for step in steps:
        await checkpoints.save(Progress(state.run_id, step), good=good)
    await checkpoints.finish()


async def write_journals(directory: Path, run_id: str, *steps: int) -> None:
    journal = Journal(directory, run_id)
    journal.recover(0, {}, lambda position: True)
    for step in steps:
        await journal.begin(step, "w")
    journal.close()


def directories(state: RunState) -> list[int]:
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(state.checkpoints))


async def test_the_newest_checkpoints_and_every_nth_are_kept(tmp_path: Path) -> None:
    checkpoints, state = opened(tmp_path, steps=9, checkpoint_every=2, keep_checkpoints=2, keep_every=4)
    assert [step for step in range(1, 10) if checkpoints.due(step)] == [2, 4, 6, 8, 9]
    for step in (2, 4, 6, 8, 9):
        await checkpoints.save(Progress(state.run_id, step, step * 3, f"w{step}"))
    await checkpoints.finish()
    assert directories(state) == [4, 8, 9]
    resumed, _ = await opened(tmp_path)[0].resume()
    assert resumed == Progress(state.run_id, 9, 27, "w9")


async def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    checkpoints, state = opened(tmp_path, keep_checkpoints=1)
    for step, best in ((1, None), (2, 1), (3, 1), (4, 3)):
        await checkpoints.save(Progress(state.run_id, step), best=best)
        await checkpoints.finish()
        assert directories(state) == sorted({step, best or step})


async def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    writer = Writer()
    checkpoints, state = opened(tmp_path, writer, keep_checkpoints=1)
    journal = state.dir / "journal"
    await write_journals(journal, state.run_id, 1, 2, 3)
    await saved(checkpoints, state, 1)
    assert sorted(os.listdir(journal)) == ["step-000002.journal", "step-000003.journal"]
    writer.may_end.clear()
    await checkpoints.save(Progress(state.run_id, 2))
    checkpoints.check()
    third = asyncio.create_task(checkpoints.save(Progress(state.run_id, 3)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not third.done(), "one at a time"
    assert checkpoint.latest_checkpoint(state.checkpoints) == state.checkpoint(1)
    assert len(os.listdir(journal)) == 2
    writer.may_end.set()
    await third
    await checkpoints.finish()
    assert directories(state) == [3]
    assert os.listdir(journal) == []


async def test_a_failed_write_is_raised_and_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    writer = Writer()
    checkpoints, state = opened(tmp_path, writer, keep_checkpoints=1)
    await saved(checkpoints, state, 1)
    writer.failure = TrainerError("no room")
    await checkpoints.save(Progress(state.run_id, 2))
    await asyncio.wait([checkpoints._writing])
    with pytest.raises(TrainerError, match="no room"):
        checkpoints.check()
    with pytest.raises(TrainerError, match="no room"):
        await checkpoints.save(Progress(state.run_id, 3))
    await checkpoints.close()
    again, _ = opened(tmp_path)
    assert (await again.resume())[0].step == 1
    assert directories(state) == [1], "what the failed one left is gone"


async def test_closing_abandons_a_write(tmp_path: Path) -> None:
    writer = Writer()
    checkpoints, state = opened(tmp_path, writer)
    writer.may_end.clear()
    await checkpoints.save(Progress(state.run_id, 1))
    await checkpoints.close()
    await checkpoints.close()
    assert checkpoint.latest_checkpoint(state.checkpoints) is None


async def test_closing_waits_for_the_removal_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that outlived it would remove files that the next start of the run is just looking through."""
    checkpoints, state = opened(tmp_path)
    loop, begun, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def forget(*arguments: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait(10)

    monkeypatch.setattr(Journal, "forget_through", forget)
    await checkpoints.save(Progress(state.run_id, 1))
    await begun.wait()
    closing = asyncio.create_task(checkpoints.close())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    may_end.set()
    await closing


async def test_the_last_checkpoint_before_a_fault_stays(tmp_path: Path) -> None:
    checkpoints, state = opened(tmp_path, keep_checkpoints=2)
    await saved(checkpoints, state, 5, 10)
    await saved(checkpoints, state, 15, 20, 25, good=12)
    assert directories(state) == [10, 20, 25]
    assert checkpoints.newest(19) == state.checkpoint(10)
    assert checkpoints.newest(9) is None
    await saved(checkpoints, state, 30)
    assert directories(state) == [25, 30]
