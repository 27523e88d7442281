"""Engines that share their GPUs with the trainer (``engine.colocate``) sleep while it works.

::

    awake ──begin──▶ asleep ──load──▶ loading ── a publish; ready(url), one by one ──end──▶ awake

    begin   the gate closes, so that no request runs or begins; each engine flushes its cache and releases the memory of
            its weights and of its KV cache: before every update, and before the trainer starts
    load    each engine gets memory for its weights again, which hold anything until a publish has filled them
    ready   one engine gets memory for its KV cache again, and can compute
    end     the gate opens, and engines that died meanwhile are started again

Every call is bounded by ``engine.weight_sync_timeout``. An engine that does not do what it is asked to, and one that is
not in use when the others fall asleep, is stopped, for it would hold memory that the trainer counts on. It counts as
dead, and like one that dies asleep it is started when the others are awake (:mod:`agent_rl.engine.supervisor`).

A sleep outlives a training run whose trainer died: the next publish ends it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from agent_rl.config import EngineConfig
from agent_rl.engine.fleet import Fleet, Phase
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.types import Server
from agent_rl.errors import EngineError, EngineLost, EngineUnreachable
from agent_rl.utils.concurrency import Pulse
from agent_rl.utils.http import AsyncHttp

FLUSH_SECONDS = 10
"""How long SGLang may take to be rid of the requests that it has answered: released while one is left, it would die."""
_AGAIN_SECONDS = 0.5


class Memory(StrEnum):
    """What an engine releases, by SGLang's names."""

    WEIGHTS = "weights"
    CACHE = "kv_cache"


@dataclass(frozen=True, slots=True)
class Sleeper:
    """An engine, by its name in the fleet, and what it has ``released`` and not got back."""

    name: str
    released: set[Memory] = field(default_factory=lambda: set(Memory))


class EngineSleep:
    """The sleep of the engines of ``fleet``, whose requests pass ``gate``. ``servers``: those that are ours, by name.

    Where ``config.colocate`` is off nothing ever sleeps, and every method returns at once.
    """

    def __init__(
        self, fleet: Fleet, gate: GenerationGate, servers: Mapping[str, Server], config: EngineConfig, http: AsyncHttp
    ) -> None:
        self._fleet, self._gate, self._servers, self._http = fleet, gate, servers, http
        self._shares, self._timeout = config.colocate, config.weight_sync_timeout
        self._awake, self._turns = asyncio.Event(), Pulse()
        self._awake.set()
        self._sleepers: dict[str, Sleeper] = {}
        self._begin_seconds = 0.0
        self._resume_seconds: dict[Memory, float] = {}
        fleet.listeners.append(lambda before, after: self._turns.give())

    @property
    def is_over(self) -> bool:
        """Whether the engines are awake, or were never asleep."""
        return self._awake.is_set()

    async def over(self) -> None:
        """Return when the engines are awake; what follows without waiting is still before their next sleep."""
        while not self.is_over:
            await self._awake.wait()

    async def begin(self) -> None:
        """Let the engines sleep; their memory is free then. Raises EngineLost where none of them will ever serve."""
        if not self._shares or not self.is_over:
            return
        started = time.perf_counter()
        self._awake.clear()
        self._resume_seconds = {}
        await self._gate.close()
        await asyncio.gather(*(self._lay_down(name) for name in self._fleet.names))
        self._begin_seconds = time.perf_counter() - started
        if (reason := self._fleet.lost) is not None:
            raise EngineLost(f"no engine is left: {reason}")

    async def load(self) -> None:
        """Give the engines memory for their weights again."""
        await asyncio.gather(*(self._resume(url, Memory.WEIGHTS) for url in tuple(self._sleepers)))

    async def ready(self, url: str) -> None:
        """Give the engine at ``url`` memory for its KV cache again. Raises EngineUnreachable where that fails."""
        if (reason := await self._resume(url, Memory.CACHE)) is not None:
            raise EngineUnreachable(reason)

    async def end(self) -> None:
        """Give back what is still lacking; requests go on."""
        if self.is_over:
            return
        for memory in Memory:
            await asyncio.gather(*(self._resume(url, memory) for url in tuple(self._sleepers)))
        self._sleepers.clear()
        self._awake.set()
        self._gate.open()

    def metrics(self) -> dict[str, float]:
        """Seconds that falling asleep and waking took since this was last asked; nothing where no engine slept."""
        if not self._resume_seconds:
            return {}
        seconds, self._resume_seconds = self._resume_seconds, {}
        return {"time/engine_sleep": self._begin_seconds, "time/engine_wake": sum(seconds.values())}

    async def _lay_down(self, name: str) -> None:
        member = self._fleet[name]
        if member.phase not in (Phase.SERVING, Phase.SUSPECT):
            await self._stop(name, f"{name} was not in use yet when the others fell asleep")
            return
        try:
            await self._http.post(f"{member.url}/flush_cache?timeout={FLUSH_SECONDS}", {}, seconds=self._timeout)
            await self._ask(member.url, "release", list(Memory))
        except EngineError as error:
            await self._stop(name, f"{member.url} does not release its memory: {error}")
        else:
            self._sleepers[member.url] = Sleeper(name)

    async def _resume(self, url: str, memory: Memory) -> str | None:
        """Why the engine at ``url`` does not take its memory back; None where it does, or lacks none."""
        sleeper = self._sleepers.get(url)
        if sleeper is None or memory not in sleeper.released:
            return None
        started = time.perf_counter()
        try:
            await self._ask(url, "resume", [memory])
        except EngineError as error:
            del self._sleepers[url]
            reason = f"{url} does not wake: {error}"
            await self._stop(sleeper.name, reason)
            return reason
        sleeper.released.discard(memory)
        taken = time.perf_counter() - started
        self._resume_seconds[memory] = max(taken, self._resume_seconds.get(memory, 0.0))
        return None

    async def _ask(self, url: str, what: str, memory: list[Memory]) -> None:
        await self._http.post(f"{url}/{what}_memory_occupation", {"tags": memory}, seconds=self._timeout)

    async def _stop(self, name: str, reason: str) -> None:
        """Stop an engine's server, also one that is just being started, and count it as dead."""
        while self._fleet[name].phase is Phase.STARTING:
            await self._servers[name].stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_SECONDS):  # its process may not have been there yet
                    await self._turns.wait()
        self._fleet.died(name, reason)
        await self._servers[name].stop()
