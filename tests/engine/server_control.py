"""What tests ask of a server beside sampling: to pause, to flush its cache, to abort everything."""

from __future__ import annotations

from agent_rl.engine.http import AsyncHttp
from agent_rl.engine.sglang import SGLangEngine


async def tell(engine: SGLangEngine, endpoint: str, **body: object) -> None:
    """POST ``body`` to ``endpoint`` of every server; ``flush_cache`` is EngineRejected while requests run."""
    async with AsyncHttp(60.0) as http:
        for url in engine.urls:
            await http.post(f"{url}/{endpoint}", body)
