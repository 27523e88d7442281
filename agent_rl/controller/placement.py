"""A run's part of a Ray cluster: one connection, and the room that its engines and the trainer's ranks take there.

Room is reserved before anything starts, the engines' first: an engine wants several GPUs of one machine, and ranks fill
what is left. It stays reserved when an engine or a rank dies, so that it can come back, and Ray moves it to another
machine when its own is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_rl.config import EngineConfig, ParallelConfig, RunConfig
from agent_rl.controller.cluster_resources import Ask, amount, engine_ask, rank_ask, shortage
from agent_rl.engine.ray_servers import Reservation
from agent_rl.errors import TrainerError, UserError
from agent_rl.train.parallel_checks import rank_blocks, straddling
from agent_rl.train.ray_launch import rank_bundles, rank_device
from agent_rl.train.ray_session import ray_session
from agent_rl.utils.concurrency import shielded
from sandbox.ray.open import named_nodes, ray_nodes

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

FREE_SECONDS = 30.0
"""How long a run that was killed just before may take to give back what it held."""
_RESERVE_SECONDS = 60.0
_BLOCK_SECONDS = 5.0
"""How long Ray may take to find machines for ranks in blocks; smaller ones are then tried."""


@dataclass(frozen=True, slots=True)
class Reservations:
    """What is reserved for a run: a room for each engine, and one for all ranks. Empty where none is on Ray.

    ``note``: which groups of ranks lie over several machines, in one line; None where none does.
    """

    engines: tuple[Reservation, ...] = ()
    ranks: PlacementGroup | None = None
    note: str | None = None


def needs_ray(config: RunConfig) -> bool:
    """Whether a run needs Ray before its parts are opened."""
    return engines_on_ray(config) or config.sandbox.placement == "ray" or config.train.ray_address is not None


def open_ray(config: RunConfig) -> AbstractAsyncContextManager[None]:
    """The run's one connection to Ray; where it starts a local one, with CPUs for the ranks and the engines."""
    return ray_session(config.train.ray_address, cpus=local_cpus(config))


def local_cpus(config: RunConfig) -> int:
    """How many CPUs a local Ray has: one for each rank, and those of all engines, also of those beyond
    ``engine.min_count``."""
    ranks = config.train.parallel.world_size
    if not engines_on_ray(config):
        return ranks
    ask = engine_ask(config.engine, "cpu")
    return ranks + config.engine.count * ask.nodes * int(ask.each["CPU"])


@asynccontextmanager
async def open_reservations(config: RunConfig, *, ranks: bool) -> AsyncIterator[Reservations]:
    """The run's connection to Ray, where it needs one, and in it the room for its engines and, with ``ranks``, for the
    trainer. Raises UserError, in one line, where Ray has too little for them."""
    if not (needs_ray(config) if ranks else engines_on_ray(config)):
        yield Reservations()
        return
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_ray(config))
        groups: list[PlacementGroup] = []
        stack.push_async_callback(lambda: shielded(asyncio.to_thread(_remove, groups)))
        yield await shielded(asyncio.to_thread(_reserve, config, groups, ranks=ranks))


def engine_device(engine: EngineConfig, gpus: float) -> str:
    """``cuda`` or ``cpu``: as configured, or what a cluster with so many GPUs has."""
    return engine.device if engine.device != "auto" else "cuda" if gpus else "cpu"


@dataclass(frozen=True, slots=True)
class EngineNode:
    """A node that engines may run on: its name, its id, and what it has of what they take, in words."""

    name: str
    id: str
    has: str


async def find_placement(config: RunConfig) -> tuple[str | None, list[EngineNode]]:
    """Why the cluster that this process is connected to has too little for the run, in one line, where that is so; and
    the nodes that its engines may run on."""
    return await asyncio.to_thread(_look_for_room, config)


def _look_for_room(config: RunConfig) -> tuple[str | None, list[EngineNode]]:
    named = named_nodes(ray_nodes())
    nodes = {name: node["Resources"] for name, node in named.items()}
    gpus = sum(has.get("GPU", 0) for has in nodes.values())
    device = engine_device(config.engine, gpus)
    try:
        asks = [engine_ask(config.engine, device), rank_ask(config.train, rank_device(config, gpus))]
    except TrainerError as error:
        return str(error), []
    kind = "GPU" if device == "cuda" else "CPU"
    found = [
        EngineNode(name, named[name]["NodeID"], amount({kind: has[kind]}))
        for name, has in nodes.items()
        if has.get(kind)
    ]
    return shortage(asks, nodes), found


def engines_on_ray(config: RunConfig) -> bool:
    """Whether its engines are started on a Ray cluster."""
    return config.engine.launched and config.engine.placement == "ray"


def _reserve(config: RunConfig, groups: list[PlacementGroup], *, ranks: bool) -> Reservations:
    """Reserve all room, and note it in ``groups``. Blocking."""
    import ray

    gpus, engine = ray.cluster_resources().get("GPU", 0), config.engine
    device = engine_device(engine, gpus)
    engines = engine_ask(engine, device) if engines_on_ray(config) else None
    trainer = rank_ask(config.train, rank_device(config, gpus)) if ranks else None
    _refuse_short([ask for ask in (engines, trainer) if ask is not None])
    held = _take(groups, engines, _in_blocks(trainer, config.train.parallel) if trainer else [None])
    if engines:  # further ones may wait for machines
        groups += [_engine_group(engines) for _ in range(engine.count - engines.count)]
    what = engines.room if engines else ""
    note = None
    if held is not None:
        note = straddling(config.train.parallel, [machine for _, machine in rank_bundles(held)])
    return Reservations(tuple(Reservation(group, what, device) for group in groups if group is not held), held, note)


def _in_blocks(trainer: Ask, parallel: ParallelConfig) -> list[Ask | None]:
    """The ways to ask for the ranks, several in a block on one machine, of which the machines could hold all."""
    nodes = [node["Resources"] for node in named_nodes(ray_nodes()).values()]
    ways = [trainer.in_blocks(block) for block in rank_blocks(parallel)]
    return [way for way in ways if all(way.fits(resource, nodes) for resource in way.each)]


def _take(groups: list[PlacementGroup], engines: Ask | None, ways: Sequence[Ask | None]) -> PlacementGroup | None:
    """Reserve room for the engines, and for the ranks in the first of ``ways`` that there is room for; the ranks'
    group. All are noted in ``groups``. What wants more of a machine is reserved first."""
    for seconds, trainer in zip([*[_BLOCK_SECONDS] * (len(ways) - 1), _RESERVE_SECONDS], ways, strict=True):
        held = None
        for ask in sorted((ask for ask in (engines, trainer) if ask), key=lambda ask: -ask.largest):
            if ask is trainer:
                held = _rank_group(ask)
                groups.append(held)
            else:
                groups += [_engine_group(ask) for _ in range(ask.count)]
        if all(group.wait(seconds) for group in groups):
            return held
        if trainer is not ways[-1]:
            _remove(groups)
            groups.clear()
    raise UserError(
        "the Ray cluster has room for the run in all, and no machine enough of it for an engine, since other runs "
        "hold parts of each: wait for them to end, or start more nodes"
    )


def _refuse_short(asks: list[Ask]) -> None:
    """Raise UserError where the cluster has too little, or others hold what is asked for and don't give it back."""
    import ray

    deadline = time.monotonic() + FREE_SECONDS
    while True:
        nodes = {name: node["Resources"] for name, node in named_nodes(ray_nodes()).items()}
        if (reason := shortage(asks, nodes, ray.available_resources())) is None:
            return
        if time.monotonic() > deadline or shortage(asks, nodes) is not None:
            raise UserError(reason)
        time.sleep(1.0)


def _engine_group(ask: Ask) -> PlacementGroup:
    """Room for one engine: a bundle on each of its machines."""
    from ray.util.placement_group import placement_group

    return placement_group([dict(ask.each)] * ask.nodes, strategy="STRICT_SPREAD" if ask.nodes > 1 else "STRICT_PACK")


def _rank_group(ask: Ask) -> PlacementGroup:
    """Room for the trainer: bundles, each of which lies on one machine, on as few machines as have them."""
    from ray.util.placement_group import placement_group

    return placement_group([dict(ask.each)] * ask.count, strategy="PACK")


def _remove(groups: list[PlacementGroup]) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    for group in groups if ray.is_initialized() else ():
        remove_placement_group(group)
