"""The run directory, and what a run must know to go on after a kill.

::

    runs/<name>/
      config.yaml                      the resolved config
      state.json                       evaluations made so far, by step
      metrics.jsonl  tensorboard/      one object a step
      trajectories/step-NNNNNN.jsonl   what the agents did
      checkpoints/step-NNNNNN/         what training resumes from
      model/  summary.json  run.png    the result
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agent_rl.config import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.observe.files import read_json, write_atomic, write_json

# What may differ between a run and its resumption: how long, how observed, and where the parts are.
MAY_CHANGE = (
    {"engine"},
    {"sandbox"},
    {"runs_dir"},
    {"guard"},
    {"train", "steps"},
    {"train", "checkpoint_every"},
    {"train", "keep_checkpoints"},
    {"train", "ray_address"},
)


class RunState:
    """A run's folder and its progress. Opening an existing folder resumes it."""

    def __init__(self, config: RunConfig) -> None:
        self.dir = config.run_dir
        self.checkpoints = self.dir / "checkpoints"
        self._evaluations: dict[str, dict[str, Any]] = {}
        self.dir.mkdir(parents=True, exist_ok=True)
        self._adopt_config(config)
        if (self.dir / "state.json").exists():
            self._evaluations = read_json(self.dir / "state.json")["evaluations"]

    @property
    def evaluations(self) -> Mapping[str, Mapping[str, Any]]:
        """Reports by ``step-<n>/<sampled|greedy>``."""
        return self._evaluations

    def record_evaluation(self, key: str, report: Mapping[str, Any]) -> None:
        self._evaluations[key] = dict(report)
        write_json(self.dir / "state.json", {"evaluations": self._evaluations})

    def forget_after(self, step: int) -> None:
        """Drop what belongs to steps later than ``step``: they are about to be done again."""
        self._evaluations = {key: value for key, value in self._evaluations.items() if evaluation_step(key) <= step}
        for path in (self.dir / "trajectories").glob("step-*"):
            if int(path.name.split("-")[1].split(".")[0]) > step:
                path.unlink() if path.is_file() else shutil.rmtree(path)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The newest complete checkpoint and its step. (A checkpoint folder appears whole, by rename.)"""
        found = sorted((int(path.name.removeprefix("step-")), path) for path in self.checkpoints.glob("step-??????"))
        return found[-1] if found else None

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def prune_checkpoints(self, keep: int) -> None:
        found = sorted(self.checkpoints.glob("step-??????"))
        for path in found[:-keep]:
            shutil.rmtree(path)

    def _adopt_config(self, config: RunConfig) -> None:
        path = self.dir / "config.yaml"
        resolved = config.model_dump(mode="json")
        if path.exists():
            _check_same(yaml.safe_load(path.read_text()), resolved, self.dir)
        write_atomic(path, yaml.safe_dump(resolved, sort_keys=False).encode())


def evaluation_step(key: str) -> int:
    return int(key.split("/")[0].removeprefix("step-"))


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    """A resumed run must be the same run: name the first key that differs."""
    for key in sorted(_flatten(old).keys() | _flatten(new).keys()):
        parts = set(key.split("."))
        if any(changeable <= parts for changeable in MAY_CHANGE):
            continue
        before, after = _flatten(old).get(key), _flatten(new).get(key)
        if before != after:
            raise ConfigError(
                f"{key}: {folder} was begun with {before!r}, the config now says {after!r}; "
                "give the run another name, or remove the folder to start anew"
            )


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat.update(_flatten(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item})
    return flat
