"""A directory is locked by one process at most, and unlocked after its end or kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent_rl.errors import UserError
from agent_rl.utils.directory_lock import lock_directory

HOLD = """
import sys, time
from pathlib import Path
from agent_rl.utils.directory_lock import lock_directory
with lock_directory(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def lock_in_process(directory: Path) -> subprocess.Popen[str]:
    """A process that locks ``directory`` until its standard input is closed."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def is_refused(directory: Path, message: str) -> None:
    with pytest.raises(UserError, match=message), lock_directory(directory):
        pass


@pytest.mark.parametrize("end", ["exit", "kill -9"])
def test_locked_directory_is_rejected_until_its_owner_ends(tmp_path: Path, end: str) -> None:
    directory = tmp_path / "runs" / "first"
    process = lock_in_process(directory)
    is_refused(directory, rf"first: in use by process {process.pid} on \S+: wait until it ends")
    if end == "exit":
        process.communicate()
    else:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with lock_directory(directory):
        pass


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    for directory in (tmp_path / "runs", tmp_path / "runs" / "first"):
        is_refused(directory, r"cannot be written .*; choose another directory")


WRITE = """
import sys
from pathlib import Path
from r3.atomic_write import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    print("written", flush=True)
    sys.stdin.read()
"""


def test_temporary_files_of_a_killed_holder_are_removed_and_those_of_another_directory_kept(tmp_path: Path) -> None:
    whole = tmp_path / "run" / "trajectories" / "step-000001.jsonl.zst"
    other = tmp_path / "run" / "evaluation" / "state.json"
    for path in (whole, other):
        path.parent.mkdir(parents=True)
        path.write_text("whole")
    (other.parent / ".lock").touch()
    for path in (whole, other):
        command = [sys.executable, "-c", WRITE, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "written\n"
            process.kill()
    assert len(list(tmp_path.rglob("*.tmp"))) == 2
    with lock_directory(tmp_path / "run"):
        assert [path.parent for path in tmp_path.rglob("*.tmp")] == [other.parent]
        assert whole.read_text() == other.read_text() == "whole"
    with lock_directory(other.parent):
        assert not list(tmp_path.rglob("*.tmp"))
