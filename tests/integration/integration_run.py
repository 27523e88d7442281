"""A small training run in its own process, with real SGLang, Megatron under Ray and sandboxes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from marked import HERE, ROOT, MarkedProcess

REAL = (pytest.mark.sglang, pytest.mark.megatron, pytest.mark.bubblewrap, pytest.mark.slow)
"""The marks of tests that start a :class:`Run`."""


class Run(MarkedProcess):
    """``agent-rl train`` on a small config.

    ``project``: the directory it is started in, with a config ``letters.yaml``, as `agent-rl init` makes it; without
    one the quickstart is run in the checkout. Modules beside this one can be imported.
    """

    def __init__(self, directory: Path, *overrides: str, project: Path | None = None) -> None:
        settings = [
            "name=small", f"runs_dir={directory}", f"model={directory}/model", "sandbox.backend=bubblewrap",
            f"env.options={{train_tasks: 16, heldout_tasks: 8, cache_dir: {ROOT}/.cache/tasks}}",
            "rollout.tasks_per_step=3", "rollout.group_size=4", "eval.tasks=8", "eval.greedy=false",
            "train.steps=4", "train.checkpoint_every=2",
        ]  # fmt: skip
        cwd, config = (ROOT, "quickstart") if project is None else (project, "letters.yaml")
        command = ["-m", "agent_rl.cli", "train", config, *settings, *overrides]
        super().__init__(directory, command, cwd=cwd, path=(ROOT, HERE))

    def until(self, line: str, timeout: float = 150.0) -> None:
        """Wait until ``line`` is in the output; a run that ends before fails the test."""
        wait(lambda: line in self.text or self.ended, timeout, f"{line!r} in:\n{self.text}")
        assert line in self.text, self.text

    def finish(self, timeout: float = 240.0) -> int:
        self.process.wait(timeout)
        return self.process.returncode

    def none_alive(self, timeout: float = 20.0) -> None:
        wait(lambda: not self.alive(), timeout, lambda: f"still alive: {self.alive()}")


def wait(condition: Callable[[], bool], timeout: float, what: str | Callable[[], str]) -> None:
    """Poll another process's state, for which there is no event to wait on."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout:.0f} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)
