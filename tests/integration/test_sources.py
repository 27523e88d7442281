"""A run that trains on two environments and evaluates on three sources, with real parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from integration_run import REAL, Run

from agent_rl.controller.async_rollout.task_ledger import read_ledger
from agent_rl.monitoring.metrics_log import read_metrics

pytestmark = [*REAL]

FIXES = "{env: mini, options: {train_tasks: 16, heldout_tasks: 8}, %s}"
SUMS = "{env: math, options: {train_tasks: 16, heldout_tasks: 8, levels: [1]}, %s}"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_trains_on_two_sources_and_evaluates_on_three(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(
        "train.steps=2", "rollout.tasks_per_step=4", "eval.tasks=3",
        f"train.sources={{fixes: {FIXES % 'weight: 3'}, sums: {SUMS % 'weight: 1'}}}",
        f"eval.sources={{fixes: {FIXES % 'samples: 2, every: 1'}, sums: {SUMS % 'greedy: true'}, "
        "hard: {env: math, options: {heldout_tasks: 4, levels: [3]}, tasks: 2, temperature: 0.5}}",
    )  # fmt: skip
    assert run.finish() == 0, run.text
    ledger = read_ledger(tmp_path / "small")
    for row in ledger:
        assert Counter(task.partition(":")[0] for task in row.tasks) == {"fixes": 3, "sums": 1}
    for metrics in read_metrics(tmp_path / "small"):
        assert (metrics["source/fixes/groups"], metrics["source/sums/groups"]) == (3, 1)
        assert metrics["r3/router_mismatch"] == 0
    reports = orjson.loads((tmp_path / "small/state.json").read_bytes())["evaluations"]
    assert {key: (report["tasks"], report["samples"], report["ungraded"]) for key, report in reports.items()} == {
        "step-0/fixes/sampled": (3, 2, 0),
        "step-0/sums/sampled": (3, 1, 0),
        "step-0/sums/greedy": (3, 1, 0),
        "step-0/hard/sampled": (2, 1, 0),
        "step-1/fixes/sampled": (3, 2, 0),
        "step-2/fixes/sampled": (3, 2, 0),
        "step-2/sums/sampled": (3, 1, 0),
        "step-2/sums/greedy": (3, 1, 0),
        "step-2/hard/sampled": (2, 1, 0),
    }
    summary = orjson.loads((tmp_path / "small/summary.json").read_bytes())
    assert summary["sources"].keys() == {"fixes", "sums", "hard"}
    assert summary["sources"]["sums"].keys() == {"before", "before, greedy", "after", "after, greedy"}
