"""The engine a config asks for: running servers by URL, or one that we launch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer, refuse_unservable
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.model_facts import ModelFacts, refuse_dense


@asynccontextmanager
async def open_engine(
    config: EngineConfig, model: Path, facts: ModelFacts, run_dir: Path
) -> AsyncIterator[SGLangEngine]:
    """A checked client of the engine(s) in ``config``, which serve the checkpoint in folder ``model``.

    A launched server logs to ``run_dir/engine.log`` and is stopped on the way out.

    Raises ConfigError for a model that cannot be served or a wrong interpreter, EngineStartError when a launched server
    does not come up, EngineUnreachable when a given one does not answer, RoutesMissingError when one does not capture
    routes.
    """
    refuse_dense(facts, model)
    async with AsyncExitStack() as stack:
        if not config.urls:
            server = EngineServer(config, model, run_dir / "engine.log")
            refuse_unservable(facts, model, server.device)
            await stack.enter_async_context(server)
            engine = SGLangEngine(server.url, facts, config, death=server.death)
        else:
            engine = SGLangEngine(config.urls, facts, config)
        yield await stack.enter_async_context(engine)
