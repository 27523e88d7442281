"""Supervises the engines of a run: starts them, checks their health, restarts those that died.

Each engine has a task, which acts by the engine's phase (:mod:`agent_rl.engine.fleet`)::

    starting   start our own server; check whether an external one is up yet
    joining    run the admission checks; then wait for the published weights
    serving    read its weight version, every ``engine.health_interval`` seconds
    suspect    let it sample a token, every second
    dead       as starting, when no engine sleeps (:mod:`agent_rl.engine.sleep`)
    retired    stop our own server

:func:`agent_rl.engine.factory.open_engine` runs the tasks beside its block. Every check has a time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from agent_rl.config import EngineConfig, parse_addresses
from agent_rl.engine.admission_checks import responds
from agent_rl.engine.fleet import Member, Phase
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.types import Server
from agent_rl.errors import EngineError, EngineRejected, EngineStartError, RoutesMissingError, UserError
from agent_rl.utils.concurrency import shielded
from agent_rl.utils.http import AsyncHttp

CHECK_SECONDS = 10.0
SAMPLE_SECONDS = 25.0
"""SGLang gives its own health check, which samples a token, 20 s."""
ADMIT_SECONDS = 60.0
_SUSPECT_SECONDS = 1.0


class EngineSupervisor:
    """Supervises the engines of ``engine.fleet``. ``servers``: those that are our own processes, by name."""

    def __init__(self, engine: SGLangEngine, servers: Mapping[str, Server], config: EngineConfig) -> None:
        self._fleet, self._admission, self._sleep = engine.fleet, engine.admission, engine.sleep
        self._servers, self._config = servers, config
        self._http = AsyncHttp(SAMPLE_SECONDS, headers=config.headers)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Start our own servers (``engine.min_count`` of them, where that is set) and check every engine, concurrently.
        Raises the first failure."""
        async with asyncio.TaskGroup() as group:
            for name in self._fleet.names[: self._config.min_count if self._servers else None]:
                group.create_task(self._open(name))

    async def _open(self, name: str) -> None:
        server = self._servers.get(name)
        url = name if server is None else await server.start()
        self._fleet.up(name, url)
        await self._admission.admit(url)
        self._fleet.admitted(name)

    async def run(self) -> None:
        """Supervise the engines until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self._fleet.names:
                self._supervise(name, group)
            if self._config.urls_file is not None:
                group.create_task(self._follow(self._config.urls_file, group), name="follow-urls-file")

    async def close(self) -> None:
        """Stop our own servers. Idempotent."""
        await shielded(asyncio.gather(*(server.stop() for server in self._servers.values())))
        await self._http.close()

    def _supervise(self, name: str, group: asyncio.TaskGroup) -> None:
        """Start the engine's task. A retired engine that starts over may still have one: a health check from before is
        not answered yet."""
        if (task := self._tasks.get(name)) is None or task.done():
            self._tasks[name] = group.create_task(self._run(name), name=f"supervise-{name}")

    async def _run(self, name: str) -> None:
        """Act on one engine, phase after phase, until it is retired."""
        while (member := self._fleet[name]).phase is not Phase.RETIRED:
            await self._act(member)
            if self._fleet[name].phase is member.phase:
                await self._pause(_SUSPECT_SECONDS if member.phase is Phase.SUSPECT else self._config.health_interval)
        if (server := self._servers.get(name)) is not None:
            await server.stop()

    async def _pause(self, seconds: float) -> None:
        """Wait ``seconds``, or until any engine's phase changes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._fleet.changed.wait()

    async def _act(self, member: Member) -> None:
        if member.phase in (Phase.STARTING, Phase.DEAD):
            await self._start(member)
        elif (server := self._servers.get(member.name)) is not None and (reason := server.death()) is not None:
            self._fleet.died(member.name, reason)
        elif member.phase is Phase.JOINING and not member.admitted:
            await self._admit(member)
        else:
            await self._check_health(member)

    async def _start(self, member: Member) -> None:
        server = self._servers.get(member.name)
        if server is None:
            if await responds(self._http, member.name):
                self._fleet.up(member.name, member.name)
            return
        await server.stop()
        await self._sleep.wait_awake()
        self._fleet.restart(member.name)
        try:
            self._fleet.up(member.name, await server.start())
        except EngineStartError as error:
            self._fleet.died(member.name, str(error))

    async def _admit(self, member: Member) -> None:
        try:
            async with asyncio.timeout(ADMIT_SECONDS):
                await self._admission.admit(member.url)
        except (EngineRejected, RoutesMissingError, UserError) as error:
            self._fleet.retire(member.name, str(error))
        except (EngineError, TimeoutError) as error:
            self._fleet.missed(member.name, str(error) or f"{member.url}: not checked within {ADMIT_SECONDS:g} s")
        else:
            self._fleet.admitted(member.name)

    async def _check_health(self, member: Member) -> None:
        """Check that the engine answers, and which weights it has."""
        floor, updating = self._fleet.floor, self._fleet.updating
        try:
            # A paused engine samples nothing, and a sleeping one would die of it.
            if member.phase is Phase.SUSPECT and not updating and self._sleep.is_awake:
                await self._http.get(f"{member.url}/health")
            async with asyncio.timeout(CHECK_SECONDS):
                version = str((await self._http.get_json(f"{member.url}/model_info")).get("weight_version", ""))
        except (EngineError, TimeoutError) as error:
            self._fleet.missed(member.name, str(error) or f"{member.url}: no answer within {CHECK_SECONDS:g} s")
            return
        steady = not updating and not self._fleet.updating and floor == self._fleet.floor
        if member.phase is not Phase.JOINING and steady and not self._fleet.accepts(version, floor):
            self._fleet.stale(member.url, version)
        else:
            self._fleet.answered(member.name)

    async def _follow(self, path: Path, group: asyncio.TaskGroup) -> None:
        """Add engines whose lines are added to ``urls_file``, retire those whose lines are removed. A missing file, or
        one without an address, is being replaced, and changes nothing."""
        fixed = {url.rstrip("/") for url in self._config.urls}
        before = set(self._fleet.names) - fixed
        while True:
            await asyncio.sleep(self._config.health_interval)
            with suppress(OSError):
                now = set(parse_addresses(await asyncio.to_thread(path.read_text))) or before
                for url in before - now:
                    self._fleet.retire(url, f"its line was removed from {path}")
                for url in sorted(now - before - fixed):
                    self._fleet.add(url, url)
                    self._supervise(url, group)
                before = now


def phase_change(before: Member, after: Member) -> str | None:
    """A line for the user about a change of phase; None for one that needs no line."""
    engine = f"engine {after.name}" + (f" ({after.url})" if after.url not in ("", after.name) else "")
    if after.phase is before.phase:
        return None
    if after.phase is Phase.DEAD:
        return f"{engine} is out of use: {after.reason}"
    if after.phase is Phase.RETIRED:
        return f"{engine} is retired: {after.reason}"
    if after.phase is Phase.JOINING and before.phase in (Phase.SERVING, Phase.SUSPECT):
        return f"{engine} waits for the published weights: {after.reason}"
    if after.phase is Phase.STARTING:
        return f"{engine} is restarting"
    if after.phase is Phase.SERVING and after.losses and before.phase is Phase.JOINING:
        return f"{engine} serves again"
    return None
