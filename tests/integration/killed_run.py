"""A recorded run (:mod:`recorded_run`) that is killed again and again, and what must be true each time."""

from __future__ import annotations

import json
import math
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from marked import HERE, ROOT, MarkedProcess

from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.ray_leftovers import is_stale

# Figures of the clock, which no two runs share.
CLOCK = re.compile(r"^time/|seconds|per_second|^async_rollout/|^loop/|^engine/")


def write_config(directory: Path, model: Path, *, steps: int, checkpoint_every: int = 3, **sections: Any) -> None:
    """The config of a recorded run in ``directory``; ``sections`` are added to those here."""
    directory.mkdir(parents=True, exist_ok=True)
    train = {
        "steps": steps, "checkpoint_every": checkpoint_every, "lr": 1e-2, "lr_warmup_steps": 4, "mini_steps": 2,
        "device": "cpu", "microbatch_tokens": 128, "weight_decay": 0.1,
    }  # fmt: skip
    rollout = {"group_size": 4, "tasks_per_step": 3, "concurrency": 8}
    config = {"eval": {"tasks": 0}, "guard": {"action": "off"}, "rollout": rollout, "train": train}
    config |= {name: config.get(name, {}) | section for name, section in sections.items()}
    whole = {"name": "rec", "model": str(model), "runs_dir": str(directory), **config}
    (directory / "config.yaml").write_text(yaml.safe_dump(whole))


def exact(row: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics without those that a clock decides."""
    return {name: value for name, value in row.items() if not CLOCK.search(name)}


def settled(row: Mapping[str, float]) -> dict[str, float]:
    """A step's exact metrics without those of tokens by their age, which is a matter of time."""
    by_age = ("staleness/", "off_policy/", "mismatch/", "mismatch_without_replay/")
    return {name: value for name, value in exact(row).items() if not name.startswith(by_age)}


class Life(MarkedProcess):
    """One start of the run in ``directory`` by ``script``."""

    def __init__(self, directory: Path, *overrides: str, script: str = "recorded_run.py") -> None:
        self.run = directory / "rec"
        (self.run / "begun").unlink(missing_ok=True)
        self.started = time.time()
        command = [HERE / script, directory, *overrides]
        super().__init__(directory, command, cwd=ROOT, path=[ROOT / "tests"])

    def until(self, condition: Callable[[], bool], timeout: float = 600.0) -> bool:
        """Wait for ``condition``; False where the run ended before. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.ended:
                return condition()
            if time.monotonic() > deadline:
                raise TimeoutError(self.text)
            time.sleep(0.002)
        return True

    def begun(self) -> bool:
        """Whether its steps have begun."""
        return (self.run / "begun").exists()

    def finish(self) -> int:
        """Wait until it has ended by itself; its exit code."""
        return self.process.wait(3600)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def left(self) -> list[str]:
        """Its processes that still live, and its temporary directories."""
        directories = Path(tempfile.gettempdir()).glob("agent-rl-ray-*")
        return [*self.alive(), *map(str, filter(is_stale, directories))]


def step_reached(run: Path) -> int:
    """The last step that the metrics of a run have."""
    return max((int(row["step"]) for row in read_metrics(run)), default=0)


def step_saved(run: Path) -> int:
    """The step of the newest complete checkpoint of a run; 0 without."""
    latest = checkpoint.latest_checkpoint(run / "checkpoints")
    return checkpoint.checkpoint_step(latest) if latest else 0


def broken(
    run: Path, reference: Mapping[int, Mapping[str, float]], compared: Callable[[Mapping[str, float]], dict[str, float]]
) -> list[str]:
    """What is wrong with a run's directory: damaged checkpoints, metrics other than the unkilled run's, duplicates.

    ``compared``: which of a step's metrics have to be those of the reference, :func:`exact` or :func:`settled`.
    """
    faults = []
    for directory in checkpoint.complete_checkpoints(run / "checkpoints"):
        try:
            checkpoint.verify(directory, checkpoint.read_manifest(directory))
        except Exception as error:
            faults.append(f"{directory.name}: {error}")
    incomplete = [path.name for path in (run / "checkpoints").glob("step-*") if not (path / "manifest.json").exists()]
    faults += [f"{name}: incomplete" for name in incomplete]
    rows = read_metrics(run)
    for row in rows:
        faults += differing(int(row["step"]), compared(row), compared(reference[int(row["step"])]))
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        faults.append(f"steps {[row['step'] for row in rows]}")
    return faults


def differing(step: int, ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[str]:
    """The metrics of a step that are not those of the reference, a line each."""
    return [
        f"step {step}: {name} is {ours.get(name, math.nan)!r}, unkilled {theirs.get(name, math.nan)!r}"
        for name in ours.keys() | theirs.keys()
        if ours.get(name) != theirs.get(name)
    ]


def episodes(run: Path) -> list[tuple[str, int]]:
    """Every episode that was sampled to its end, in all lives; one twice where it was sampled again."""
    path = run / "episodes.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(task, number) for task, number in map(json.loads, lines)]
