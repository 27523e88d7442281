"""What a run does with the routes that are missing, and with a probe that failed."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.trajectories import trajectory

from agent_rl.config import RolloutConfig, RunConfig
from agent_rl.controller import engine_admission as routes
from agent_rl.controller.engine_admission import check_missing_budget, probe_engines
from agent_rl.engine.route_probe.checks import Check, CheckStatus
from agent_rl.engine.route_probe.run import ProbeReport
from agent_rl.errors import RoutesMissingError
from agent_rl.monitoring.console import Display
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.types import Group, Trajectory
from r3.routing import Routing


def config(**r3: Any) -> RunConfig:
    return RunConfig(name="x", model="m", r3=r3)


def lacking(missing: int) -> Trajectory:
    """A trajectory that needs a hundred rows, ``missing`` of them absent."""
    present = np.arange(101) >= missing
    present[-1] = False
    return replace(trajectory(1.0, sampled=98), routing=Routing(np.zeros((101, 1, 1), np.uint8), present, (), 4))


@pytest.mark.parametrize("missing", ["without_replay", "drop_sample"])
def test_the_budget_is_a_fraction_of_the_tokens_of_a_step(missing: str) -> None:
    groups = [Group("a", (lacking(3), lacking(0))), Group("b", (lacking(0), lacking(1)))]
    check_missing_budget(7, groups, config(missing=missing, missing_budget=0.01).r3)  # 4 of 400: exactly what it allows
    with pytest.raises(RoutesMissingError, match=r"^step 7: 1.00% .*lack routes, r3.missing_budget=0.009 allows 0.90%"):
        check_missing_budget(7, groups, config(missing=missing, missing_budget=0.009).r3)


def test_a_step_that_lost_all_its_groups_lacks_nothing() -> None:
    check_missing_budget(1, [], config(missing="without_replay", missing_budget=0).r3)


@pytest.mark.parametrize(
    ("missing", "source", "allowed"),
    [("error", "sampled", False), ("without_replay", "latest", True), ("drop_sample", "sampled", True)],
)
def test_the_policy_reaches_the_episodes(missing: str, source: str, allowed: bool) -> None:
    rules = EpisodeRules.from_config(config(missing=missing, source=source))
    assert (rules.routes.allows_missing, rules.routes.source) == (allowed, source)
    assert rules.for_evaluation(greedy=False).routes is None


def test_only_training_requests_kept_tokens() -> None:
    rules = EpisodeRules(RolloutConfig(top_k=5, min_p=0.1))
    sampling = [each.sampling(9, ()) for each in (rules, rules.for_evaluation(greedy=False), EpisodeRules())]
    assert [(each.top_k, each.min_p, each.keep_mask) for each in sampling] == [
        (5, 0.1, True), (5, 0.1, False), (None, 0.0, False)
    ]  # fmt: skip
    assert not rules.override(temperature=0.0).sampling(9, ()).keep_mask


CHECKS = ("routes captured", "key in every response", "start honored")


async def probing(monkeypatch: pytest.MonkeyPatch, chosen: RunConfig, failed: str = "") -> tuple[list[str], str]:
    """The servers probed, and what was shown; a report stands in for the real probe (tests/engine/test_probe.py)."""
    probed, shown = list[str](), io.StringIO()
    statuses = {name: CheckStatus.FAILED if name == failed else CheckStatus.OK for name in CHECKS}

    async def report(url: str, model_spec: object, **options: object) -> ProbeReport:
        probed.append(url)
        checks = tuple(Check(name, status, "as found", "mend it") for name, status in statuses.items())
        return ProbeReport(url, checks, 13, 0.5)

    monkeypatch.setattr(routes, "probe", report)
    engine = SimpleNamespace(urls=("http://a", "http://b"), model_spec=None)
    try:
        await probe_engines(chosen.routes_config, engine, {}, Display("x", Console(file=shown, width=200)))
    finally:
        assert shown.getvalue() == "" or "probing the engine's routes" in shown.getvalue()
    return probed, shown.getvalue()


async def test_each_engine_is_probed_and_reported_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    probed, shown = await probing(monkeypatch, config())
    assert probed == ["http://a", "http://b"]
    assert shown.count("routes: 3 checks passed; 13 requests, 0.5 s") == 2


async def test_a_failed_check_stops_the_run_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = r"^http://a: its routes can't be replayed \(start honored: as found\): mend it; see .agent-rl r3 probe"
    with pytest.raises(RoutesMissingError, match=expected):
        await probing(monkeypatch, config(), "start honored")


async def test_the_probe_accepts_missing_routes_where_the_config_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RoutesMissingError, match="key in every response"):
        await probing(monkeypatch, config(), "key in every response")
    _, shown = await probing(monkeypatch, config(missing="without_replay"), "key in every response")
    assert "1 failed (key in every response: as found)" in shown


async def test_nothing_is_probed_where_nothing_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in (config(probe=False), RunConfig(name="x", model="m", train={"replay": "off"})):
        assert await probing(monkeypatch, chosen, "start honored") == ([], "")
