"""Metrics: what is written is registered, what is registered is made, and the page says so."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.trajectories import trajectory

from agent_rl.config import MAX_STALENESS, Clip, GuardConfig
from agent_rl.config.train import CurriculumConfig
from agent_rl.controller.advantages import build_samples
from agent_rl.controller.async_rollout.task_ledger import LedgerFile
from agent_rl.controller.guard import Guard
from agent_rl.controller.journal import Journal
from agent_rl.controller.rollout_runtime import TaskRuntime
from agent_rl.controller.task_order import Curriculum
from agent_rl.endpoint.server import EndpointServer
from agent_rl.engine.fleet import Fleet
from agent_rl.engine.generation_gate import GenerationGate
from agent_rl.engine.utilization import EngineUtilization
from agent_rl.errors import AgentRlError
from agent_rl.monitoring.metrics import METRICS, NAMES
from agent_rl.monitoring.metrics_log import MetricsLog, read_metrics
from agent_rl.rollout.filters import filter_metrics
from agent_rl.rollout.group import Rollout
from agent_rl.rollout.metrics import rollout_metrics, source_metrics
from agent_rl.rollout.rescore import rescore_metrics
from agent_rl.rollout.route_audit import audit_metrics
from agent_rl.train.expert_balancing.report import BalanceReport, PassBalance, balance_metrics
from agent_rl.train.reports import (
    CriticReport,
    CriticUpdate,
    RankReport,
    ReferenceReport,
    RouteCounts,
    Update,
    UpdateSums,
)
from agent_rl.train.step_metrics import sft_metrics, step_metrics
from agent_rl.types import Group, Rescored, RouteAudit, Turn
from agent_rl.utils.concurrency import LoopLag
from r3.kept_tokens import KeptTokens
from r3.routing import Routing
from sandbox.ray.backend import ClusterBackend

ROOT = Path(__file__).resolve().parent.parent
NEED_A_RUN = (
    "agent_rl/controller/batch.py",
    "agent_rl/controller/sft.py",
    "agent_rl/controller/teacher.py",
    "agent_rl/controller/train.py",
    "agent_rl/engine/sleep.py",
    "agent_rl/monitoring/metrics_log.py",
    "agent_rl/weight_sync/bucket_sender.py",
    "agent_rl/weight_sync/publisher.py",
    "agent_rl/weight_sync/sync.py",
)
"""Files whose metrics only engines or a whole run give."""
GROUPS = {metric.group for metric in METRICS}


def made_by_calling() -> Mapping[str, set[str]]:
    """File -> the metrics that its functions give for a step in which everything there is to measure happened."""
    routing = Routing(np.zeros((5, 1, 1), np.uint8), np.ones(5, np.bool_), (), 4)
    won = replace(trajectory(1.0), routing=routing, rescored=Rescored(np.zeros((2, 2), np.float32), 1.0))
    won = replace(
        won, mutant_seconds=1.0, audit=RouteAudit(2, 0, 2, 0), harness={"rewrites": 0, "retries": 0, "echo_differs": 0}
    )
    kept = KeptTokens.from_rows([[1, 2]] * int(won.loss_mask.sum()))
    won = replace(won, parts={"<part>": 1.0}, metrics={"<metric>": 1.0}, kept=kept)
    group = Group("t", (won, replace(trajectory(0.0), recovered=True)))
    turn = Turn("", None, {}, None, "", 3, 2, 0, 0, "0", 0.0, 0.0)
    of_source = source_metrics([Group("<source>:t", (won,))], ["<source>"])
    audited, backend = set(audit_metrics([won])), ClusterBackend([], max_per_node=1)
    made = {
        "rollout/metrics.py": {*rollout_metrics(Rollout((group,), (), seconds=1.0)), *of_source} - audited,
        "rollout/route_audit.py": audited,
        "rollout/filters.py": filter_metrics([group], [Group("u", (won, won))]),
        "rollout/rescore.py": rescore_metrics([won]),
        "controller/task_order.py": Curriculum(CurriculumConfig(), lambda: {"t": 1.0}, Path("none")).metrics(),
        "controller/advantages.py": build_samples(
            [replace(group, trajectories=(replace(won, turns=(turn,)),))], gamma=1.0
        ).metrics,
        "engine/fleet.py": Fleet().metrics(),
        "engine/generation_gate.py": GenerationGate().metrics(),
        "engine/utilization.py": loaded().metrics(["e"]),
        "utils/concurrency.py": lag().metrics(),
        "controller/journal.py": Journal(Path("none"), "run", turns=True).metrics(1),
        "controller/async_rollout/task_ledger.py": LedgerFile(Path("none")).counts(),
        "controller/guard.py": Guard(GuardConfig(), Path("none"), print).judge(1, {}, []),
        "controller/rollout_runtime.py": TaskRuntime(backend, env=None).metrics(),
        "endpoint/server.py": EndpointServer(Path("none"), 0).metrics(),
        "train/expert_balancing/report.py": balance_metrics([balanced()]),
        "train/step_metrics.py": {
            *step_metrics([report()], routes(), routes(), Clip(0.2, 0.2)),
            *sft_metrics(Update(grad_norm=1.0, lr=1e-3), 1.0, 3),
        },
    }
    return {f"agent_rl/{file}": set(names) for file, names in made.items()}


def loaded() -> EngineUtilization:
    load = EngineUtilization()
    load.add("e", 1)
    return load


def lag() -> LoopLag:
    measured = LoopLag()
    measured.delays.append(0.001)
    return measured


def report() -> RankReport:
    logprobs, update = np.zeros(MAX_STALENESS + 1, np.float32), Update(grad_norm=1.0, lr=1e-3)
    lag = np.arange(len(logprobs), dtype=np.int32)
    sums = UpdateSums(
        3,
        loss=0.0,
        clipped=0,
        entropy=0,
        kl=0,
        correction=0,
        dropped=0,
        kl_reference=0,
        update=update,
        distill=0.1,
        observed=2,
        observation=3.0,
        router_shift=2.0,
    )
    reference = ReferenceReport(taken=0.0, seconds=1.0)
    critic = CriticReport((2, 1, 1, 1, 0, 0), (CriticUpdate(2),))
    passes = (logprobs, logprobs, logprobs, lag, (sums,), 1.0, 1.0, 1.0, reference)
    return RankReport(*passes, teacher_logprobs=logprobs, critic=critic)


def balanced() -> BalanceReport:
    ones, links = np.ones((1, 1)), np.ones((1, 1), np.int32)
    update = PassBalance("update", (1,), ones, ones, links, links, ones)
    return BalanceReport(0, (update,), 1, 0, 1, 1, 1.0, 1.0, 1.0, 1.0)


def routes() -> RouteCounts:
    return replace(RouteCounts.none(2), needed=3, present=3, routers=6, tokens=3, sequences=1)


def literals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def registered_by_source() -> Mapping[str, set[str]]:
    registered = defaultdict[str, set[str]](set)
    for metric in METRICS:
        registered[metric.source] |= set(metric.names)
    return registered


def test_an_unregistered_metric_is_refused(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    with pytest.raises(AgentRlError, match=r"^metric 'x/y' is not registered: add it to \S+/metrics\.py$"):
        log.append(1, {"reward/mean": 0.5, "x/y": 1.0})
    log.close()
    assert read_metrics(tmp_path) == []


def test_functions_give_exactly_the_metrics_registered_for_their_file() -> None:
    made, registered = made_by_calling(), registered_by_source()
    assert made == {source: names for source, names in registered.items() if source not in NEED_A_RUN}


@pytest.mark.parametrize("source", NEED_A_RUN)
def test_other_files_name_the_metrics_registered_for_them(source: str) -> None:
    """They name the metric, or a stage whose seconds it is."""
    texts = set(literals(ROOT / source))
    stale = [
        name
        for name in registered_by_source()[source]
        if not texts & {name, part := name.partition("/")[2], part.removesuffix("_seconds")}
    ]
    assert not stale, f"{source} makes no {', '.join(stale)}"


def test_every_metric_that_the_code_names_is_registered() -> None:
    named = {
        (text, str(path.relative_to(ROOT)))
        for path in sorted((ROOT / "agent_rl").rglob("*.py"))
        for text in literals(path)
        if text.partition("/")[0] in GROUPS and text.partition("/")[2].isidentifier()
    }
    beginnings = {metric.name.partition("_<")[0] for metric in METRICS}
    unknown = [f"{path} names {text}" for text, path in named if text not in NAMES | beginnings]
    assert named
    assert not unknown, "\n".join(unknown)


def test_a_name_is_registered_once() -> None:
    assert len(NAMES) == sum(len(metric.names) for metric in METRICS)
