"""Opens the engines of a config: running servers by address, or own servers; supervised while open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agent_rl.config import EngineConfig
from agent_rl.engine.fleet import Fleet, Member
from agent_rl.engine.launch import EngineServer, refuse_unservable
from agent_rl.engine.ray_servers import RayEngineServer, Reservation
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.supervisor import EngineSupervisor, phase_change
from agent_rl.engine.types import Server
from agent_rl.errors import EngineError, EngineKeyRefused, UserError
from agent_rl.models.spec import ModelSpec, refuse_dense, refuse_quantized
from agent_rl.utils.concurrency import first_error, reduce_gc_pauses, run_alongside
from agent_rl.utils.http import AsyncHttp

_RECEIVING = ("--load-format", "dummy", "--json-model-override-args", '{"quantization_config": null}')
"""SGLang's arguments for a bfloat16 engine of a quantized checkpoint whose weights a trainer sends."""
ANSWER_SECONDS = 15.0
"""How long a running server may take to answer ``/model_info``; a busy or paused one answers as fast."""


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    model: Path,
    model_spec: ModelSpec,
    run_dir: Path,
    note: Callable[[str], None] = lambda line: None,
    *,
    routes: bool = True,
    masks: bool = False,
    publishing: bool = False,
    reservations: Sequence[Reservation] = (),
) -> AsyncIterator[SGLangEngine]:
    """A client of the engines of ``config``, which serve ``model_spec``, the checkpoint in directory ``model``.

    ``routes``, ``masks``: whether they must capture routes and return kept tokens. ``reservations``: on a Ray cluster,
    one for each engine. Launched servers log to ``run_dir/engine-N.log`` and are stopped on the way out. ``note`` is
    called with a line for each engine that goes out of use or comes back. Unless the caller is ``publishing`` weights
    of its own, all engines must have the same version. If it is, servers of a quantized checkpoint start without its
    weights, in ``engine.dtype``.

    Raises ConfigError for a model that cannot be served (as a quantized one without a trainer) or a wrong interpreter,
    EngineStartError for a launched server that does not come up, UserError for a running one that does not respond or
    differs from the others, RoutesMissingError for one that does not capture routes.
    """
    if routes:
        refuse_dense(model_spec, model)
    if config.launched:
        refuse_unservable(model_spec, model)
        if model_spec.quantized and not publishing:
            refuse_quantized(model)
        if model_spec.quantized:
            config = config.model_copy(update={"extra_args": (*_RECEIVING, *config.extra_args)})
    fleet = Fleet(config.restarts)
    fleet.listeners.append(lambda before, after: _note_change(note, before, after))
    servers: Mapping[str, Server] = {}
    if config.launched and config.placement == "ray":
        servers = _ray_servers(config, model, model_spec, run_dir, reservations, note, routes=routes)
    elif config.launched:
        servers = _local_servers(config, model, run_dir, routes=routes)
    names = tuple(servers) or config.external_urls
    await check_engines(() if servers else names, headers=config.headers)
    for name in names:
        fleet.add(name, "" if servers else name)
    async with AsyncExitStack() as stack:
        engine = SGLangEngine((), model_spec, config, fleet=fleet, servers=servers, routes=routes, masks=masks)
        stack.push_async_callback(engine.close)
        supervisor = EngineSupervisor(engine, servers, config)
        stack.push_async_callback(supervisor.close)
        try:
            await supervisor.open()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        fleet.metrics()  # discards the counts of the start
        if not publishing:
            await _refuse_mixed(engine)
        reduce_gc_pauses()
        await stack.enter_async_context(run_alongside(supervisor.run()))
        yield engine


def _local_servers(config: EngineConfig, model: Path, run_dir: Path, *, routes: bool) -> dict[str, EngineServer]:
    logs = [run_dir / f"engine-{number}.log" for number in range(config.count)]
    return {
        log.stem: EngineServer(config, model, log, number=number, capture_routes=routes, key=config.api_key)
        for number, log in enumerate(logs)
    }


def _ray_servers(
    config: EngineConfig,
    model: Path,
    model_spec: ModelSpec,
    run_dir: Path,
    reservations: Sequence[Reservation],
    note: Callable[[str], None],
    *,
    routes: bool,
) -> dict[str, RayEngineServer]:
    return {
        f"engine-{number}": RayEngineServer(
            config, model, run_dir / f"engine-{number}.log", reserved, number=number, capture_routes=routes, notify=note
        )
        for number, reserved in enumerate(reservations)
    }


def _note_change(note: Callable[[str], None], before: Member, after: Member) -> None:
    if (line := phase_change(before, after)) is not None:
        note(line)


async def _refuse_mixed(engine: SGLangEngine) -> None:
    """Raise UserError where the engines in use have weights of different versions."""
    versions = {url: (await engine.info(url)).weight_version for url in engine.urls}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{url} has {version!r}" for url, version in versions.items())
        raise UserError(f"engine.urls: their weights are of different versions ({listed}): restart them, or use one")


async def check_engines(
    urls: Sequence[str], *, seconds: float = ANSWER_SECONDS, headers: Mapping[str, str] | None = None
) -> None:
    """Check, concurrently and with a deadline, that every server of ``engine.urls`` says which model it serves.

    Raises UserError, in one line, for those that do not answer as an SGLang server, or refuse the key.
    """
    async with AsyncHttp(seconds, headers=headers) as http:
        faults = [fault for fault in await asyncio.gather(*(_fault(http, url, seconds) for url in urls)) if fault]
    if faults:
        raise UserError(
            f"engine.urls: {'; '.join(faults)}; start an SGLang server there, correct the address, or leave "
            "engine.urls out for one to be launched"
        )


async def _fault(http: AsyncHttp, url: str, seconds: float) -> str | None:
    endpoint = f"{url.rstrip('/')}/model_info"
    try:
        async with asyncio.timeout(seconds):
            await http.get_json(endpoint)
    except TimeoutError:
        return f"{endpoint}: no answer within {seconds:g} s"
    except EngineKeyRefused as error:
        raise UserError(f"engine.urls: {error}") from None
    except EngineError as error:
        return str(error)
    return None
