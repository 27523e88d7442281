"""Killed at chosen points, a run goes on as if it never had been: bit for bit. ``tests/bench/kills.py`` takes many more
points, at random."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from journal_rows import read_journal
from killed_run import Life, broken, episodes, exact, step_saved, write_config

from agent_rl.model.shipped import install_model
from agent_rl.observe.metrics_log import read_metrics

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4


def test_killed_at_chosen_points_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    lives: list[Life] = []
    install_model(tmp_path / "model")

    def live(folder: Path) -> Life:
        write_config(folder, tmp_path / "model", steps=STEPS, checkpoint_every=2)
        lives.append(Life(folder))
        return lives[-1]

    try:
        unkilled, first = live(tmp_path / "unkilled"), live(tmp_path / "killed")
        run = first.run
        journal = run / "journal" / "step-000001.journal"
        assert first.until(lambda: len(read_journal(journal)) >= 3), first.text
        first.kill()
        assert step_saved(run) == 0

        second = live(tmp_path / "killed")  # learns step 1 from the journal and the rest of it
        assert second.until(lambda: writing(run) or step_saved(run) == 2), second.text
        second.kill()
        assert "step 1: " in second.text
        assert "finished trajectories are in the journal" in second.text

        third = live(tmp_path / "killed")
        assert third.until(lambda: len(read_metrics(run)) == 3), third.text
        third.kill()

        last = live(tmp_path / "killed")
        for life in (last, unkilled):
            life.finish()
            assert life.process.returncode == 0, life.text
        assert f"resuming from {run}/checkpoints/step-000002" in last.text
        reference = {int(row["step"]): exact(row) for row in read_metrics(unkilled.run)}
        assert len(reference) == len(read_metrics(run)) == STEPS
        assert any(row["train/updates"] for row in reference.values())
        assert broken(run, reference) == []
        assert step_saved(run) == STEPS
        assert len(episodes(run)) - len(set(episodes(run))) <= 3 * 8, "more was sampled again than was under way"
        assert [left for life in lives for left in life.left()] == []
        assert os.listdir(run / "journal") == []
    finally:
        for life in lives:
            if not life.ended:
                os.killpg(life.process.pid, signal.SIGKILL)
                life.process.wait()


def writing(run: Path) -> bool:
    """Whether a checkpoint is being written at this moment."""
    return bool(list((run / "checkpoints").glob(".step-*.partial")))
