"""The engine a config asks for: running servers by URL, or one that we launch."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agent_rl.config import EngineConfig
from agent_rl.engine.http import AsyncHttp
from agent_rl.engine.launch import EngineServer, refuse_unservable
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import EngineError, UserError
from agent_rl.model_facts import ModelFacts, refuse_dense

ANSWER_SECONDS = 15.0
"""How long a running server may take to say which model it serves; a busy or paused one says it as fast."""


@asynccontextmanager
async def open_engine(
    config: EngineConfig, model: Path, facts: ModelFacts, run_dir: Path, *, routes: bool = True
) -> AsyncIterator[SGLangEngine]:
    """A checked client of the engine(s) in ``config``, which serve the checkpoint in folder ``model``.

    ``routes``: whether they are to capture the routes. A launched server logs to ``run_dir/engine.log`` and is stopped
    on the way out.

    Raises ConfigError for a model that cannot be served or a wrong interpreter, EngineStartError when a launched server
    does not come up, UserError when a given one does not answer, RoutesMissingError when one does not capture
    routes.
    """
    if routes:
        refuse_dense(facts, model)
    async with AsyncExitStack() as stack:
        if not config.urls:
            server = EngineServer(config, model, run_dir / "engine.log", capture_routes=routes)
            refuse_unservable(facts, model, server.device)
            await stack.enter_async_context(server)
            engine = SGLangEngine(server.url, facts, config, death=server.death, routes=routes)
        else:
            await check_engines(config.urls)
            engine = SGLangEngine(config.urls, facts, config, routes=routes)
        entered = await stack.enter_async_context(engine)
        gc.freeze()  # what is loaded by now stays: full collections need not go through it, which stops the loop
        yield entered


async def check_engines(urls: Sequence[str], *, seconds: float = ANSWER_SECONDS) -> None:
    """Ask every server of ``engine.urls`` for its model, all at once, with a deadline.

    Raises UserError, in one line, for those that do not answer as an SGLang server.
    """
    async with AsyncHttp(seconds) as http:
        faults = [fault for fault in await asyncio.gather(*(_fault(http, url, seconds) for url in urls)) if fault]
    if faults:
        raise UserError(
            f"engine.urls: {'; '.join(faults)}; start an SGLang server there, mend the address, or leave engine.urls "
            "out for one to be launched"
        )


async def _fault(http: AsyncHttp, url: str, seconds: float) -> str | None:
    question = f"{url.rstrip('/')}/model_info"
    try:
        async with asyncio.timeout(seconds):
            await http.get_json(question)
    except TimeoutError:
        return f"{question}: no answer within {seconds:g} s"
    except EngineError as error:
        return str(error)
    return None
