"""A whole training run, killed and stopped in the middle."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from integration_run import REAL, Run, wait
from killed_run import exact
from marked import kill_rank
from safetensors.numpy import load_file
from support.journal_rows import read_journal

from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.records import read_trajectories, step_stem
from agent_rl.rollout.token_details import details_path, read_detail
from agent_rl.types import Trajectory
from agent_rl.viewer.api import Resources
from r3.mismatch.report import k3_kl

pytestmark = [*REAL, pytest.mark.timeout(600)]

Start = Callable[..., Run]


@pytest.mark.long
@pytest.mark.parametrize("weight_sync", ["full", pytest.param("delta", marks=pytest.mark.exhaustive)])
def test_a_run_killed_within_a_step_resumes_without_loss(start: Start, tmp_path: Path, weight_sync: str) -> None:
    """Killed in step 4, with a checkpoint of step 2: step 3 is learned again from the journal, bit for bit, and of step
    4 only the episodes that had not finished are sampled. Sampling is restricted, so the journal has kept tokens."""
    settings = f"engine.weight_sync={weight_sync}", "rollout.temperature=1.5", "rollout.top_p=0.9"
    first = start(*settings)
    first.until("step 4: rollout ...")
    journal = tmp_path / "small" / "journal" / "step-000004.journal"
    wait(lambda: len(read_journal(journal)) >= 2, 60, "two episodes of step 4 in the journal")
    first.process.send_signal(signal.SIGKILL)
    first.finish()
    before, finished = read_metrics(tmp_path / "small"), sampled(read_journal(journal))

    second = start(*settings)
    assert second.finish() == 0, second.text
    assert "resuming from" in second.text
    assert "step 3: 12 finished trajectories are in the journal" in second.text
    first.none_alive()
    second.none_alive()
    assert_complete(tmp_path / "small")
    rows = read_metrics(tmp_path / "small")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[:2] == before[:2], "the steps before the checkpoint were not done again"
    assert learned(rows[2]) == learned(before[2])
    assert all(row["weight_sync/verified"] == 1 for row in rows)
    assert all(row["rollout/kept_tokens"] > 1 for row in rows)
    assert all(row["mismatch/k3_kl"] < 1e-3 for row in rows if row["train/samples"]), (
        "a step may have equal rewards only"
    )
    if weight_sync == "delta":
        assert all(row["weight_sync/delta_ratio"] < 0.5 and row["weight_sync/retries"] == 0 for row in rows)
    assert finished <= sampled(t for group in read_trajectories(tmp_path / "small", 4) for t in group.trajectories)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weight_sync", ["full", "delta"])
def test_a_rank_that_dies_while_it_publishes_is_restarted(start: Start, tmp_path: Path, weight_sync: str) -> None:
    """Before a checkpoint, and with one: the engine, left paused with an open update, gets the weights anew."""
    run = start(f"engine.weight_sync={weight_sync}")
    for death, stage in enumerate(("step 1: weights to the engine ...", "step 3: weights to the engine ...")):
        run.until(stage)
        kill_rank(run.mark)
        wait(lambda death=death: run.text.count("starting the trainer again") > death, 60, lambda: run.text)
    assert run.finish() == 0, run.text
    run.none_alive()
    assert_complete(tmp_path / "small")
    assert [row["step"] for row in read_metrics(tmp_path / "small")] == [1, 2, 3, 4]
    assert "step 3: 12 finished trajectories are in the journal" in run.text


def learned(row: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics but for the clock's, the engine's own, and those of audits, which chance decides and no journal
    keeps."""
    others = ("weight_sync/", "r3/audit_")
    return {name: value for name, value in exact(row).items() if not name.startswith(others)}


def sampled(trajectories: Iterable[Trajectory]) -> set[tuple[bytes, bytes]]:
    """Tokens and log-probs: no two samplings agree in both."""
    return {(t.tokens.tobytes(), t.logprobs.tobytes()) for t in trajectories}


def assert_complete(run: Path) -> None:
    """Everything that a finished run's directory holds, and what must be true of it."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 4
    assert 0 <= summary["pass_at_1_before"] <= 1
    assert 0 <= summary["pass_at_1_after"] <= 1
    assert summary["sandbox"] == "bubblewrap"
    assert summary["engine"].startswith("sglang")
    assert (run / "run.png").stat().st_size > 10_000
    assert list((run / "tensorboard").iterdir())
    assert (run / "model" / "config.json").exists()
    assert not [path for path in run.rglob("*") if path.name.endswith((".tmp", ".partial", ".journal"))]
    for row in read_metrics(run):
        assert row["rollout/infrastructure_failures"] == 0
        if row["train/samples"]:
            assert row["r3/router_mismatch"] == 0
            assert row["r3/coverage"] > 0.9
        assert_detail(run, row)
    resources = Resources([run])
    assert not [page for page in resources.pages() if "error" in resources.read(page)]
    shown = resources.read("0/run")
    assert shown["evaluations"][0]["n"] == "eval-0-sampled"
    assert shown["notes"] == []
    trajectories = [t for group in read_trajectories(run, 4) for t in group.trajectories]
    assert len(trajectories) == 12
    assert all(set(t.weight_versions) == {"3"} for t in trajectories), "step 4 is sampled with the weights of step 3"


def assert_detail(run: Path, row: Mapping[str, float]) -> None:
    """A step's metrics follow from what was kept of its tokens, within the goal of 1 % for k3."""
    stem = step_stem(run, int(row["step"]))
    numbers = load_file(details_path(stem))["numbers"].tolist()
    details = [detail for number in numbers if (detail := read_detail(stem, number)) is not None]
    assert len(details) == row["train/samples"]
    if not details:
        return
    gaps = np.concatenate([detail.gap for detail in details]).astype(float)
    gaps_without_replay = np.concatenate([detail.gap_without_replay for detail in details]).astype(float)  # type: ignore[arg-type]
    assert row["train/sampled_tokens"] <= len(gaps), "the loss counts no token with one kept id"
    assert k3_kl(gaps, 0 * gaps) == pytest.approx(row["mismatch/k3_kl"], rel=0.01)
    assert k3_kl(gaps_without_replay, 0 * gaps) == pytest.approx(row["mismatch_without_replay/k3_kl"], rel=0.01)
    rows = [d.differs_without_replay for d in details if d.differs_without_replay is not None]
    assert (sum(int(differs.numbers.sum()) for differs in rows) > 0) is (
        row["mismatch_without_replay/router_mismatch"] > 0
    )


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_a_run_stopped_in_a_rollout_leaves_nothing_behind(start: Start, tmp_path: Path, stop: signal.Signals) -> None:
    run = start("eval.tasks=0")
    run.until("step 1: rollout ...")
    run.process.send_signal(stop)
    assert run.finish(timeout=30) == 130, run.text
    run.none_alive(timeout=10)
    assert "stopping: " in run.text
    assert run.text.rstrip().endswith("stopped; start again to resume")
    assert "Traceback" not in run.text
    assert "SIGTERM received" not in run.text, "Ray's handler"
