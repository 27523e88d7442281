"""A trainer's rank is killed while it sends weights to a real engine: the run goes on by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integration_run import Run
from marked import kill_rank

from agent_rl.monitoring.metrics_log import read_metrics


@pytest.mark.sglang
@pytest.mark.megatron
@pytest.mark.bubblewrap
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_run_goes_on(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("train.checkpoint_every=1", "eval.tasks=0")
    run.until("step 1: weights to the engine ...")
    kill_rank(run.mark)
    assert run.finish() == 0, run.text
    assert run.text.count("a trainer rank died: ") == 1
    assert run.text.count("step 1: weights to the engine ...") >= 2, "it died before it had sent them"
    assert "step 1: 12 finished trajectories are in the journal" in run.text
    assert [row["step"] for row in read_metrics(tmp_path / "small")] == [1, 2, 3, 4]
    run.none_alive()
