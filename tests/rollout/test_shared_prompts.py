"""One request of a task goes first; the others follow when it ends, however it ends."""

from __future__ import annotations

import asyncio

import pytest

from agent_rl.errors import EngineUnreachable
from agent_rl.rollout.shared_prompts import SharedPrompts
from agent_rl.types import Completion, FinishReason, SamplingParams, TokenIds

SIBLINGS = 4


class HeldEngine:
    """Records the sessions that asked. The first request waits until ``release``; then it fails with ``error``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sessions: list[str] = []
        self.began, self.all_began, self.release = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error = error

    async def generate(
        self, tokens: TokenIds, sampling: SamplingParams, *, routes_from: int | None, session: str
    ) -> Completion:
        self.sessions.append(session)
        if len(self.sessions) == SIBLINGS:
            self.all_began.set()
        if len(self.sessions) == 1:
            self.began.set()
            await self.release.wait()
            if self.error is not None:
                raise self.error
        return Completion((1,), (0.0,), FinishReason.STOP, "v0", "engine")


async def first_requests(
    shared: SharedPrompts, *, task: str = "task", all_sent: asyncio.Event | None = None
) -> list[object]:
    """The results of the first requests of SIBLINGS episodes of ``task``. Sets ``all_sent`` with the last one."""

    async def episode(number: int) -> Completion:
        with shared.episode(task) as engine:
            if all_sent is not None and number == SIBLINGS - 1:
                all_sent.set()
            return await engine.generate((1, 2), SamplingParams(), routes_from=None, session=f"{task}-{number}")

    return list(await asyncio.gather(*map(episode, range(SIBLINGS)), return_exceptions=True))


async def test_siblings_start_after_the_first_response() -> None:
    engine, all_sent = HeldEngine(), asyncio.Event()
    requests = asyncio.create_task(first_requests(SharedPrompts(engine), all_sent=all_sent))
    await all_sent.wait()
    assert engine.sessions == ["task-0"]
    engine.release.set()
    assert all(isinstance(result, Completion) for result in await requests)
    assert sorted(engine.sessions) == [f"task-{n}" for n in range(SIBLINGS)]


async def test_siblings_start_after_the_first_request_failed() -> None:
    engine = HeldEngine(EngineUnreachable("gone"))
    requests = asyncio.create_task(first_requests(SharedPrompts(engine)))
    await engine.began.wait()
    engine.release.set()
    failed, *others = await requests
    assert isinstance(failed, EngineUnreachable)
    assert all(isinstance(result, Completion) for result in others)


async def test_siblings_start_after_the_first_request_was_cancelled() -> None:
    engine = HeldEngine()
    shared = SharedPrompts(engine)
    with shared.episode("task") as first, shared.episode("task") as second:
        leader = asyncio.create_task(first.generate((1,), SamplingParams(), routes_from=None, session="first"))
        await engine.began.wait()
        leader.cancel()
        completion = await second.generate((1,), SamplingParams(), routes_from=None, session="second")
    assert completion.tokens == (1,)
    with pytest.raises(asyncio.CancelledError):
        await leader


async def test_the_wait_is_bounded() -> None:
    engine = HeldEngine()
    shared = SharedPrompts(engine, wait_seconds=0.0)
    requests = asyncio.create_task(first_requests(shared))
    await engine.all_began.wait()
    engine.release.set()
    await requests


async def test_other_tasks_and_later_groups_do_not_wait() -> None:
    engine = HeldEngine()
    shared = SharedPrompts(engine)
    held = asyncio.create_task(first_requests(shared))
    await engine.began.wait()
    assert len(await first_requests(shared, task="other")) == SIBLINGS
    engine.release.set()
    await held
    assert not shared._prompts
