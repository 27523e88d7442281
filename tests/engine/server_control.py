"""What tests ask of a server beside sampling: to pause, to flush its cache, to abort everything, to load weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from agent_rl.engine.launch import EngineServer, group_members
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.shared_memory import SHARED_MEMORY, FileId, files_used_by
from agent_rl.errors import EngineRejected
from agent_rl.utils.http import AsyncHttp
from agent_rl.weight_sync.receivers import WeightReceivers


def serving(engine: EngineServer) -> Iterator[str]:
    """Start the server; its URL. Stop it at the end."""
    asyncio.run(engine.start())
    yield engine.url
    asyncio.run(engine.stop())


async def tell(engine: SGLangEngine, endpoint: str, **body: object) -> None:
    """POST ``body`` to ``endpoint`` of every server; ``flush_cache`` is EngineRejected while requests run."""
    async with AsyncHttp(60.0) as http:
        for url in engine.urls:
            await http.post(f"{url}/{endpoint}", body)


async def idle(engine: SGLangEngine) -> None:
    """Return once no server has a request any more, the caches flushed. SGLang may count a request as running for a
    moment after it was answered."""
    await tell(engine, "flush_cache?timeout=30")


async def running(engine: SGLangEngine) -> None:
    """Return once the server has a request running: it then refuses to flush its cache."""
    async with asyncio.timeout(30):
        while True:
            try:
                await tell(engine, "flush_cache")
            except EngineRejected:
                return
            await asyncio.sleep(0.01)


def load(receivers: WeightReceivers, directory: Path, weight_version: str) -> None:
    """Load a checkpoint from disk as a run does, paused."""
    receivers.pause()
    try:
        receivers.load_from_disk(directory, weight_version)
    finally:
        receivers.resume()


def shared_files(group: int) -> set[str]:
    """The names in shared memory of what a process group has mapped or open."""
    used = {file for process in group_members(group) for file in files_used_by(process)}
    return {path.name for path in SHARED_MEMORY.iterdir() if FileId.from_stat(path.stat()) in used}
