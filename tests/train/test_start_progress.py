"""A long start reports how much of the weights is read, and fails only if nothing is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the trainer environment")

from agent_rl.errors import TrainerError
from agent_rl.train import worker_group as module
from agent_rl.train.hf_index import LoadProgress

GIB = 1 << 30


def actor(states: Iterable[LoadProgress], ended: asyncio.Event) -> Any:
    """An actor that reports ``states``, then repeats the last one and sets ``ended``."""
    coming: Iterator[LoadProgress] = iter(states)
    last = LoadProgress()

    async def answer() -> LoadProgress:
        nonlocal last
        try:
            last = next(coming)
        except StopIteration:
            ended.set()
        return last

    return SimpleNamespace(loading=SimpleNamespace(remote=answer))


def started(states: Sequence[Iterable[LoadProgress]], *, answers: bool) -> tuple[list[str], list[Any]]:
    """The notes while ranks with these states start, and the ranks' results."""
    notes: list[str] = []

    async def run() -> list[Any]:
        ended, ranks = asyncio.Event(), module.WorkerGroup(ExitStack())
        ranks._actors = [actor(each, ended) for each in states]

        async def start() -> str:
            await (ended if answers else asyncio.Event()).wait()
            return "started"

        calls: Any = [start() for _ in states]
        return await ranks._started(calls, notes.append)

    return notes, asyncio.run(run())


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOADING_SECONDS", 0.001)


def test_progress_is_reported_while_weights_are_read() -> None:
    first = [LoadProgress(), LoadProgress(4 * GIB, GIB), LoadProgress(4 * GIB, 2 * GIB), LoadProgress(4 * GIB, 2 * GIB)]
    notes, answers = started([first, repeat(LoadProgress(2 * GIB, GIB))], answers=True)
    assert answers == ["started"] * 2
    progress = [f"reading weights: {read} GiB" for read in ("1.0 of 2.0", "2.0 of 6.0", "3.0 of 6.0")]
    assert [note.rsplit(",", 1)[0] for note in notes] == progress


def test_a_start_without_progress_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.05)
    with pytest.raises(TrainerError, match=r"did not start: no rank read weights for 0\.05 s$"):
        started([[LoadProgress(4 * GIB, GIB)]], answers=False)


def test_a_failed_progress_request_fails_the_start() -> None:
    def states() -> Iterator[LoadProgress]:
        yield LoadProgress(4 * GIB, GIB)
        raise TrainerError("a trainer rank died")

    with pytest.raises(TrainerError, match=r"^a trainer rank died$"):
        started([states()], answers=False)
