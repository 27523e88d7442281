"""A run that its guard stops leaves a complete checkpoint of its last step (``test_kills.py`` resumes from such). The
episodes are recordings (:mod:`recorded_run`) with random log-probs, so trainer and engine differ in every token."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from killed_run import Life, step_reached, step_saved, write_config

from agent_rl.config.builtin import install_model
from agent_rl.train.checkpoint import directory as checkpoint

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


def test_a_collapsed_run_saves_and_stops_with_one_line(tmp_path: Path) -> None:
    install_model(tmp_path / "model")
    write_config(tmp_path, tmp_path / "model", steps=3, checkpoint_every=5)
    life = Life(tmp_path, "guard.action=stop", "guard.patience=2")
    assert life.finish() != 0
    last = life.text.strip().splitlines()[-1]
    assert last.startswith("agent_rl.errors.GuardStop: mismatch/k3_kl is ")
    assert "above its limit 0.1 (guard.k3_kl.above), 2 steps in a row; saved in" in last
    assert step_reached(life.run) == step_saved(life.run) == 2
    saved = life.run / "checkpoints" / "step-000002"
    checkpoint.verify(saved, checkpoint.read_manifest(saved))
    events = [orjson.loads(line) for line in (life.run / "guard.jsonl").read_bytes().splitlines()]
    assert {event["metric"] for event in events if event["event"] == "warn"} == {"mismatch/k3_kl", "mismatch/f_tau_2"}
    assert [event["step"] for event in events if event["event"] == "stop"] == [2]
    assert life.left() == []
