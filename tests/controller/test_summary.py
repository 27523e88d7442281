"""A run's summary counts what was run, and says where nothing was learned."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.evaluations import eval_report

from agent_rl.config import RunConfig
from agent_rl.controller.state import RunState
from agent_rl.controller.summary import best_evaluation, summarize, summary_table, why_idle

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


def test_the_best_evaluation_is_the_first_with_the_highest_mean_of_the_sources(state: RunState) -> None:
    assert best_evaluation(state.evaluations) is None
    rates = {"step-0/a/sampled": 0.2, "step-4/a/sampled": 0.5, "step-8/a/sampled": 0.3, "step-12/a/sampled": 0.9}
    rates |= {"step-0/b/sampled": 0.2, "step-4/b/sampled": 0.5, "step-8/b/sampled": 0.7, "step-12/b/sampled": 0.0}
    for key, rate in (rates | {"step-12/a/greedy": 1.0, "step-16/a/sampled": math.nan}).items():
        state.record_evaluation(key, eval_report(rate))
    assert best_evaluation(state.evaluations) == (4, 0.5)


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
