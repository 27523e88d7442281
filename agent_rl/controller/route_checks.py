"""The routes that a run trains on: probed before its first step, and held to a budget in every step."""

from __future__ import annotations

from collections.abc import Sequence

from agent_rl.config import R3Config, RunConfig
from agent_rl.engine.route_probe.run import ProbeReport, probe, table
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import RoutesMissingError
from agent_rl.monitoring.console import Display
from agent_rl.rollout.metrics import missing_token_fraction
from agent_rl.types import Group


async def probe_engines(config: RunConfig, engine: SGLangEngine, display: Display) -> None:
    """Probe every engine of a run that replays its routes, and say what was found: a line, or a table on failure.

    Raises RoutesMissingError, one line, where a failed check makes replay wrong.
    """
    if not is_probed(config):
        return
    display.stage("probing the engine's routes")
    for url in engine.urls:
        report = await probe(url, engine.facts, retract=True, headers=config.engine.headers)
        if report.failed:
            display.table(table(report))
        display.fact("routes", report.line())
        refuse_spoilt(config, report)


def is_probed(config: RunConfig) -> bool:
    """Whether a run asks for probes of its engines."""
    return config.wants_routes and config.r3.probe


def refuse_spoilt(config: RunConfig, report: ProbeReport) -> None:
    """Raises RoutesMissingError, one line, where a failed check makes replay wrong."""
    if spoiling := report.spoils(missing_allowed=config.r3.missing != "error"):
        findings = "; ".join(f"{check.name}: {check.found}" for check in spoiling)
        raise RoutesMissingError(
            f"{report.url}: its routes can't be replayed ({findings}): {spoiling[0].advice}; "
            "see `agent-rl r3 probe URL`, or set train.replay to r2 or off"
        )


def check_budget(step: int, groups: Sequence[Group], config: R3Config) -> None:
    """Raises RoutesMissingError where more of a step's tokens lack routes than ``r3.missing_budget`` allows."""
    share = missing_token_fraction(trajectory for group in groups for trajectory in group.trajectories)
    if config.missing != "error" and share > config.missing_budget:
        raise RoutesMissingError(
            f"step {step}: {share:.2%} of its tokens lack routes, r3.missing_budget={config.missing_budget:g} allows "
            f"{config.missing_budget:.2%}; `agent-rl r3 probe URL` says what drops them"
        )
