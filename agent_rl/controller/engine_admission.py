"""Engines that started or restarted during a run receive the published weights while the trainer still has them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from agent_rl.config import R3Config
from agent_rl.controller.route_checks import refuse_unusable
from agent_rl.engine.route_probe.run import probe
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineError, RoutesMissingError
from agent_rl.utils.concurrency import run_alongside, shielded
from agent_rl.weight_sync.sync import WeightSync


class EngineAdmission:
    """Probes the engines that wait for the published weights, and syncs them one after the other.

    ``routes``: the section ``r3`` of a run that replays the rollout's routes, else None. ``headers`` go with every
    request of a probe.
    """

    def __init__(
        self, routes: R3Config | None, engine: SGLangEngine, sync: WeightSync, headers: Mapping[str, str]
    ) -> None:
        self._routes, self._engine, self._sync, self._headers = routes, engine, sync, headers

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Within the block engines may join, so the trainer's weights must not change. Engines that already wait join
        before the block; leaving it waits for one that is joining. Raises EngineLost, from within, where no engine is
        left."""
        for url in self._engine.fleet.waiting:
            await shielded(self._join(url))
        async with run_alongside(self._admit_waiting()):
            yield

    async def _admit_waiting(self) -> None:
        while True:
            url, *_ = await self._engine.fleet.until(lambda fleet: fleet.waiting)
            await shielded(self._join(url))

    async def _join(self, url: str) -> None:
        fleet = self._engine.fleet
        if (member := fleet.find(url)) is None:
            return
        try:
            if self._routes is not None and self._routes.probe:
                report = await probe(url, self._engine.model_spec, retract=True, headers=self._headers)
                refuse_unusable(self._routes, report)
        except RoutesMissingError as error:
            fleet.retire(member.name, str(error))
        except EngineError as error:
            fleet.died(member.name, str(error))
        else:
            await self._sync.join(url)
