"""A command, a start and 1 MiB each way through Ray's hosts against the local backend, in turns in one run.

Run: ``python benchmarks/bench_hosts.py [rounds] [backend]`` (needs the trainer environment, for Ray)

Prints medians in ms, their ratio to the local backend's and the difference. The goal is at most 5 ms more for a command
and 15 ms more for 1 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Awaitable, Callable

from timing import time_await

from agent_rl.train.ray_session import ray_session
from sandbox import Sandbox, SandboxBackend, SandboxSpec, open_backend
from sandbox.ray.backend import open_cluster

MIB = bytes(range(256)) * 4096
WARM_UP = 5
Work = Callable[[Sandbox], Awaitable[object]]
WORKS: dict[str, Work] = {
    "command": lambda sandbox: sandbox.exec("true", timeout=60),
    "1 MiB read": lambda sandbox: sandbox.read_file("file", max_bytes=2 << 20),
    "1 MiB written": lambda sandbox: sandbox.write_files({"file": MIB}),
    "1 MiB printed": lambda sandbox: sandbox.exec("cat file", timeout=60),
}


async def start_and_close(backend: SandboxBackend) -> None:
    await (await backend.start(SandboxSpec())).close()


async def measure(backends: dict[str, SandboxBackend], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by work and backend; a backend is first in every other round."""
    sandboxes = {name: await backend.start(SandboxSpec(memory_mb=1024)) for name, backend in backends.items()}
    found: dict[str, dict[str, list[float]]] = {work: {name: [] for name in backends} for work in ("start", *WORKS)}
    for sandbox in sandboxes.values():
        await sandbox.write_files({"file": MIB})
    for turn in range(WARM_UP + rounds):
        for name in sorted(backends, reverse=turn % 2 == 1):
            taken = {"start": await time_await(start_and_close(backends[name]))}
            taken |= {label: await time_await(work(sandboxes[name])) for label, work in WORKS.items()}
            if turn >= WARM_UP:
                for label, value in taken.items():
                    found[label][name].append(value)
    return found


async def main(rounds: int, kind: str) -> None:
    async with ray_session(None, cpus=1):
        backends: dict[str, SandboxBackend] = {
            "local": open_backend(kind, run_id="bench-local"),
            "ray": await open_cluster(kind, run_id="bench-ray"),
        }
        try:
            found = await measure(backends, rounds)
        finally:
            for backend in backends.values():
                await backend.close()
    print(f"{kind}, medians of {rounds} in ms\n| what | local | over Ray | ratio | more |\n|---|---|---|---|---|")
    for label, by_backend in found.items():
        local, ray = (statistics.median(by_backend[name]) * 1e3 for name in ("local", "ray"))
        print(f"| {label} | {local:.1f} | {ray:.1f} | {ray / local:.2f} | {ray - local:+.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=60)
    parser.add_argument("backend", nargs="?", default="bubblewrap", help="of the sandboxes")
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.backend))
