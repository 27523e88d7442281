"""Two ranks with a pool, killed while they use it and started again; run where nobody else uses ``/dev/shm``.

As ``pool_kill.py DIR`` the one who kills: prints as JSON what was in ``/dev/shm`` while the ranks were there, after
they were killed, and while their successors were there. With a rank's arguments a rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")


def main(rank: int, ranks: int, results: Path) -> Any:
    """Use a pool for ever; beside a file ``once`` only once: what is fetched and what is in ``/dev/shm``."""
    import pool_worker
    import torch
    import transfer_worker as worker

    from r3.balance import ExpertLayout

    layout = ExpertLayout(worker.EXPERTS, ranks, worker.SLOTS, placement=worker.HOME)
    pool = worker.opened("pool", worker.home_experts(layout, rank, torch.float32), layout)
    while True:
        pool.refresh()
        found = pool_worker.fetched(pool, layout)
        if (results / "once").exists():
            whole = os.statvfs(SHARED_MEMORY)
            size = whole.f_blocks * whole.f_frsize
            return {"fetched": found, "shared": os.listdir(SHARED_MEMORY), "size": size}
        print(rank, flush=True)


def kill(results: Path) -> dict[str, list[str]]:
    commands = [[sys.executable, "-W", "ignore", __file__, str(rank), "2", str(results)] for rank in range(2)]
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    world = [subprocess.Popen(command, stdout=subprocess.PIPE, env=paths) for command in commands]
    for rank in world:
        assert rank.stdout is not None
        assert rank.stdout.readline()
    used = os.listdir(SHARED_MEMORY)
    for rank in world:
        rank.kill()
        rank.wait()
    return {"used": used, "killed": os.listdir(SHARED_MEMORY)}


if __name__ == "__main__":
    if len(sys.argv) > 2:
        import transfer_worker

        transfer_worker.joined(main)
    else:
        print(json.dumps(kill(Path(sys.argv[1]))))
