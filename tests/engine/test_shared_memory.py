"""What dead servers left in shared memory goes; what a living process uses stays."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from agent_rl.engine.shared_memory import remove_stale


def test_only_what_nobody_uses_and_is_old_is_removed(tmp_path: Path) -> None:
    names = [
        "sglang_loads_a_1.shm",
        "sglang_loads_b_2.shm",
        "sem.mp-x",
        "sem.mp-y",
        "sgl_shm_kind_1_2",
        "plasma",
        "young",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"\0" * 4096)
        os.utime(tmp_path / name, (time.time() - 100,) * 2)
    (tmp_path / "sem.mp-young").touch()
    with (tmp_path / "sglang_loads_b_2.shm").open("r+b") as mapped, (tmp_path / "sem.mp-y").open("rb"):
        held = mmap.mmap(mapped.fileno(), 4096)
        mapped.close()
        assert remove_stale(tmp_path) == 3
        left = {"sglang_loads_b_2.shm", "sem.mp-y", "plasma", "young", "sem.mp-young"}
        assert set(os.listdir(tmp_path)) == left
        held.close()
    assert remove_stale(tmp_path) == 2
    assert remove_stale(tmp_path) == 0
