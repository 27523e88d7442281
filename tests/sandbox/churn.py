"""Starts, uses and closes many sandboxes, for tests and benchmarks that kill this process meanwhile.

``python tests/sandbox/churn.py BACKEND COUNT RUN_ID`` prints a JSON object for each finished sandbox: the seconds of
its start, its command and its close, or its error.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from sandbox import Sandbox, SandboxError, SandboxPool, SandboxSpec, open_backend

AT_ONCE = 16


async def one(pool: SandboxPool) -> dict[str, float | str]:
    took: dict[str, float | str] = {}
    stage, sandbox = "start", None
    try:
        began = time.perf_counter()
        sandbox = await pool.start(SandboxSpec())
        took[stage] = time.perf_counter() - began
        stage = "exec"
        took[stage] = await used(sandbox)
        stage, began = "close", time.perf_counter()
        await sandbox.close()
        took[stage] = time.perf_counter() - began
    except SandboxError as error:
        took["error"] = f"{stage}: {error}"
        if sandbox is not None:
            await sandbox.close()
    return took


async def used(sandbox: Sandbox) -> float:
    """Run a command in ``sandbox``, checked by its output; returns its seconds."""
    began = time.perf_counter()
    result = await sandbox.exec("echo used > f; cat f", timeout=60)
    if result.stdout != b"used\n":
        raise SandboxError(f"the command answered {result}")
    return time.perf_counter() - began


async def main(backend: str, count: int, run_id: str) -> None:
    pool = SandboxPool(open_backend(backend, run_id=run_id), max_starts=AT_ONCE)
    turns = asyncio.Semaphore(AT_ONCE)

    async def turn() -> None:
        async with turns:
            print(json.dumps(await one(pool)), flush=True)

    try:
        await pool.reap()
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(turn())
    finally:
        await pool.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
