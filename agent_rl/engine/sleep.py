"""Engines that share GPUs with the trainer (``engine.colocate``) sleep while it works.

::

    awake ──begin──▶ asleep ──resume_weights──▶ loading ── publish; resume_cache(url) for each ──end──▶ awake

    begin            the gate closes; each engine flushes its cache and releases the memory of its weights and KV cache:
                     before every update, and before the trainer starts
    resume_weights   each engine allocates its weights again; their content is undefined until a publish
    resume_cache     one engine allocates its KV cache again and can compute
    end              the gate opens; engines that died meanwhile are restarted

Every call is limited by ``engine.weight_sync_timeout``. An engine that fails a call, or is not in use when the others
fall asleep, is stopped, because it would hold memory that the trainer needs. It counts as dead and is restarted when
the others are awake (:mod:`agent_rl.engine.supervisor`).

If the trainer dies, the engines stay asleep until the next publish.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from agent_rl.config import EngineConfig
from agent_rl.engine.fleet import Fleet, Phase
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.types import Server
from agent_rl.errors import EngineError, EngineLost, EngineUnreachable
from agent_rl.utils.http import AsyncHttp

FLUSH_SECONDS = 10
"""How long SGLang may take to release the requests that it has answered. Releasing memory while one is left kills
it."""
_RETRY_SECONDS = 0.5


class Memory(StrEnum):
    """Memory that an engine releases, by SGLang's names."""

    WEIGHTS = "weights"
    CACHE = "kv_cache"


@dataclass(frozen=True, slots=True)
class SleepingEngine:
    """An engine by its name in the fleet, and the memory that it has ``released`` and not reallocated."""

    name: str
    released: set[Memory] = field(default_factory=lambda: set(Memory))


class EngineSleep:
    """The sleep of the engines of ``fleet``, whose requests pass ``gate``. ``servers``: the engines that we started, by
    name.

    Without ``config.colocate`` no engine sleeps, and every method returns at once.
    """

    def __init__(
        self, fleet: Fleet, gate: GenerationGate, servers: Mapping[str, Server], config: EngineConfig, http: AsyncHttp
    ) -> None:
        self._fleet, self._gate, self._servers, self._http = fleet, gate, servers, http
        self._colocate, self._timeout = config.colocate, config.weight_sync_timeout
        self._awake = asyncio.Event()
        self._awake.set()
        self._sleepers: dict[str, SleepingEngine] = {}
        self._begin_seconds = 0.0
        self._resume_seconds: dict[Memory, float] = {}

    @property
    def is_awake(self) -> bool:
        """Whether no engine sleeps."""
        return self._awake.is_set()

    async def wait_awake(self) -> None:
        """Return once the engines are awake. Code that follows without an await runs before their next sleep."""
        while not self.is_awake:
            await self._awake.wait()

    async def begin(self) -> None:
        """Put the engines to sleep; on return their memory is free. Raises EngineLost if no engine can serve any
        more."""
        if not self._colocate or not self.is_awake:
            return
        started = time.perf_counter()
        self._awake.clear()
        self._resume_seconds = {}
        await self._gate.close()
        await asyncio.gather(*(self._release_memory(name) for name in self._fleet.names))
        self._begin_seconds = time.perf_counter() - started
        if (reason := self._fleet.lost) is not None:
            raise EngineLost(f"no engine is left: {reason}")

    async def resume_weights(self) -> None:
        """Let the engines allocate memory for their weights again."""
        await asyncio.gather(*(self._resume(url, Memory.WEIGHTS) for url in tuple(self._sleepers)))

    async def resume_cache(self, url: str) -> None:
        """Let the engine at ``url`` allocate its KV cache again. Raises EngineUnreachable if that fails."""
        if (reason := await self._resume(url, Memory.CACHE)) is not None:
            raise EngineUnreachable(reason)

    async def end(self) -> None:
        """Resume all remaining memory and open the gate."""
        if self.is_awake:
            return
        for memory in Memory:
            await asyncio.gather(*(self._resume(url, memory) for url in tuple(self._sleepers)))
        self._sleepers.clear()
        self._awake.set()
        self._gate.open()

    def gpus(self, urls: Sequence[str]) -> list[Sequence[str]]:
        """The GPUs that each engine at ``urls`` shares with the trainer, by tensor rank. Empty where one has GPUs of
        its own, or unknown ones."""
        members = [self._fleet.find(url) for url in urls] if self._colocate else []
        names = [self._servers[member.name].gpus for member in members if member is not None]
        return names if all(names) and len(names) == len(urls) else []

    def metrics(self) -> dict[str, float]:
        """Seconds that falling asleep and waking took since the last call; empty if no engine slept."""
        if not self._resume_seconds:
            return {}
        seconds, self._resume_seconds = self._resume_seconds, {}
        return {"time/engine_sleep": self._begin_seconds, "time/engine_wake": sum(seconds.values())}

    async def _release_memory(self, name: str) -> None:
        engine = self._fleet[name]
        if engine.phase not in (Phase.SERVING, Phase.SUSPECT):
            await self._stop(name, f"{name} was not in use when the others fell asleep")
            return
        try:
            await self._http.post(f"{engine.url}/flush_cache?timeout={FLUSH_SECONDS}", {}, seconds=self._timeout)
            await self._post(engine.url, "release", list(Memory))
        except EngineError as error:
            await self._stop(name, f"{engine.url} failed to release its memory: {error}")
        else:
            self._sleepers[engine.url] = SleepingEngine(name)

    async def _resume(self, url: str, memory: Memory) -> str | None:
        """Resume ``memory`` of the engine at ``url``; returns the error, or None on success or if nothing was
        released."""
        sleeper = self._sleepers.get(url)
        if sleeper is None or memory not in sleeper.released:
            return None
        started = time.perf_counter()
        try:
            await self._post(url, "resume", [memory])
        except EngineError as error:
            del self._sleepers[url]
            reason = f"{url} failed to resume its {memory}: {error}"
            await self._stop(sleeper.name, reason)
            return reason
        sleeper.released.discard(memory)
        seconds = time.perf_counter() - started
        self._resume_seconds[memory] = max(seconds, self._resume_seconds.get(memory, 0.0))
        return None

    async def _post(self, url: str, action: str, memory: list[Memory]) -> None:
        await self._http.post(f"{url}/{action}_memory_occupation", {"tags": memory}, seconds=self._timeout)

    async def _stop(self, name: str, reason: str) -> None:
        """Stop an engine's server, even while it starts, and count it as dead."""
        while self._fleet[name].phase is Phase.STARTING:
            await self._servers[name].stop()
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS):  # its process may not have existed yet
                    await self._fleet.changed.wait()
        self._fleet.died(name, reason)
        await self._servers[name].stop()
