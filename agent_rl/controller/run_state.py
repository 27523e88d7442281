"""The run directory, and the state that a run needs to resume after a kill.

::

    runs/<name>/
      config.yaml                      the resolved config
      config_history.jsonl             accepted changes of the config
      state.json                       the run's id, origin, steps after which it was resumed, evaluations
      metrics.jsonl  tensorboard/      one object per step
      balance.jsonl                    expert loads before and after balancing, if experts are borrowed
      quarantine.json                  undecidable tasks, which are drawn no more
      left_out.jsonl                   rows that a supervised run does not use
      trajectories/step-NNNNNN.*       the trajectories (agent_rl/rollout/records.py)
      evaluations/step-NNNNNN-KIND.*   the same for an evaluation, and its report with every task's outcome
      tokenizer.json                   the model's tokenizer, to decode the tokens in these files
      journal/step-NNNNNN.journal      episodes that finished since the last checkpoint
      checkpoints/step-NNNNNN/         checkpoints to resume training from
      weights/step-NNNNNN/             weights that an engine loads from disk, if it needs that
      model/  summary.json  run.png    the result
"""

from __future__ import annotations

import math
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from agent_rl.config import RunConfig
from agent_rl.controller.config_changes import ConfigChange, accept, append_change, differences
from agent_rl.evaluation.report import EvalReport
from agent_rl.evaluation.saved import report_path
from agent_rl.rollout.records import DIRECTORY, EVALUATIONS
from agent_rl.train.checkpoint.directory import checkpoint_step, latest_checkpoint
from agent_rl.train.expert_balancing.report import forget_balance
from agent_rl.utils.run_files import read_json, write_atomic, write_json


class RunState:
    """A run's directory and progress. Opening an existing directory resumes the run."""

    def __init__(self, config: RunConfig) -> None:
        self.dir = config.run_dir
        self.checkpoints = self.dir / "checkpoints"
        self._evaluations: dict[str, dict[str, Any]] = {}
        self.dir.mkdir(parents=True, exist_ok=True)
        self.change = self._bind(config.model_dump(mode="json"))
        self._path = self.dir / "state.json"
        saved = read_json(self._path) if self._path.exists() else {}
        self._evaluations.update(saved.get("evaluations", {}))
        self.run_id: str = saved.get("run_id") or uuid.uuid4().hex[:12]
        self._resumes: list[int] = saved.get("resumes", [])
        self._forked_from: str | None = saved.get("forked_from")
        self._started_before = bool(saved)
        self._write()

    def _bind(self, resolved: dict[str, Any]) -> ConfigChange | None:
        """Record the resolved config, and how it differs from that of an earlier start. A run that has produced nothing
        yet takes any config. Raises ConfigError for a change that is not accepted."""
        path, change = self.dir / "config.yaml", None
        if path.exists() and has_results(self.dir):
            values = differences(yaml.safe_load(path.read_text()), resolved)
            if values:
                latest = latest_checkpoint(self.checkpoints)
                change = accept(values, self.dir, 0 if latest is None else checkpoint_step(latest))
                if change.changes_episodes:
                    shutil.rmtree(self.dir / "journal", ignore_errors=True)
                append_change(self.dir, change)
        write_atomic(path, yaml.safe_dump(resolved, sort_keys=False).encode())
        return change

    @property
    def evaluations(self) -> Mapping[str, Mapping[str, Any]]:
        """Reports by ``step-<n>/<sampled|greedy>``, or ``step-<n>/<source>/<sampled|greedy>``."""
        return self._evaluations

    def record_evaluation(self, key: str, report: EvalReport) -> None:
        """Store a report: completely in a file of its own, and without its outcomes in ``state.json``. NaN rates (of
        no tasks) become None, because JSON has no NaN."""
        report.write(report_path(self.dir, key))
        fields = {name: value for name, value in asdict(report).items() if name not in ("outcomes", "by_repo")}
        nans = {name for name, value in fields.items() if isinstance(value, float) and math.isnan(value)}
        self._evaluations[key] = {name: None if name in nans else value for name, value in fields.items()}
        self._write()

    def forget_after(self, step: int) -> None:
        """Remove everything of steps after ``step``, which will be repeated. A run that was started before records
        ``step`` as a resume."""
        forget_balance(self.dir, step)
        self._resumes = [*self._resumes, step] if self._started_before else []
        self._started_before = True
        self._evaluations = {key: value for key, value in self._evaluations.items() if evaluation_step(key) <= step}
        for path in (*(self.dir / DIRECTORY).glob("step-*"), *(self.dir / EVALUATIONS).glob("step-*")):
            if file_step(path) > step:
                path.unlink() if path.is_file() else shutil.rmtree(path)
        self._write()

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def _write(self) -> None:
        saved = {"run_id": self.run_id, "resumes": self._resumes, "evaluations": self._evaluations}
        if self._forked_from is not None:
            saved["forked_from"] = self._forked_from
        write_json(self._path, saved)


def has_results(run: Path) -> bool:
    """Whether an episode, a step or an evaluation of the run has ended."""
    return any(any((run / name).glob("step-*")) for name in ("journal", "checkpoints", DIRECTORY, EVALUATIONS))


def keep_tokenizer(model: Path, directory: Path) -> None:
    """Copy the tokenizer of ``model`` into a run's directory, if it is a single file."""
    source = model / "tokenizer.json"
    if source.is_file():
        write_atomic(directory / "tokenizer.json", source.read_bytes())


def file_step(path: Path) -> int:
    """N of a file or directory of a step, named ``step-N`` with any ending."""
    return int(path.name.split("-")[1].split(".")[0])


def evaluation_step(key: str) -> int:
    return int(key.split("/")[0].removeprefix("step-"))


def evaluation_source(key: str) -> str:
    """The source in the key of an evaluation, ``step-N/SOURCE/KIND``; "" where it has none."""
    return "/".join(key.split("/")[1:-1])
