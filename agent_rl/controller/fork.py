"""A new run from a checkpoint of another: weights, optimizer and position in the data, under a changed config.

The new directory is made beside its place and renamed, so a kill leaves a hidden directory that the next fork removes.
It is locked meanwhile, so neither another fork nor `agent-rl clean` removes it.
Files are linked and not copied, where the file system has links: no run changes a complete file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_recorded
from agent_rl.controller.async_rollout.task_ledger import LedgerFile
from agent_rl.controller.config_changes import ConfigChange, accept, append_change, differences
from agent_rl.controller.run_models import find_checkpoint, is_run
from agent_rl.controller.run_state import evaluation_step, file_step
from agent_rl.errors import GuardStop, UserError
from agent_rl.monitoring.metrics_log import MetricsLog
from agent_rl.rollout.records import DIRECTORY, EVALUATIONS
from agent_rl.train.checkpoint.directory import checkpoint_step
from agent_rl.utils.directory_lock import is_locked, lock_directory
from agent_rl.utils.run_files import read_json, write_atomic, write_json

_COPIED = ("config_history.jsonl", "metrics.jsonl", "ledger.jsonl", "quarantine.json", "tokenizer.json")
_FORK = "-collapse-"


def fork(run: Path, step: str, name: str, overrides: Sequence[str] = ()) -> Path:
    """Make the run ``name`` beside ``run`` from its checkpoint of ``step`` ("": the newest); returns its directory.

    It has the metrics, trajectories, evaluations and ledger up to that step. Raises UserError for a run or checkpoint
    that does not exist and a name that is taken, ConfigError for a change that a resumption would refuse.
    """
    if not is_run(run):
        raise UserError(f"{run}: not the directory of a training run")
    source = find_checkpoint(run, step, "fork")
    config = load_recorded(run / "config.yaml", [*overrides, f"name={json.dumps(name)}"])
    target = run.parent / name
    if target.exists():
        raise UserError(f"{target}: exists; choose another name")
    place = {"name": name, "runs_dir": str(run.parent)}
    resolved = config.model_dump(mode="json") | place
    values = differences(yaml.safe_load((run / "config.yaml").read_text()) | place, resolved)
    change = accept(values, run, checkpoint_step(source))
    partial = run.parent / f".{name}.partial"
    if is_locked(partial):
        raise UserError(f"{target}: another fork is making it")
    shutil.rmtree(partial, ignore_errors=True)
    with lock_directory(partial):
        _write(partial, run, source, resolved, change)
        partial.rename(target)
    return target


def _write(partial: Path, run: Path, source: Path, resolved: Mapping[str, Any], change: ConfigChange) -> None:
    """Write what the fork has of ``run`` up to its checkpoint ``source``."""
    last = checkpoint_step(source)
    for file in _COPIED:
        if (run / file).is_file():
            shutil.copy2(run / file, partial / file)
    _forget_after(partial, last)
    if change.values:
        append_change(partial, change)
    write_atomic(partial / "config.yaml", yaml.safe_dump(resolved, sort_keys=False).encode())
    state, run_id = read_json(run / "state.json"), uuid.uuid4().hex[:12]
    write_json(
        partial / "state.json",
        {
            "run_id": run_id,
            "resumes": [each for each in state["resumes"] if each < last],
            "evaluations": {key: value for key, value in state["evaluations"].items() if evaluation_step(key) <= last},
            "forked_from": f"{run}@{last}",
        },
    )
    for part in (DIRECTORY, EVALUATIONS):
        for path in (run / part).glob("step-*"):
            if file_step(path) <= last:
                _link(path, partial / part / path.name)
    _link_checkpoint(source, partial / "checkpoints" / source.name, run_id)


def _forget_after(directory: Path, step: int) -> None:
    """Remove the rows of later steps."""
    MetricsLog(directory).forget_after(step)
    LedgerFile(directory).forget_after(step)


def _link_checkpoint(source: Path, target: Path, run_id: str) -> None:
    """Link a checkpoint's files; its manifest names the new run."""
    for file in source.iterdir():
        if file.name != "manifest.json":
            _link(file, target / file.name)
    manifest = json.loads((source / "manifest.json").read_text())
    manifest["run"]["run_id"] = run_id
    target.mkdir(parents=True, exist_ok=True)
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1))


def _link(source: Path, target: Path) -> None:
    """Link a file or the files of a directory; copy them where links are not possible."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if source.is_dir():
            shutil.copytree(source, target, copy_function=os.link)
        else:
            os.link(source, target)
    except (OSError, shutil.Error):  # a file system without links
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        shutil.rmtree(target, ignore_errors=True)
        copy(source, target)


def train_with_forks(config: RunConfig, train: Callable[[RunConfig], None], note: Callable[[str], None]) -> None:
    """Call ``train``; where it raises GuardStop, go on with a lower learning rate from a fork of the last good
    checkpoint, at most ``guard.on_collapse.forks`` times.

    The forks of a run NAME are NAME-collapse-1, NAME-collapse-2 and so on. If one exists, training continues with the
    newest. Raises GuardStop when no fork is left, or no checkpoint is from before the collapse.
    """
    limit, lr_factor = config.guard.on_collapse.forks, config.guard.on_collapse.lr_factor
    name, made = config.name, 0
    while made < limit and (config.runs_dir / _fork_name(name, made + 1)).is_dir():
        made += 1
    if made:
        config = _load_fork(config.runs_dir / _fork_name(name, made), note)
    while True:
        try:
            return train(config)
        except GuardStop as stop:
            if made == limit or stop.last_good is None:
                raise
            note(f"stopped by the guard: {stop}")
            made += 1
            step, lr = checkpoint_step(stop.last_good), config.train.lr * lr_factor
            config = _load_fork(fork(config.run_dir, str(step), _fork_name(name, made), [f"train.lr={lr!r}"]), note)


def _fork_name(name: str, number: int) -> str:
    return f"{re.sub(rf'{_FORK}[0-9]+$', '', name)}{_FORK}{number}"


def _load_fork(run: Path, note: Callable[[str], None]) -> RunConfig:
    config = load_recorded(run / "config.yaml")
    note(f"guard.on_collapse: continuing with {run}, train.lr {config.train.lr:g}")
    return config
