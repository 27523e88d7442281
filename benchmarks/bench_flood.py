"""What floods of output cost the host: its CPU seconds, over those that the sandboxes may use.

Run: ``python benchmarks/bench_flood.py [sandboxes] [seconds]`` (measures every backend that answers here)

Sandboxes with half a core each print as fast as they can. The host's part is this process and the engine's (its
daemon and the monitors of its containers), which does not count against a sandbox's limit; the share is that, over
sandboxes x half a core x seconds. It is to stay below a tenth. What a sandbox may cost at once is spent before the
measurement begins.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import struct
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from sandbox import Sandbox, SandboxSpec, SandboxUnavailableError, open_backend
from sandbox.docker.client import address

CPUS = 0.5
FLOODS = {
    "long lines": "yes $(head -c 4000 /dev/zero | tr '\\0' x)",
    "one byte at a time": 'python3 -c \'import os\nwhile True: os.write(1, b"x"); os.write(2, b"y")\'',
    "both streams": "yes >&2 & yes",
}
_WARM_UP = 8.0


def daemon(backend: str) -> int:
    """The process id of the engine that listens where ``backend`` connects to; 0 where there is none."""
    if backend == "bubblewrap":
        return 0
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address(backend).removeprefix("unix://"))
        return int(struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def host_seconds(engine: int, sandboxes: Sequence[Sandbox]) -> float:
    """CPU seconds so far of this process, of the engine, of its own children, and of the sandboxes' monitors."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            arguments = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        monitor = "sleep" not in arguments and any(sandbox.id in arguments for sandbox in sandboxes)
        if monitor or {int(stat.parent.name), int(fields[1])} & {engine, os.getpid()} - {0}:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def flooded(engine: int, sandboxes: Sequence[Sandbox], flood: str, seconds: float) -> float:
    """The host's CPU seconds while all ``sandboxes`` run ``flood`` for ``seconds``, once it goes on evenly."""
    running = [asyncio.create_task(sandbox.exec(flood, timeout=_WARM_UP + seconds + 1)) for sandbox in sandboxes]
    await asyncio.sleep(_WARM_UP)
    before = host_seconds(engine, sandboxes)
    await asyncio.sleep(seconds)
    spent = host_seconds(engine, sandboxes) - before
    for result in await asyncio.gather(*running):
        assert result.timed_out, result.exit_code
    return spent


async def measure(name: str, count: int, seconds: float) -> None:
    engine = daemon(name)
    backend = open_backend(name, run_id=f"bench-{uuid.uuid4().hex[:8]}")
    try:
        sandboxes = [await backend.start(SandboxSpec(cpus=CPUS)) for _ in range(count)]
        for what, flood in FLOODS.items():
            spent = await flooded(engine, sandboxes, flood, seconds)
            print(f"| {name} | {what} | {spent:.2f} | {spent / (count * CPUS * seconds):.3f} |", flush=True)
    finally:
        await backend.close()


def main(count: int, seconds: float) -> None:
    print(f"{count} sandboxes of {CPUS} cores for {seconds:.0f} s, {time.strftime('%F')}")
    print("| backend | flood | host's CPU s | over the sandboxes' limit |\n|---|---|---|---|")
    for name in ("bubblewrap", "docker", "podman"):
        try:
            asyncio.run(measure(name, count, seconds))
        except SandboxUnavailableError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sandboxes", nargs="?", type=int, default=4)
    parser.add_argument("seconds", nargs="?", type=float, default=5.0, help="that they print")
    options = parser.parse_args()
    main(options.sandboxes, options.seconds)
