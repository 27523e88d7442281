"""Probes engines and admits new ones; checks the budget of missing routes.

Engines that started or restarted during a run receive the published weights while the trainer still has them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from agent_rl.config import R3Config
from agent_rl.engine.route_probe.run import ProbeReport, probe, table
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineError, RoutesMissingError
from agent_rl.monitoring.console import Display
from agent_rl.rollout.metrics import missing_token_fraction
from agent_rl.types import Group
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
        # An engine that started without weights has no routes to probe.
        if receives := self._engine.model_spec.quantized:
            await self._sync.join(url)
        try:
            if self._routes is not None and self._routes.probe:
                report = await probe(url, self._engine.model_spec, retract=True, headers=self._headers)
                refuse_unusable(self._routes, report)
        except RoutesMissingError as error:
            fleet.retire(member.name, str(error))
        except EngineError as error:
            fleet.died(member.name, str(error))
        else:
            if not receives:
                await self._sync.join(url)


async def probe_engines(
    routes: R3Config | None, engine: SGLangEngine, headers: Mapping[str, str], display: Display
) -> None:
    """Probe every engine in use where ``routes.probe`` is on (None: the run replays no routes), and show the result: a
    line, or a table where a check failed.

    Raises RoutesMissingError, one line, where a failed check makes replay wrong.
    """
    if routes is None or not routes.probe:
        return
    display.stage("probing the engine's routes")
    for url in engine.urls:
        report = await probe(url, engine.model_spec, retract=True, headers=headers)
        if report.failed:
            display.table(table(report))
        display.fact("routes", report.line())
        refuse_unusable(routes, report)


def refuse_unusable(routes: R3Config, report: ProbeReport) -> None:
    """Raises RoutesMissingError, one line, where a failed check makes replay wrong."""
    if failures := report.spoils(missing_allowed=routes.missing != "error"):
        findings = "; ".join(f"{check.name}: {check.finding}" for check in failures)
        raise RoutesMissingError(
            f"{report.url}: its routes can't be replayed ({findings}): {failures[0].advice}; "
            "see `agent-rl r3 probe URL`, or set train.replay to r2 or off"
        )


def check_missing_budget(step: int, groups: Sequence[Group], routes: R3Config) -> None:
    """Raises RoutesMissingError where more of a step's tokens lack routes than ``r3.missing_budget`` allows."""
    fraction = missing_token_fraction(trajectory for group in groups for trajectory in group.trajectories)
    if routes.missing != "error" and fraction > routes.missing_budget:
        raise RoutesMissingError(
            f"step {step}: {fraction:.2%} of its tokens lack routes, r3.missing_budget={routes.missing_budget:g} "
            f"allows {routes.missing_budget:.2%}; `agent-rl r3 probe URL` says what drops them"
        )
