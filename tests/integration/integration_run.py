"""A real training run in a process of its own: real SGLang, real Megatron under Ray, real sandboxes; only small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from marked import processes

ROOT = Path(__file__).resolve().parent.parent.parent


class Run:
    """``agent-rl train`` on a small config; its processes are known by a mark in their environment.

    ``project``: the directory it is started in, with a config ``letters.yaml``, as `agent-rl init` makes it; without
    one the quickstart is run in the checkout. Modules beside this one can be imported.
    """

    def __init__(self, directory: Path, *overrides: str, project: Path | None = None) -> None:
        self.directory, self.output, self.mark = (
            directory,
            directory / f"output-{uuid.uuid4().hex[:6]}.txt",
            uuid.uuid4().hex,
        )
        settings = [
            "name=small", f"runs_dir={directory}", f"model={directory}/model", "sandbox.backend=bubblewrap",
            f"env.options={{train_tasks: 16, heldout_tasks: 8, cache_dir: {ROOT}/.cache/tasks}}",
            "rollout.tasks_per_step=3", "rollout.group_size=4", "eval.tasks=8", "eval.greedy=false",
            "train.steps=4", "train.checkpoint_every=2",
        ]  # fmt: skip
        place, config = (ROOT, "quickstart") if project is None else (project, "letters.yaml")
        path = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agent_rl.cli", "train", config, *settings, *overrides],
                stdout=output, stderr=subprocess.STDOUT, cwd=place, start_new_session=True, preexec_fn=_hear_ctrl_c,
                env={**os.environ, "PYTHONPATH": path, "TEST_MARK": self.mark},
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, line: str, timeout: float = 150.0) -> None:
        """Wait until ``line`` is in the output; a run that ends before fails the test."""
        wait(lambda: line in self.text or self.process.poll() is not None, timeout, f"{line!r} in:\n{self.text}")
        assert line in self.text, self.text

    def finish(self, timeout: float = 240.0) -> int:
        self.process.wait(timeout)
        return self.process.returncode

    def alive(self) -> list[str]:
        """The command lines of this run's processes that still live: engine, Ray, trainer ranks, sandboxes."""
        return list(processes(self.mark).values())

    def none_alive(self, timeout: float = 20.0) -> None:
        wait(lambda: not self.alive(), timeout, lambda: f"still alive: {self.alive()}")


def _hear_ctrl_c() -> None:
    """A shell's background jobs ignore SIGINT, and hand that on to whatever they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait(condition: Callable[[], bool], timeout: float, what: str | Callable[[], str]) -> None:
    """Poll another process's state, for which there is no event to wait on."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)
