"""Routing: which engine a request goes to, when it is sent, and what happens after a failed attempt.

::

    no answer, 5xx           EngineUnreachable   retried on the budget, on another engine where there is one
    unpublished weights      EngineStale         the same; that engine serves no more until it was published to
    no engine serves         EngineLost          after a wait for one that is being started, where there is one
    429, 503                 EngineOverloaded    retried on the budget
    other errors                                 raised at once

A request waits here until the generation gate is open and its engine runs fewer requests than it can, so HTTP time-outs
count neither the queue nor a weight update.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from agent_rl.config import EngineConfig
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.utilization import EngineUtilization
from agent_rl.errors import EngineLost, EngineStale, EngineUnreachable
from agent_rl.utils.http import call_with_retries, timed_out
from sandbox.timeouts import PausableTimeout

R = TypeVar("R")
T = TypeVar("T")

MAX_SESSIONS = 1 << 16
"""Sessions whose engine is remembered; the least recently used is dropped first."""


class SessionAffinity:
    """Keeps each session on the engine it began on, whose cache holds its prefix. A new session goes to the engine with
    the fewest running requests, then the fewest sessions.

    Consistent hashing would pin a session to an engine however busy it is. Here the load counts when a session begins,
    and when its engine is no longer a candidate.
    """

    def __init__(self) -> None:
        self._engines: OrderedDict[str, str] = OrderedDict()
        self._sessions: Counter[str] = Counter()
        self._in_flight: Counter[str] = Counter()

    @contextmanager
    def request(self, session: str, candidates: Sequence[str]) -> Iterator[str]:
        """The session's engine, one of ``candidates``; within the block it counts one more running request."""
        url = self._engine(session, candidates)
        self._in_flight[url] += 1
        try:
            yield url
        finally:
            self._in_flight[url] -= 1

    def _engine(self, session: str, candidates: Sequence[str]) -> str:
        url = self._engines.get(session)
        if url is None or url not in candidates:
            self._forget(session)
            url = min(candidates, key=lambda each: (self._in_flight[each], self._sessions[each]))
            self._engines[session] = url
            self._sessions[url] += 1
            if len(self._engines) > MAX_SESSIONS:
                self._forget(next(iter(self._engines)))
        self._engines.move_to_end(session)
        return url

    def _forget(self, session: str) -> None:
        if (url := self._engines.pop(session, None)) is not None:
            self._sessions[url] -= 1


@dataclass(slots=True)
class _Attempts:
    """The attempts at one request: the engine of the last one, the engines that failed it, and whether one timed
    out."""

    url: str = ""
    failed: list[str] = field(default_factory=list)
    timed_out: bool = False


class RequestRouter:
    """Sends requests to the engines that serve by ``fleet``, while ``gate`` is open.

    Of ``config``, ``retries`` is the budget of a request. ``backoff``: seconds before the first retry. ``load`` counts
    the running requests per engine.
    """

    def __init__(self, fleet: Fleet, gate: GenerationGate, config: EngineConfig, *, backoff: float) -> None:
        self.load = EngineUtilization()
        self._fleet, self._gate = fleet, gate
        self._affinity = SessionAffinity()
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._retries, self._backoff = config.retries, backoff
        self._wait_seconds = config.start_seconds + config.weight_sync_timeout

    def set_limit(self, url: str, max_running: int) -> None:
        """Send the engine at ``url`` at most ``max_running`` requests at once (0: no limit)."""
        if max_running > 0:
            self._slots[url] = asyncio.Semaphore(max_running)
        self.load.add(url, max_running)

    async def send(
        self,
        session: str,
        post: Callable[[str], Awaitable[R]],
        read: Callable[[R, float], Awaitable[tuple[T, str | None]]],
    ) -> T:
        """``post`` to the session's engine and ``read`` the response; try again on the budget.

        ``post`` gets the engine's URL. ``read`` gets the response and the seconds since the attempt began, and returns
        the result and the version of the weights that gave it (None: not checked). Raises the last attempt's error.
        """
        attempts = _Attempts()

        async def attempt() -> T:
            started = time.perf_counter()
            async with self._acquire(session, attempts) as url:
                floor = self._fleet.floor
                response = await post(url)
            result, version = await read(response, time.perf_counter() - started)
            if version is not None:
                self._check_version(url, session, version, floor)
            return result

        return await call_with_retries(
            attempt, self._retries, self._backoff, before_pause=partial(self._record_failure, attempts)
        )

    @asynccontextmanager
    async def _acquire(self, session: str, attempts: _Attempts) -> AsyncIterator[str]:
        """The session's engine, once the gate is open and the engine has a free slot."""
        while True:
            candidates = await self._candidates(attempts)
            with self._affinity.request(session, candidates) as url:
                async with self._slots.get(url) or nullcontext():
                    await self._gate.wait_open()
                    if url in self._fleet.candidates(attempts.failed):
                        attempts.url = url
                        with self.load.running(url):
                            yield url
                        return

    async def _candidates(self, attempts: _Attempts) -> tuple[str, ...]:
        """The engines that may get the request. Waits for one that is being started or published to; time does not
        count while the gate is closed, since engines that died asleep start when the others wake."""
        if candidates := self._fleet.candidates(attempts.failed):
            return candidates
        try:
            async with PausableTimeout(self._wait_seconds) as limit:
                with self._gate.uncharged(limit):
                    return await self._fleet.until(lambda fleet: fleet.candidates(attempts.failed))
        except TimeoutError:
            raise EngineLost(f"no engine came into use within {self._wait_seconds:g} s") from None

    def _check_version(self, url: str, session: str, version: str, floor: int) -> None:
        """Raise EngineStale for a result of other weights than were published since the request began."""
        if not self._fleet.accepts(version, floor):
            self._fleet.stale(url, version)
            raise EngineStale(
                f"{url} session {session!r}: answered from weights {version!r}, which are not the published ones"
            )
        if (member := self._fleet.find(url)) is not None:
            self._fleet.answered(member.name)

    def _record_failure(self, attempts: _Attempts, error: Exception) -> None:
        """Avoid the engine of a failed attempt, unless it only timed out for the first time: its cache holds the
        session's prefix."""
        if not isinstance(error, EngineUnreachable | EngineStale):
            return
        if isinstance(error, EngineUnreachable):
            if timed_out(error) and not attempts.timed_out:
                attempts.timed_out = True
                return
            self._fleet.failed(attempts.url, str(error))
        attempts.failed.append(attempts.url)
