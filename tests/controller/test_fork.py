"""Runs whose config changes: on resumption, and in a fork from a checkpoint."""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from support.kill_points import contents, ends_before
from support.pipeline_run import Deaths, Life, run_config

from agent_rl.commands.clean import clean
from agent_rl.commands.runs import list_runs
from agent_rl.config import RunConfig
from agent_rl.config.loader import load_recorded
from agent_rl.controller.async_rollout.task_ledger import faults, read_ledger
from agent_rl.controller.config_changes import HISTORY, read_changes
from agent_rl.controller.fork import fork
from agent_rl.errors import ConfigError, UserError
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.train.checkpoint.directory import complete_checkpoints
from agent_rl.utils.directory_lock import lock_directory

BY_TIME = re.compile(r"^time/|seconds|per_second|^async_rollout/|^recover/|^loop/")


async def half_a_run(runs: Path) -> RunConfig:
    """A run that was killed in step 8, with checkpoints of steps 3 and 6."""
    config = run_config(runs, depth=0)
    assert not await Life(config, [], Deaths("taken", 8)).live()
    return config


def changed(config: RunConfig, **rollout: object) -> RunConfig:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})


def exact(run: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not BY_TIME.search(name)} for row in read_metrics(run)]


@pytest.mark.parametrize("change", [{"group_size": 2}, {"tasks_per_step": 3}, {"temperature": 0.7}])
async def test_a_resumption_with_a_change_equals_a_fork(tmp_path: Path, change: dict[str, object]) -> None:
    config = await half_a_run(tmp_path)
    forked = fork(config.run_dir, "6", "forked", [f"rollout.{key}={value}" for key, value in change.items()])
    assert await Life(load_recorded(forked / "config.yaml"), []).live()
    assert await Life(changed(config, **change), []).live()
    for one, other in zip(exact(config.run_dir), exact(forked), strict=True):
        assert {key: (one[key], other[key]) for key in one if one[key] != other[key]} == {}
    assert [int(row["step"]) for row in exact(forked)] == list(range(1, 9))
    for run in (config.run_dir, forked):
        rows = read_ledger(run)
        assert faults(run, rows) == []
        (history,) = read_changes(run)
        assert (history.step, list(history.values)) == (6, [f"rollout.{key}" for key in change])


async def test_a_fork_leaves_its_origin_as_it_was(tmp_path: Path) -> None:
    config = await half_a_run(tmp_path)
    before = {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()}
    forked = fork(config.run_dir, "3", "forked", ["train.steps=4"])
    assert await Life(load_recorded(forked / "config.yaml"), []).live()
    assert {path: path.read_bytes() for path in config.run_dir.rglob("*") if path.is_file()} == before
    assert [path.name for path in complete_checkpoints(forked / "checkpoints")] == ["step-000003", "step-000004"]


async def test_a_fork_names_what_is_wrong(tmp_path: Path) -> None:
    config = await half_a_run(tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint of step 5; complete checkpoints: 3, 6"):
        fork(config.run_dir, "5", "forked")
    with pytest.raises(UserError, match="run: exists; choose another name"):
        fork(config.run_dir, "", "run")
    with pytest.raises(ConfigError, match=r"seed: .* was started with 0, the config now has 1, and it determines"):
        fork(config.run_dir, "", "forked", ["seed=1"])
    with pytest.raises(UserError, match="not the directory of a training run"):
        fork(tmp_path, "", "forked")
    assert sorted(os.listdir(tmp_path)) == ["run"]


async def test_fork_in_progress_is_left_alone(tmp_path: Path) -> None:
    config = await half_a_run(tmp_path)
    with lock_directory(tmp_path / ".forked.partial"):
        with pytest.raises(UserError, match="forked: another fork is making it"):
            fork(config.run_dir, "", "forked")
        clean([tmp_path], Console(quiet=True), remove=True)
        assert (tmp_path / ".forked.partial").exists()
    clean([tmp_path], Console(quiet=True), remove=True)
    assert os.listdir(tmp_path) == ["run"]


def remade(run: Path) -> dict[str, bytes]:
    """The files of a fork, without its random id and the time."""
    ids = yaml.safe_load((run / "state.json").read_text())["run_id"].encode()
    found = {name: data.replace(ids, b"ID") for name, data in contents(run).items()}
    return found | {HISTORY: re.sub(rb'"time":[\d.]+', b"", found[HISTORY])}


@pytest.mark.long
async def test_fork_killed_at_each_change_of_a_file_is_absent_or_complete(tmp_path: Path) -> None:
    config = await half_a_run(tmp_path)
    arguments = (config.run_dir, "6", "forked", ["train.lr=1e-5"])
    origin, target = contents(config.run_dir), tmp_path / "forked"
    complete = remade(fork(*arguments))
    for number in itertools.count(1):
        shutil.rmtree(target)
        if ends_before(number, fork, *arguments):
            break
        assert contents(config.run_dir) == origin
        if not target.exists():
            list_runs([tmp_path], console := Console(file=io.StringIO(), width=200))
            assert "forked" not in console.file.getvalue(), "a half-made fork is no run"
            fork(*arguments)
        assert remade(target) == complete
        assert sorted(os.listdir(tmp_path)) == ["forked", "run"]
    assert number > 30
    assert remade(target) == complete
