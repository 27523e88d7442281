"""Processes of a run, identified by a mark in their environment, which all of their descendants have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def processes(mark: str) -> dict[int, str]:
    """The living ones: the beginning of the command line, by process id."""
    entry, found = f"TEST_MARK={mark}".encode(), {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is a zombie
    return {pid: command for pid, command in found.items() if command}


def kill_rank(mark: str, number: int = 0) -> None:
    """Kill one of the trainer's ranks, which are numbered in the order of their process ids."""
    ranks = sorted(pid for pid, command in processes(mark).items() if "WorkerActor" in command)
    os.kill(ranks[number], signal.SIGKILL)


class MarkedProcess:
    """A Python process in its own process group, with the output of all of its processes."""

    def __init__(self, directory: Path, arguments: Sequence[str | Path], *, cwd: Path, path: Sequence[Path]) -> None:
        self.mark = uuid.uuid4().hex
        self.output = directory / f"output-{self.mark[:6]}.txt"
        paths = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT, cwd=cwd,
                start_new_session=True, preexec_fn=_restore_sigint,
                env={**os.environ, "TEST_MARK": self.mark, "PYTHONPATH": paths},
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def alive(self) -> list[str]:
        """The command lines of its processes that still live."""
        return list(processes(self.mark).values())

    def close(self) -> None:
        """Kill its process group if it has not ended."""
        if not self.ended:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


def _restore_sigint() -> None:
    """A shell's background jobs and their children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
