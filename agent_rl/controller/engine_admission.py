"""Engines that came up during a run, or came back, get the published weights while the trainer still has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agent_rl.config import RunConfig
from agent_rl.controller.route_checks import is_probed, refuse_spoilt
from agent_rl.engine.route_probe.run import probe
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineError, RoutesMissingError
from agent_rl.utils.concurrency import beside, shielded
from agent_rl.weight_sync.sync import WeightSync


class EngineAdmission:
    """Probes the engines that wait for the published weights, and brings them there one after the other."""

    def __init__(self, config: RunConfig, engine: SGLangEngine, sync: WeightSync) -> None:
        self._config, self._engine, self._sync = config, engine, sync

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Within the block engines may join, so the trainer's weights must not change; those that wait already join
        first, and one that is just joining is waited for. Raises EngineLost, from within, where no engine is left."""
        for url in self._engine.fleet.waiting:
            await shielded(self._join(url))
        async with beside(self._run()):
            yield

    async def _run(self) -> None:
        while True:
            url, *_ = await self._engine.until(lambda fleet: fleet.waiting)
            await shielded(self._join(url))

    async def _join(self, url: str) -> None:
        fleet = self._engine.fleet
        if (member := fleet.find(url)) is None:
            return
        try:
            if is_probed(self._config):
                headers = self._config.engine.headers
                refuse_spoilt(self._config, await probe(url, self._engine.facts, retract=True, headers=headers))
        except RoutesMissingError as error:
            fleet.retire(member.name, str(error))
        except EngineError as error:
            fleet.died(member.name, str(error))
        else:
            await self._sync.join(url)
