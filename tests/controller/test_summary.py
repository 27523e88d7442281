"""A run's summary counts what was run, and says where nothing was learned."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from support.evaluations import eval_report

from agent_rl.config import RunConfig
from agent_rl.controller.state import RunState
from agent_rl.controller.summary import summarize, summary_table, why_idle

FACTS = {"sandbox": "bubblewrap", "engine": "sglang"}
UNIFORM = {"rollout/trajectories": 8.0, "reward/groups_uniform": 1.0, "reward/mean": 0.0}
LEARNED = {"train/updates": 1.0, "time/step": 10.0, "rollout/tokens_per_second": 500.0}


def test_steps_taken_up_from_the_journal_are_in_no_mean_of_times(tmp_path: Path) -> None:
    state = RunState(RunConfig(name="demo", runs_dir=tmp_path, model=Path("m")))
    resumed = {"train/updates": 1.0, "time/step": 0.1, "time/rollout_recovered": 1.0}
    rows = [{"step": 1.0, **LEARNED}, {"step": 2.0, **resumed}, {"step": 3.0, **LEARNED}]
    means = summarize(state, rows, FACTS, steps=3)["means"]
    assert (means["time/step"], means["rollout/tokens_per_second"]) == (10.0, 500.0)


def test_steps_without_an_update_are_counted_with_their_reason(tmp_path: Path) -> None:
    state = RunState(RunConfig(name="demo", runs_dir=tmp_path, model=Path("m")))
    rows = [{"step": 1.0, **LEARNED}, *({"step": step, "time/step": 1.0, **UNIFORM} for step in (2.0, 3.0))]
    summary = summarize(state, rows, FACTS, steps=3)
    assert list(summary["steps_without_update"].values()) == [2]
    assert json.loads((tmp_path / "demo" / "summary.json").read_text()) == summary
    out = io.StringIO()
    Console(file=out, width=200).print(summary_table(summary))
    assert "2 of 3: the rewards within every group are equal, all 0: the tasks are too hard" in out.getvalue()


def test_an_evaluation_in_which_nothing_was_graded_has_no_rate(tmp_path: Path) -> None:
    state = RunState(RunConfig(name="demo", runs_dir=tmp_path, model=Path("m")))
    state.record_evaluation("step-0/sampled", eval_report(math.nan, infrastructure_failures=8))
    summary = summarize(state, [{"step": 1.0, **LEARNED}], FACTS, steps=1)
    assert summary["pass_at_1_before"] is None
    out = io.StringIO()
    Console(file=out, width=200).print(summary_table(summary))
    assert "nan" not in out.getvalue()


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
def test_the_reason_is_told(row: dict[str, float], reason: str) -> None:
    assert reason in (why_idle(row) or "")
    assert why_idle(row | {"train/updates": 1.0}) is None
