"""``rollout.compaction`` in runs with real SGLang and real Megatron."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration_run import REAL, Run
from killed_run import exact
from marked import ROOT

from agent_rl.controller.async_rollout.task_ledger import faults, gaps, read_ledger
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.records import read_trajectories
from agent_rl.types import BranchCause, Trajectory

pytestmark = [*REAL, pytest.mark.exhaustive, pytest.mark.timeout(900)]

SETTINGS = (
    f"env.options={{train_tasks: 16, heldout_tasks: 8, issues: 3, cache_dir: {ROOT}/.cache/tasks}}",
    *("rollout.max_turns=16", "rollout.max_tokens=360", "rollout.max_new_tokens=40", "eval.tasks=0"),
    *("rollout.compaction={at_tokens: 262, keep_turns: 2, prompt: Sum up.}", "r3.audit=1"),
    *("engine.dtype=float32", "train.dtype=float32"),
)


def trajectories(run: Path, step: int) -> Iterator[Trajectory]:
    return (trajectory for group in read_trajectories(run, step) for trajectory in group.trajectories)


def test_compacted_episodes_train_without_mismatch(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(*SETTINGS, "train.steps=2", "train.checkpoint_every=0")
    assert run.finish(600) == 0, run.text
    for row in read_metrics(tmp_path / "small"):
        assert row["rollout/compactions"] > 0.5
        assert row["train/updates"] == 1
        assert row["mismatch/logprob_abs_diff"] < 2e-5
        assert (row["r3/router_mismatch"], row["r3/missing_token_fraction"]) == (0, 0)
    for trajectory in trajectories(tmp_path / "small", 2):
        sampled = sum(turn.completion_tokens for turn in trajectory.turns)
        assert sum(int(branch.loss_mask.sum()) for branch in trajectory.branches) == sampled
        assert trajectory.total_tokens > 360 or len(trajectory.branches) < 3
        after = [turn for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False) if before.summary]
        for branch, turn in zip(trajectory.further, after, strict=False):
            assert branch.cause is BranchCause.COMPACTION
            assert branch.shared > 30, "the system prompt and the task"
            assert turn.cached_tokens >= branch.shared - 1, "from the engine's prefix cache"


def test_a_killed_run_continues_compacted_episodes(start: Callable[..., Run], tmp_path: Path) -> None:
    """Rollout runs ahead, so that weights change within episodes and branches. Step 3 is learned again bit for bit."""
    settings = (
        *SETTINGS,
        "rollout.recover=turns",
        "async_rollout.depth=1",
        "train.old_logprob={source: rollout, measure_every: 1}",
    )
    first = start(*settings)
    first.until("step 3: reward", 400)
    first.process.send_signal(signal.SIGKILL)
    first.finish()
    before = read_metrics(tmp_path / "small")
    second = start(*settings)
    assert second.finish(600) == 0, second.text
    assert "resuming from" in second.text
    rows = read_metrics(tmp_path / "small")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    learned = [
        {name: value for name, value in exact(row).items() if name.startswith("train/")} for row in (rows[2], before[2])
    ]
    assert learned[0] == learned[1]
    assert all(row["r3/router_mismatch"] == 0 for row in rows if row["train/samples"])
    history = read_ledger(tmp_path / "small")
    assert faults(tmp_path / "small", history) == gaps(history) == []
    assert any(trajectory.further for trajectory in trajectories(tmp_path / "small", 4))
