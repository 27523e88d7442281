"""A run that its guard ends: what it leaves is a checkpoint of its last step, and it goes on from there. The episodes
are recordings (:mod:`recorded_run`), whose log-probs are made up: trainer and engine could not differ more."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from killed_run import Life, step_reached, step_saved, write_config

from agent_rl.models.builtin import install_model

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


def test_a_collapsed_run_saves_and_stops_with_one_line(tmp_path: Path) -> None:
    install_model(tmp_path / "model")
    write_config(tmp_path, tmp_path / "model", steps=3, checkpoint_every=5)
    life = Life(tmp_path, "guard.action=stop", "guard.patience=2")
    life.finish()
    assert life.process.returncode != 0
    last = life.text.strip().splitlines()[-1]
    assert last.startswith("agent_rl.errors.GuardStop: mismatch/k3_kl is ")
    assert "above its limit 0.1 (guard.k3_kl.above), 2 steps in a row; saved in" in last
    assert step_reached(life.run) == step_saved(life.run) == 2
    events = [orjson.loads(line) for line in (life.run / "guard.jsonl").read_bytes().splitlines()]
    assert {event["metric"] for event in events if event["event"] == "warn"} == {"mismatch/k3_kl", "mismatch/f_tau_2"}
    assert [event["step"] for event in events if event["event"] == "stop"] == [2]
    assert life.left() == []

    again = Life(tmp_path, "guard.action=warn", "guard.patience=2")
    again.finish()
    assert again.process.returncode == 0, again.text
    assert step_reached(again.run) == 3
    assert "resuming from" in again.text
    events = [orjson.loads(line) for line in (again.run / "guard.jsonl").read_bytes().splitlines()]
    assert {event["step"] for event in events if event["event"] == "warn"} == {1, 2, 3}
