"""Looks after the engines of a run: starts them, asks after their health, starts those again that died.

Each engine has a task of its own, which does what its phase asks for (:mod:`agent_rl.engine.fleet`)::

    starting   start the server that is ours; ask one that is not whether it is there yet
    joining    check it; then it waits for the published weights
    serving    ask which weights it has, every ``engine.health_interval`` seconds
    suspect    let it sample a token, every second
    dead       as starting, when no engine sleeps (:mod:`agent_rl.engine.sleep`)
    retired    stop the server that is ours

Whoever opened the engines owns the tasks, which end with the block that they run beside
(:func:`agent_rl.utils.concurrency.beside`). Every question has a time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from agent_rl.config import EngineConfig, addresses
from agent_rl.engine.fleet import Member, Phase
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.types import Server
from agent_rl.errors import EngineError, EngineRejected, EngineStartError, RoutesMissingError, UserError
from agent_rl.utils.concurrency import Pulse, shielded
from agent_rl.utils.http import AsyncHttp

QUESTION_SECONDS = 10.0
SAMPLE_SECONDS = 25.0
"""SGLang gives its own question, whether it can sample, 20 s."""
ADMIT_SECONDS = 60.0
_SUSPECT_SECONDS = 1.0


class EngineSupervisor:
    """Keeps the engines of ``engine.fleet``; ``servers`` are those that are ours, by the engine's name."""

    def __init__(self, engine: SGLangEngine, servers: Mapping[str, Server], config: EngineConfig) -> None:
        self._engine, self._fleet, self._servers, self._config = engine, engine.fleet, servers, config
        self._http = AsyncHttp(SAMPLE_SECONDS, headers=config.headers)
        self._turns = Pulse()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._fleet.listeners.append(lambda before, after: self._turns.give())

    async def open(self) -> None:
        """Start what is ours (of ``engine.min_count`` alone, where that is fewer) and check every engine, all side
        by side. Raises what the first that fails raises."""
        async with asyncio.TaskGroup() as opening:
            for name in self._fleet.names[: self._config.min_count if self._servers else None]:
                opening.create_task(self._open(name))

    async def _open(self, name: str) -> None:
        server = self._servers.get(name)
        url = name if server is None else await server.start()
        self._fleet.up(name, url)
        await self._engine.admit(url)
        self._fleet.admitted(name)

    async def run(self) -> None:
        """Look after the engines until it is cancelled."""
        async with asyncio.TaskGroup() as keeping:
            for name in self._fleet.names:
                self._look_after(name, keeping)
            if self._config.urls_file is not None:
                keeping.create_task(self._follow(self._config.urls_file, keeping), name="keep-urls-file")

    async def close(self) -> None:
        """Stop what is ours. Idempotent."""
        await shielded(asyncio.gather(*(server.stop() for server in self._servers.values())))
        await self._http.close()

    def _look_after(self, name: str, keeping: asyncio.TaskGroup) -> None:
        """Give an engine its task. One that begins anew may still have it: a question from before has no answer yet."""
        if (task := self._tasks.get(name)) is None or task.done():
            self._tasks[name] = keeping.create_task(self._keep(name), name=f"keep-{name}")

    async def _keep(self, name: str) -> None:
        """One engine's life, from phase to phase."""
        while (member := self._fleet[name]).phase is not Phase.RETIRED:
            await self._tend(member)
            if self._fleet[name].phase is member.phase:
                await self._pause(_SUSPECT_SECONDS if member.phase is Phase.SUSPECT else self._config.health_interval)
        if (server := self._servers.get(name)) is not None:
            await server.stop()

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or until something happens in the fleet."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._turns.wait()

    async def _tend(self, member: Member) -> None:
        if member.phase in (Phase.STARTING, Phase.DEAD):
            await self._start(member)
        elif (server := self._servers.get(member.name)) is not None and (reason := server.death()) is not None:
            self._fleet.died(member.name, reason)
        elif member.phase is Phase.JOINING and not member.admitted:
            await self._admit(member)
        else:
            await self._look(member)

    async def _start(self, member: Member) -> None:
        server = self._servers.get(member.name)
        if server is None:
            if await self._engine.lives(member.name):
                self._fleet.up(member.name, member.name)
            return
        await server.stop()
        await self._engine.sleep.over()
        self._fleet.restart(member.name)
        try:
            self._fleet.up(member.name, await server.start())
        except EngineStartError as error:
            self._fleet.died(member.name, str(error))

    async def _admit(self, member: Member) -> None:
        try:
            async with asyncio.timeout(ADMIT_SECONDS):
                await self._engine.admit(member.url)
        except (EngineRejected, RoutesMissingError, UserError) as error:
            self._fleet.retire(member.name, str(error))
        except (EngineError, TimeoutError) as error:
            self._fleet.missed(member.name, str(error) or f"{member.url}: not checked within {ADMIT_SECONDS:g} s")
        else:
            self._fleet.admitted(member.name)

    async def _look(self, member: Member) -> None:
        """Ask after the health of an engine, and which weights it has."""
        floor, updating = self._fleet.floor, self._fleet.updating
        try:
            # One that is paused samples nothing, and one that sleeps would die of it.
            if member.phase is Phase.SUSPECT and not updating and self._engine.sleep.is_over:
                await self._http.get(f"{member.url}/health")
            async with asyncio.timeout(QUESTION_SECONDS):
                version = str((await self._http.get_json(f"{member.url}/model_info")).get("weight_version", ""))
        except (EngineError, TimeoutError) as error:
            self._fleet.missed(member.name, str(error) or f"{member.url}: no answer within {QUESTION_SECONDS:g} s")
            return
        steady = not updating and not self._fleet.updating and floor == self._fleet.floor
        if member.phase is not Phase.JOINING and steady and not self._fleet.accepts(version, floor):
            self._fleet.stale(member.url, version)
        else:
            self._fleet.answered(member.name)

    async def _follow(self, path: Path, keeping: asyncio.TaskGroup) -> None:
        """Add the engines whose lines are added to ``urls_file``; take those out of use whose lines are gone. A file
        that is gone, or without an address, is being replaced."""
        fixed = {url.rstrip("/") for url in self._config.urls}
        before = set(self._fleet.names) - fixed
        while True:
            await asyncio.sleep(self._config.health_interval)
            with suppress(OSError):
                now = set(addresses(await asyncio.to_thread(path.read_text))) or before
                for url in before - now:
                    self._fleet.retire(url, f"its line was taken from {path}")
                for url in sorted(now - before - fixed):
                    self._fleet.add(url, url)
                    self._look_after(url, keeping)
                before = now


def story(before: Member, after: Member) -> str | None:
    """What a user is told of a change of phase, in one line; None of one that is none of their business."""
    who = f"engine {after.name}" + (f" ({after.url})" if after.url not in ("", after.name) else "")
    if after.phase is before.phase:
        return None
    if after.phase is Phase.DEAD:
        return f"{who} is out of use: {after.reason}"
    if after.phase is Phase.RETIRED:
        return f"{who} is not used again: {after.reason}"
    if after.phase is Phase.JOINING and before.phase in (Phase.SERVING, Phase.SUSPECT):
        return f"{who} waits for the published weights: {after.reason}"
    if after.phase is Phase.STARTING:
        return f"{who} is started again"
    if after.phase is Phase.SERVING and after.losses and before.phase is Phase.JOINING:
        return f"{who} serves again"
    return None
