"""A run's summary counts what was run, and says where nothing was learned."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.evaluations import eval_report

from agent_rl.config import RunConfig
from agent_rl.controller.run_state import RunState
from agent_rl.controller.summary import summarize, summary_table, why_idle

FACTS = {"sandbox": "bubblewrap", "engine": "sglang"}
UNIFORM = {"rollout/trajectories": 8.0, "reward/groups_uniform": 1.0, "reward/mean": 0.0}
LEARNED = {"train/updates": 1.0, "time/step": 10.0, "rollout/tokens_per_second": 500.0}


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    return RunState(RunConfig(name="demo", runs_dir=tmp_path, model=Path("m")))


def printed(summary: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(summary_table(summary))
    return out.getvalue()


def test_steps_recovered_from_the_journal_are_in_no_mean_of_times(state: RunState) -> None:
    resumed = {"train/updates": 1.0, "time/step": 0.1, "time/rollout_recovered": 1.0}
    rows = [{"step": 1.0, **LEARNED}, {"step": 2.0, **resumed}, {"step": 3.0, **LEARNED}]
    means = summarize(state, rows, FACTS, steps=3)["means"]
    assert (means["time/step"], means["rollout/tokens_per_second"]) == (10.0, 500.0)


def test_steps_without_an_update_are_counted_with_their_reason(state: RunState) -> None:
    rows = [{"step": 1.0, **LEARNED}, *({"step": step, "time/step": 1.0, **UNIFORM} for step in (2.0, 3.0))]
    summary = summarize(state, rows, FACTS, steps=3)
    assert list(summary["steps_without_update"].values()) == [2]
    assert json.loads((state.dir / "summary.json").read_text()) == summary
    assert "2 of 3: the rewards within every group are equal, all 0: the tasks are too hard" in printed(summary)


def test_an_evaluation_in_which_nothing_was_graded_has_no_rate(state: RunState) -> None:
    state.record_evaluation("step-0/sampled", eval_report(math.nan, infrastructure_failures=8))
    summary = summarize(state, [{"step": 1.0, **LEARNED}], FACTS, steps=1)
    assert summary["pass_at_1_before"] is None
    assert "nan" not in printed(summary)


def test_the_best_step_has_the_highest_mean_over_the_sources(state: RunState) -> None:
    rates = {0: (0.2, 0.3), 5: (0.6, 0.5), 10: (0.9, 0.1), 15: (0.5, 0.6)}
    for step, (first, second) in rates.items():
        state.record_evaluation(f"step-{step}/aime24/sampled", eval_report(first))
        state.record_evaluation(f"step-{step}/amc23/sampled", eval_report(second))
    state.record_evaluation("step-20/aime24/sampled", eval_report(1.0))
    state.record_evaluation("step-0/aime24/greedy", eval_report(1.0))
    summary = summarize(state, [{"step": 1.0, **LEARNED}], FACTS, steps=20)
    assert summary["best"] == {
        "step": 5, "pass_at_1": 0.55, "sources": {"aime24": 0.6, "amc23": 0.5}, "steps": 4
    }  # fmt: skip
    assert re.search(r"best step, 5 .* 55.0 %, the highest of 4: aime24 60.0, amc23 50.0", printed(summary))


def test_the_best_step_of_one_environment_has_no_sources(state: RunState) -> None:
    for step, rate in ((0, 0.25), (10, 0.75), (20, 0.5)):
        state.record_evaluation(f"step-{step}/sampled", eval_report(rate))
    state.record_evaluation("step-5/sampled", eval_report(math.nan, infrastructure_failures=8))
    summary = summarize(state, [{"step": 1.0, **LEARNED}], FACTS, steps=20)
    assert (summary["best"]["step"], summary["best"]["steps"]) == (10, 3)
    assert re.search(r"best step, 10 .* 75.0 %, the highest of 3 ", printed(summary))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (UNIFORM | {"reward/mean": 1.0}, "too easy"),
        (UNIFORM | {"reward/mean": 0.4, "train/updates": 0.0}, "within every group are equal"),
        ({"rollout/trajectories": 0.0}, "infrastructure failures"),
        ({"rollout/trajectories": 8.0, "train/updates": 0.0, "train/skipped_updates": 1.0}, "the guard"),
        ({"rollout/trajectories": 8.0, "reward/groups_uniform": 0.5}, "were filtered out"),
    ],
)
def test_the_reason_for_a_step_without_an_update(row: dict[str, float], reason: str) -> None:
    assert reason in (why_idle(row) or "")
    assert why_idle(row | {"train/updates": 1.0}) is None
