"""The whole slice, and what is promised when it is killed or stopped in the middle."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from integration_run import Run

from agent_rl.observe.metrics import read_metrics
from agent_rl.rollout.records import read_trajectories

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.megatron,
    pytest.mark.bubblewrap,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

Start = Callable[..., Run]


def test_killed_in_the_middle_of_a_step_it_resumes_and_finishes(start: Start, tmp_path: Path) -> None:
    first = start()
    first.until("step 2: rollout ...")
    first.process.send_signal(signal.SIGKILL)
    first.finish()
    before = read_metrics(tmp_path / "small")

    second = start()
    assert second.finish() == 0, second.text
    assert "resuming from" in second.text
    first.none_alive()
    second.none_alive()
    assert_complete(tmp_path / "small")
    rows = read_metrics(tmp_path / "small")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0] == before[0], "the step before the checkpoint was not done again"


def assert_complete(run: Path) -> None:
    """Everything that a finished run's folder holds, and what must be true of it."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert 0 <= summary["pass_at_1_before"] <= 1
    assert 0 <= summary["pass_at_1_after"] <= 1
    assert summary["sandbox"] == "bubblewrap"
    assert summary["engine"].startswith("sglang")
    assert (run / "run.png").stat().st_size > 10_000
    assert list((run / "tensorboard").iterdir())
    assert (run / "model" / "config.json").exists()
    assert not [path for path in run.rglob("*") if path.name.endswith((".tmp", ".partial"))]
    for row in read_metrics(run):
        assert row["rollout/infrastructure_failures"] == 0
        if row["train/samples"]:
            assert row["r3/router_mismatch"] == 0
            assert row["r3/coverage"] > 0.9
    trajectories = [t for group in read_trajectories(run, 3) for t in group.trajectories]
    assert len(trajectories) == 12
    assert all(set(t.weight_versions) == {"2"} for t in trajectories), "step 3 is sampled with the weights of step 2"


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_a_rollout_it_leaves_nothing_behind(start: Start, tmp_path: Path, stop: signal.Signals) -> None:
    run = start("eval.tasks=0")
    run.until("step 1: rollout ...")
    run.process.send_signal(stop)
    assert run.finish(timeout=30) == 130, run.text
    run.none_alive(timeout=10)
    assert run.text.rstrip().endswith("stopped; start again to resume")
    assert "Traceback" not in run.text
