"""A run that learns from a teacher, with real parts, while it samples ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integration_run import REAL, Run

from agent_rl.monitoring.metrics_log import read_metrics

pytestmark = [*REAL, pytest.mark.exhaustive, pytest.mark.timeout(600)]


@pytest.mark.parametrize("top_k", ["null", "8"])
def test_a_model_that_is_its_own_teacher_starts_at_a_divergence_of_zero(
    start: Callable[..., Run], tmp_path: Path, top_k: str
) -> None:
    """The teacher is an engine of the run; every trajectory is trained, whatever its reward."""
    run = start(
        f"train.distill={{teacher: {tmp_path}/model, top_k: {top_k}}}", "async_rollout.depth=1",
        "train.old_logprob.source=rollout",
        "train.steps=3", "eval.every=0", "eval.tasks=0",
    )  # fmt: skip
    assert run.finish(500) == 0, run.text
    first, *_, last = read_metrics(tmp_path / "small")
    assert abs(first["distill/kl"]) < 1e-3
    assert first["distill/score_seconds_mean"] > 0
    assert abs(first.get("distill/loss_kl", 0.0)) < 1e-5
    assert ("distill/loss_kl" in last) == (top_k == "8")
    assert (first["train/samples"], last["train/samples"]) == (12, 12)
    assert first["r3/router_mismatch"] == last["r3/router_mismatch"] == 0
    run.none_alive()
