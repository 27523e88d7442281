"""The engines a config asks for: running servers by address, or ones that we launch; looked after while open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agent_rl.config import EngineConfig
from agent_rl.engine.fleet import Fleet, Member
from agent_rl.engine.launch import EngineServer, refuse_unservable
from agent_rl.engine.ray_servers import HostedServer, Reservation
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.supervisor import EngineSupervisor, story
from agent_rl.engine.types import Server
from agent_rl.errors import EngineError, EngineKeyRefused, UserError
from agent_rl.models.spec import ModelSpec, refuse_dense
from agent_rl.utils.concurrency import beside, collect_rarely, first_leaf
from agent_rl.utils.http import AsyncHttp

ANSWER_SECONDS = 15.0
"""How long a running server may take to say which model it serves; a busy or paused one says it as fast."""


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    model: Path,
    facts: ModelSpec,
    run_dir: Path,
    note: Callable[[str], None] = lambda line: None,
    *,
    routes: bool = True,
    publishing: bool = False,
    rooms: Sequence[Reservation] = (),
) -> AsyncIterator[SGLangEngine]:
    """A checked client of the engine(s) in ``config``, which serve the checkpoint in directory ``model``.

    ``routes``: whether they are to capture the routes. ``rooms``: on a Ray cluster, one for each engine. Launched
    servers log to ``run_dir/engine-N.log`` and are stopped on the way out. ``note`` is called with a line for each
    engine that goes out of use or comes back. Unless the caller is ``publishing`` weights of its own, all engines must
    have the same.

    Raises ConfigError for a model that cannot be served or a wrong interpreter, EngineStartError when a launched server
    does not come up, UserError when a given one does not answer or differs from the others, RoutesMissingError when one
    does not capture routes.
    """
    if routes:
        refuse_dense(facts, model)
    fleet = Fleet(config.restarts)
    fleet.listeners.append(lambda before, after: _tell(note, before, after))
    servers: Mapping[str, Server] = {}
    if config.launched and config.placement == "ray":
        servers = _hosted(config, model, facts, run_dir, rooms, note, routes=routes)
    elif config.launched:
        servers = _local(config, model, facts, run_dir, routes=routes)
    names = tuple(servers) or config.named
    await check_engines(() if servers else names, headers=config.headers)
    for name in names:
        fleet.add(name, "" if servers else name)
    async with AsyncExitStack() as stack:
        engine = SGLangEngine((), facts, config, fleet=fleet, servers=servers, routes=routes)
        stack.push_async_callback(engine.close)
        keeper = EngineSupervisor(engine, servers, config)
        stack.push_async_callback(keeper.close)
        try:
            await keeper.open()
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from None
        fleet.metrics()  # that they came up is no event of a step
        if not publishing:
            await _refuse_mixed(engine)
        collect_rarely()
        await stack.enter_async_context(beside(keeper.run()))
        yield engine


def _local(
    config: EngineConfig, model: Path, facts: ModelSpec, run_dir: Path, *, routes: bool
) -> dict[str, EngineServer]:
    logs = [run_dir / f"engine-{number}.log" for number in range(config.count)]
    servers = {
        log.stem: EngineServer(config, model, log, number=number, capture_routes=routes)
        for number, log in enumerate(logs)
    }
    refuse_unservable(facts, model, servers["engine-0"].device)
    return servers


def _hosted(
    config: EngineConfig,
    model: Path,
    facts: ModelSpec,
    run_dir: Path,
    rooms: Sequence[Reservation],
    tell: Callable[[str], None],
    *,
    routes: bool,
) -> dict[str, HostedServer]:
    for room in rooms[:1]:
        refuse_unservable(facts, model, room.device)
    return {
        f"engine-{number}": HostedServer(
            config, model, run_dir / f"engine-{number}.log", room, number=number, capture_routes=routes, tell=tell
        )
        for number, room in enumerate(rooms)
    }


def _tell(note: Callable[[str], None], before: Member, after: Member) -> None:
    if (line := story(before, after)) is not None:
        note(line)


async def _refuse_mixed(engine: SGLangEngine) -> None:
    """Raise UserError where the engines in use have weights of different versions."""
    versions = {url: (await engine.info(url)).weight_version for url in engine.urls}
    if len(set(versions.values())) > 1:
        found = ", ".join(f"{url} has {version!r}" for url, version in versions.items())
        raise UserError(f"engine.urls: their weights are of different versions ({found}): start them anew, or use one")


async def check_engines(
    urls: Sequence[str], *, seconds: float = ANSWER_SECONDS, headers: Mapping[str, str] | None = None
) -> None:
    """Ask every server of ``engine.urls`` for its model, all at once, with a deadline.

    Raises UserError, in one line, for those that do not answer as an SGLang server, or refuse the key.
    """
    async with AsyncHttp(seconds, headers=headers) as http:
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
    except EngineKeyRefused as error:
        raise UserError(f"engine.urls: {error}") from None
    except EngineError as error:
        return str(error)
    return None
