"""A command in a remote sandbox against the same command in a container of the local engine.

Run: ``python benchmarks/bench_remote_sandbox.py [rounds]`` (needs docker with the image agent-rl-base)

Both sandboxes are containers of the same engine with the same limits. The remote one is reached over TCP through its
agent (``tests/support/remote_docker.py``). Commands alternate, so that other load falls on both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

from sandbox import Sandbox, SandboxSpec, open_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
COMMANDS = {"true": "true", "1 MB of output": "head -c 1000000 /dev/zero"}


async def seconds(sandbox: Sandbox, command: str) -> float:
    began = time.perf_counter()
    result = await sandbox.exec(command, timeout=60)
    assert result.ok, result
    return time.perf_counter() - began


async def compare(rounds: int) -> None:
    backends = [
        open_backend("docker", run_id="bench-local"),
        open_backend("support.remote_docker:open_remote", run_id="bench-remote"),
    ]
    try:
        local, remote = [await backend.start(SandboxSpec()) for backend in backends]
        for name, command in COMMANDS.items():
            pairs = [(await seconds(local, command), await seconds(remote, command)) for _ in range(rounds)]
            columns = [sorted(column) for column in zip(*pairs, strict=True)]
            for what, at in (("median", rounds // 2), ("p99", int(rounds * 0.99))):
                ours, theirs = columns[1][at], columns[0][at]
                times = f"remote {ours * 1e3:7.1f} ms  docker {theirs * 1e3:7.1f} ms"
                print(f"{name:16} {what:6} {times}  ratio {ours / theirs:.2f}")
            print(f"{name:16} mean ratio {statistics.fmean(columns[1]) / statistics.fmean(columns[0]):.2f}")
    finally:
        for backend in backends:
            await backend.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=200)
    asyncio.run(compare(parser.parse_args().rounds))
