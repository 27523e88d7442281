"""A long start: how far the ranks are with reading weights is said, and only one that reads nothing is given up."""

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
    """Answers one state after the other; ``ended`` is set when there is no other, and the last is answered again."""
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
    """The notes while ranks of these states start, and what they answer (once all states were asked for)."""
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


def test_reading_is_told_as_long_as_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOADING_SECONDS", 0.001)
    first = [LoadProgress(), LoadProgress(4 * GIB, GIB), LoadProgress(4 * GIB, 2 * GIB), LoadProgress(4 * GIB, 2 * GIB)]
    notes, answers = started([first, repeat(LoadProgress(2 * GIB, GIB))], answers=True)
    assert answers == ["started"] * 2
    assert [note.rsplit(",", 1)[0] for note in notes] == [
        "reading weights: 1.0 of 2.0 GiB",
        "reading weights: 2.0 of 6.0 GiB",
        "reading weights: 3.0 of 6.0 GiB",
    ]


def test_a_start_in_which_nothing_is_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOADING_SECONDS", 0.001)
    monkeypatch.setattr(module, "START_SECONDS", 0.05)
    with pytest.raises(TrainerError, match=r"did not start: no rank read weights for 0\.05 s$"):
        started([[LoadProgress(4 * GIB, GIB)]], answers=False)


def test_a_watch_that_fails_ends_the_start_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOADING_SECONDS", 0.001)

    def states() -> Iterator[LoadProgress]:
        yield LoadProgress(4 * GIB, GIB)
        raise TrainerError("a trainer rank died")

    with pytest.raises(TrainerError, match=r"^a trainer rank died$"):
        started([states()], answers=False)
