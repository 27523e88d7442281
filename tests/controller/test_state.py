from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.evaluations import eval_report

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.controller.state import RunState
from agent_rl.errors import ConfigError
from agent_rl.evaluation.paired import Score
from agent_rl.evaluation.saved import read_evaluation


def config(runs: Path, **train: object) -> RunConfig:
    return RunConfig(name="demo", runs_dir=runs, model=Path("m"), train=TrainConfig(**train))


def test_evaluations_survive_and_those_after_the_resume_point_are_forgotten(tmp_path: Path) -> None:
    state = RunState(config(tmp_path))
    for step in (0, 5, 10):
        state.record_evaluation(f"step-{step}/sampled", eval_report(step / 10))
    trajectories = tmp_path / "demo" / "trajectories"
    trajectories.mkdir()
    for step in (5, 6):
        (trajectories / f"step-{step:06d}.jsonl.zst").touch()
        (trajectories / f"step-{step:06d}.safetensors").touch()
    resumed = RunState(config(tmp_path))
    resumed.forget_after(5)
    assert list(resumed.evaluations) == ["step-0/sampled", "step-5/sampled"]
    assert read_evaluation(f"{resumed.dir}:step-5/sampled").scores == {"a": Score(1, 2)}
    reports = sorted(path.name for path in (resumed.dir / "evaluations").iterdir())
    assert reports == ["step-000000-sampled.report.json", "step-000005-sampled.report.json"]
    assert json.loads((resumed.dir / "state.json").read_text())["resumes"] == [5]
    assert sorted(path.name for path in trajectories.iterdir()) == ["step-000005.jsonl.zst", "step-000005.safetensors"]


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    first = RunState(config(tmp_path)).run_id
    assert RunState(config(tmp_path)).run_id == first
    assert RunState(config(tmp_path / "other")).run_id != first
    (tmp_path / "demo" / "state.json").write_text('{"evaluations": {"step-0/sampled": {}}}')  # before runs had ids
    adopted = RunState(config(tmp_path))
    assert RunState(config(tmp_path)).run_id == adopted.run_id
    assert list(adopted.evaluations) == ["step-0/sampled"]


def test_a_resumed_run_must_be_the_same_run(tmp_path: Path) -> None:
    RunState(config(tmp_path, lr=1e-3))
    RunState(config(tmp_path, lr=1e-3, steps=99, checkpoint_every=2, keep_every=10, parallel={"world_size": 2}))
    RunState(config(tmp_path, lr=1e-3, parallel={"world_size": 2, "expert": 2}, balance={"enabled": True}))
    with pytest.raises(ConfigError, match=r"train\.lr: .* was started with 0.001, the config now has 0.002"):
        RunState(config(tmp_path, lr=2e-3))
