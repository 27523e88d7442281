"""What dead servers left in shared memory goes, however young it is; what a living process uses stays."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agent_rl.engine.launch import group_members
from agent_rl.engine.shared_memory import SHARED_MEMORY, remove_stale

# A semaphore by name, and the name on standard output; the process then waits for its input to end.
HOLD_A_SEMAPHORE = """
import multiprocessing, sys
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
sys.stdin.read()
"""


def test_unused_files_are_removed(tmp_path: Path) -> None:
    living, dead = os.getpid(), _dead_process()
    names = ["sglang_loads_a_1.shm", "sem.mp-x", f"sgl_shm_mm_{dead}_1f", f"multi_tokenizer_args_{dead}", "nccl-Ab1"]
    kept = ["sglang_loads_b_2.shm", "sem.mp-y", f"sgl_shm_mm_{living}_2f", f"multi_tokenizer_args_{living}", "plasma"]
    for name in (*names, *kept):
        (tmp_path / name).write_bytes(b"\0" * 4096)
    with (tmp_path / "sglang_loads_b_2.shm").open("r+b") as mapped, (tmp_path / "sem.mp-y").open("rb"):
        held = mmap.mmap(mapped.fileno(), 4096)
        mapped.close()
        assert remove_stale(tmp_path) == len(names)
        assert set(os.listdir(tmp_path)) == set(kept)
        held.close()
    assert remove_stale(tmp_path) == 2
    assert remove_stale(tmp_path) == 0


def test_a_semaphore_is_removed_after_its_process_ended() -> None:
    """The kernel knows a semaphore's mapping by another name than the file's."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_A_SEMAPHORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        file = SHARED_MEMORY / f"sem.{process.stdout.readline().decode().strip().removeprefix('/')}"
        hour_ago = time.time() - 3600
        os.utime(file, (hour_ago, hour_ago))
        remove_stale()
        assert file.exists()
        os.killpg(process.pid, signal.SIGKILL)  # its resource tracker too, which would remove the file
    _await_gone(process.pid)
    remove_stale()
    assert not file.exists()


def _dead_process() -> int:
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    process.join()
    assert process.pid is not None
    return process.pid


def _await_gone(group: int) -> None:
    deadline = time.monotonic() + 10
    while group_members(group):
        assert time.monotonic() < deadline
        time.sleep(0.01)
