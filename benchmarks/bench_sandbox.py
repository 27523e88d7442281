"""Sandboxes against the plain ``docker`` command line, and many sandboxes with their owner killed in the middle.

Run: ``python benchmarks/bench_sandbox.py [rounds] [sandboxes]`` (needs a container engine with the image agent-rl-base)

First, in one run and in turns, so that other load falls on all: start, one command and end of a sandbox, by each
backend and by ``docker run -d``, ``docker exec`` and ``docker rm -f`` with the same limits. Then ``sandboxes``
sandboxes, 16 at once, of an owner that is killed with SIGKILL half-way and a second one that does the rest:
latencies, failures, what is left. Bubblewrap, podman and gVisor are measured too where they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from sandbox import SandboxBackend, SandboxSpec, SandboxUnavailableError, open_backend

T = TypeVar("T")

CHURN = Path(__file__).resolve().parents[1] / "tests" / "sandbox" / "churn.py"
STAGES = ("start", "exec", "close")
_FLAGS = (
    "--network=none --memory=512m --memory-swap=512m --pids-limit=140 --cpus=1 --cap-drop=ALL --init "
    "--user=65534:65534 --security-opt=no-new-privileges --log-driver=none --workdir=/testbed --entrypoint="
)


class Clock:
    """Seconds of the stages of a sandbox's life."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}

    async def time(self, stage: str, work: Awaitable[T]) -> T:
        began = time.perf_counter()
        result = await work
        self.seconds[stage].append(time.perf_counter() - began)
        return result

    def median(self, stage: str) -> float:
        return statistics.median(self.seconds[stage])


async def ours(backend: SandboxBackend, clock: Clock) -> None:
    sandbox = await clock.time("start", backend.start(SandboxSpec()))
    await clock.time("exec", sandbox.exec("true", timeout=60))
    await clock.time("close", sandbox.close())


async def command_line(clock: Clock) -> None:
    run = f"docker run -d {_FLAGS} agent-rl-base sleep infinity".split()
    sandbox = await clock.time("start", answer(*run))
    await clock.time("exec", answer("docker", "exec", "--user=0:0", sandbox, "bash", "-c", "true"))
    await clock.time("close", answer("docker", "rm", "-f", sandbox))


async def answer(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0, command
    return out.decode().strip()


async def compare(rounds: int) -> None:
    backends = {}
    for name in ("docker", "docker with runsc", "podman", "bubblewrap"):
        engine, _, runtime = name.partition(" with ")
        try:
            backends[name] = open_backend(engine, run_id=f"bench-{uuid.uuid4().hex[:8]}", runtime=runtime or None)
        except SandboxUnavailableError as error:
            print(f"{name}: {error}")
    clocks = {name: Clock() for name in ("docker CLI", *backends)}
    try:
        for _ in range(rounds):
            await command_line(clocks["docker CLI"])
            for name, backend in backends.items():
                await ours(backend, clocks[name])
    finally:
        for backend in backends.values():
            await backend.close()
    print(f"\n| median of {rounds}, ms (over docker CLI) | {' | '.join(STAGES)} |\n|---|---|---|---|")
    for name, clock in clocks.items():
        cells = [
            f"{clock.median(s) * 1e3:.0f} ({clock.median(s) / clocks['docker CLI'].median(s):.2f})" for s in STAGES
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def churn(backend: str, sandboxes: int) -> None:
    """Print one row: latencies of the sandboxes that came to their end, failures, seconds, what is left."""
    runs = [f"bench-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, CHURN, backend, str(sandboxes), runs[0]], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        done = [json.loads(run.stdout.readline()) for _ in range(sandboxes // 2)]
        run.kill()
    rest = [sys.executable, CHURN, backend, str(sandboxes - sandboxes // 2), runs[1]]
    done += map(json.loads, subprocess.run(rest, stdout=subprocess.PIPE, check=True).stdout.splitlines())
    seconds = time.perf_counter() - began
    listing = [sys.executable, "-m", "sandbox.reap", "--list", "--backend", backend]
    lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    left = sum(run in line for run in runs for line in lines)
    cells = [percentiles([sandbox[stage] for sandbox in done if stage in sandbox]) for stage in STAGES]
    failures = [sandbox["error"] for sandbox in done if "error" in sandbox]
    print(f"| {backend} | {' | '.join(cells)} | {len(failures)} of {len(done)} | {left} | {seconds:.0f} |", flush=True)
    for failure in sorted(set(failures)):
        print(f"  {failures.count(failure)} x {failure}")


def percentiles(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"{cuts[49] * 1e3:.0f} / {cuts[94] * 1e3:.0f} / {max(seconds) * 1e3:.0f}"


def main(rounds: int, sandboxes: int) -> None:
    asyncio.run(compare(rounds))
    print(f"\n{sandboxes} sandboxes, 16 at once, the owner killed half-way; ms at 50 % / 95 % / worst")
    print("| backend | start | exec | close | failed | runs left | s |\n|---|---|---|---|---|---|---|")
    for backend in ("docker", "podman", "bubblewrap"):
        try:
            asyncio.run(open_backend(backend, run_id="bench-probe").close())
        except SandboxUnavailableError:
            continue
        churn(backend, sandboxes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=20)
    parser.add_argument("sandboxes", nargs="?", type=int, default=300)
    options = parser.parse_args()
    main(options.rounds, options.sandboxes)
