"""The engine a config asks for: running servers by URL, or one that we launch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agent_rl.config import EngineConfig
from agent_rl.engine.facts import read_facts
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine


@asynccontextmanager
async def open_engine(config: EngineConfig, model: Path, run_dir: Path) -> AsyncIterator[SGLangEngine]:
    """A checked client of the engine(s) in ``config``.

    A launched server logs to ``run_dir/engine.log`` and is stopped on the way out.

    Raises ConfigError for a wrong model folder or interpreter, EngineStartError when a launched server does not come
    up, EngineUnreachable when a given one does not answer, RoutesMissingError when one does not capture routes.
    """
    facts = read_facts(model)
    async with AsyncExitStack() as stack:
        if not config.urls:
            server = await stack.enter_async_context(EngineServer(config, model, run_dir / "engine.log"))
            engine = SGLangEngine(server.url, facts, config, death=server.death)
        else:
            engine = SGLangEngine(config.urls, facts, config)
        yield await stack.enter_async_context(engine)
