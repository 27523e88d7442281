"""Checks the routes that a run trains on: a probe before the first step, and a budget of missing routes per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_rl.config import R3Config
from agent_rl.engine.route_probe.run import ProbeReport, probe, table
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import RoutesMissingError
from agent_rl.monitoring.console import Display
from agent_rl.rollout.metrics import missing_token_fraction
from agent_rl.types import Group


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
