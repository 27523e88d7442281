from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.evaluations import eval_report

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.controller.config_changes import read_changes
from agent_rl.controller.run_state import RunState
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


def test_a_run_with_results_accepts_changes_and_records_them(tmp_path: Path) -> None:
    first = RunState(config(tmp_path, lr=1e-3))
    (first.dir / "journal").mkdir()
    (first.dir / "journal/step-000001.journal").touch()
    assert RunState(config(tmp_path, lr=1e-3)).change is None
    changed = RunState(config(tmp_path, lr=2e-3, parallel={"world_size": 2})).change
    assert changed is not None
    assert changed.text == "after step 0: train.lr 0.001 -> 0.002, train.parallel.world_size 1 -> 2"
    assert (first.dir / "journal/step-000001.journal").exists(), "episodes do not depend on the learning rate"
    assert read_changes(first.dir) == [changed]
    with pytest.raises(ConfigError, match=r"train\.lora\.\w+: .* started with None, .* state depends on it"):
        RunState(config(tmp_path, lr=2e-3, lora={"rank": 8}))


def test_a_run_without_results_takes_any_config(tmp_path: Path) -> None:
    RunState(config(tmp_path))
    other = RunConfig(name="demo", runs_dir=tmp_path, model=Path("other"), seed=7)
    assert RunState(other).change is None
    assert yaml.safe_load((tmp_path / "demo/config.yaml").read_text())["seed"] == 7
