"""The worked examples of docs/environments.md, trained a few steps: real SGLang, real Megatron, real updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integration_run import ROOT, Run

from agent_rl.observe.metrics import read_metrics

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.megatron,
    pytest.mark.bubblewrap,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]


@pytest.mark.parametrize("name", ["sql_tools:SqlTools", "retrieval_tools:RetrievalTools"])
def test_a_class_of_tools_is_trained_on(start: Callable[..., Run], tmp_path: Path, name: str) -> None:
    # Two turns are just too few for some episodes to finish in time, so that groups have something to compare.
    run = start(
        f"env.name={name}", "env.options={count: 16}", "rollout.max_turns=2", "rollout.tasks_per_step=4",
        "train.steps=2", "train.checkpoint_every=0", "eval.tasks=0", modules=ROOT / "docs/examples",
    )  # fmt: skip
    assert run.finish() == 0, run.text
    rows = read_metrics(tmp_path / "small")
    assert [row["step"] for row in rows] == [1, 2]
    updated = [row for row in rows if row["train/samples"]]
    assert updated, "no group had anything to compare: nothing was learned from"
    for row in updated:
        assert row["train/updates"] == 1
        assert row["train/grad_norm"] > 0
        assert row["r3/router_mismatch"] == 0
        assert row["rollout/infrastructure_failures"] == 0
