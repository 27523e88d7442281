"""A run's reservations on a Ray cluster: one connection, a placement group per engine and one for all trainer ranks.

Everything is reserved before anything starts. What takes most of a node is reserved first: an engine needs several
GPUs of one node, and ranks fill the rest. A reservation outlives an engine or a rank that dies, so that it can restart
there; Ray moves it to another node when its own is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_rl.config import EngineConfig, ParallelConfig
from agent_rl.controller.cluster_resources import (
    ClusterRequest,
    ResourceRequest,
    engine_request,
    in_words,
    rank_request,
    shortage,
)
from agent_rl.engine.ray_servers import Reservation
from agent_rl.errors import TrainerError, UserError
from agent_rl.train.parallel_checks import cross_node_groups, node_block_sizes
from agent_rl.train.ray_launch import worker_bundles, worker_device
from agent_rl.train.ray_session import ray_session
from agent_rl.utils.concurrency import shielded
from sandbox.ray.backend import named_nodes, ray_nodes

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

FREE_SECONDS = 30.0
"""How long a run that was killed just before may take to release its resources."""
_RESERVE_SECONDS = 60.0
_BLOCK_SECONDS = 5.0
"""How long Ray may take to find nodes for ranks in blocks, before smaller blocks are tried."""


@dataclass(frozen=True, slots=True)
class Reservations:
    """A run's reservations: one per engine, and one for all ranks. Empty where none is on Ray.

    ``note``: which rank groups span several nodes, in one line; None where none does.
    """

    engines: tuple[Reservation, ...] = ()
    ranks: PlacementGroup | None = None
    note: str | None = None


def open_ray(cluster: ClusterRequest) -> AbstractAsyncContextManager[None]:
    """The run's one connection to Ray. A Ray that it starts itself has CPUs for the ranks and the engines."""
    return ray_session(cluster.train.ray_address, cpus=cluster.local_cpus)


@asynccontextmanager
async def open_reservations(cluster: ClusterRequest, *, ranks: bool) -> AsyncIterator[Reservations]:
    """Connect to Ray where the run needs it, and reserve what its engines and, with ``ranks``, its trainer take there.
    Raises UserError, one line, where Ray has too little."""
    if not (cluster.connects_first if ranks else cluster.engines):
        yield Reservations()
        return
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_ray(cluster))
        groups: list[PlacementGroup] = []
        stack.push_async_callback(lambda: shielded(asyncio.to_thread(_remove, groups)))
        yield await shielded(asyncio.to_thread(_reserve, cluster, groups, ranks=ranks))


def engine_device(engine: EngineConfig, gpus: float) -> str:
    """``cuda`` or ``cpu``: as configured; by ``auto``, cuda on a cluster with GPUs."""
    return engine.device if engine.device != "auto" else "cuda" if gpus else "cpu"


@dataclass(frozen=True, slots=True)
class EngineNode:
    """A node that engines may run on. ``resources``: its GPUs or CPUs, in words."""

    name: str
    id: str
    resources: str


async def find_placement(cluster: ClusterRequest) -> tuple[str | None, list[EngineNode]]:
    """Why the connected cluster has too little for the run, in one line (None: it has enough), and the nodes that its
    engines may run on."""
    return await asyncio.to_thread(_find_placement, cluster)


def _find_placement(cluster: ClusterRequest) -> tuple[str | None, list[EngineNode]]:
    by_name = named_nodes(ray_nodes())
    resources = {name: node["Resources"] for name, node in by_name.items()}
    gpus = sum(amounts.get("GPU", 0) for amounts in resources.values())
    device = engine_device(cluster.engine, gpus)
    try:
        requests = [engine_request(cluster.engine, device), _rank_request(cluster, gpus)]
    except TrainerError as error:
        return str(error), []
    kind = "GPU" if device == "cuda" else "CPU"
    engine_nodes = [
        EngineNode(name, by_name[name]["NodeID"], in_words({kind: amounts[kind]}))
        for name, amounts in resources.items()
        if amounts.get(kind)
    ]
    return shortage(requests, resources), engine_nodes


def _rank_request(cluster: ClusterRequest, gpus: float) -> ResourceRequest:
    return rank_request(cluster.train, worker_device(cluster.train, cluster.hardware.gpu_memory_gb, gpus))


def _reserve(cluster: ClusterRequest, groups: list[PlacementGroup], *, ranks: bool) -> Reservations:
    """Reserve everything and append the placement groups to ``groups``. Blocks."""
    import ray

    gpus, engine = ray.cluster_resources().get("GPU", 0), cluster.engine
    device = engine_device(engine, gpus)
    engines = engine_request(engine, device) if cluster.engines else None
    trainer = _rank_request(cluster, gpus) if ranks else None
    _refuse_shortage([request for request in (engines, trainer) if request is not None])
    parallel = cluster.train.parallel
    rank_group = _reserve_groups(groups, engines, _block_requests(trainer, parallel) if trainer else [None])
    if engines:  # engines beyond engine.min_count may wait for nodes
        groups += [_engine_group(engines) for _ in range(engine.count - engines.count)]
    description = engines.group_in_words if engines else ""
    note = None
    if rank_group is not None:
        note = cross_node_groups(parallel, [node for _, node in worker_bundles(rank_group)])
    reserved = tuple(Reservation(group, description, device) for group in groups if group is not rank_group)
    return Reservations(reserved, rank_group, note)


def _block_requests(trainer: ResourceRequest, parallel: ParallelConfig) -> list[ResourceRequest | None]:
    """The requests for all ranks, in blocks on one node, that the nodes could satisfy; largest blocks first."""
    nodes = [node["Resources"] for node in named_nodes(ray_nodes()).values()]
    requests = [trainer.in_blocks(block) for block in node_block_sizes(parallel)]
    return [request for request in requests if all(request.fits(resource, nodes) for resource in request.per_node)]


def _reserve_groups(
    groups: list[PlacementGroup], engines: ResourceRequest | None, rank_requests: Sequence[ResourceRequest | None]
) -> PlacementGroup | None:
    """Reserve for the engines and for the first of ``rank_requests`` that fits; return the ranks' group. All groups are
    appended to ``groups``. The request that takes most of a node is reserved first."""
    timeouts = [*[_BLOCK_SECONDS] * (len(rank_requests) - 1), _RESERVE_SECONDS]
    for seconds, trainer in zip(timeouts, rank_requests, strict=True):
        rank_group = None
        requests = [request for request in (engines, trainer) if request]
        for request in sorted(requests, key=lambda request: -request.largest):
            if request is trainer:
                rank_group = _rank_group(request)
                groups.append(rank_group)
            else:
                groups += [_engine_group(request) for _ in range(request.count)]
        if all(group.wait(seconds) for group in groups):
            return rank_group
        if trainer is not rank_requests[-1]:
            _remove(groups)
            groups.clear()
    raise UserError(
        "the Ray cluster has enough resources in total, but no single node has enough free for one engine: other runs "
        "use parts of each node; wait for them to end, or start more nodes"
    )


def _refuse_shortage(requests: list[ResourceRequest]) -> None:
    """Raise UserError where the cluster has too little, or other runs do not release what is missing in 30 s."""
    import ray

    deadline = time.monotonic() + FREE_SECONDS
    while True:
        nodes = {name: node["Resources"] for name, node in named_nodes(ray_nodes()).items()}
        if (reason := shortage(requests, nodes, ray.available_resources())) is None:
            return
        if time.monotonic() > deadline or shortage(requests, nodes) is not None:
            raise UserError(reason)
        time.sleep(1.0)


def _engine_group(request: ResourceRequest) -> PlacementGroup:
    """The placement group of one engine: a bundle on each of its nodes."""
    from ray.util.placement_group import placement_group

    strategy = "STRICT_SPREAD" if request.nodes > 1 else "STRICT_PACK"
    return placement_group([dict(request.per_node)] * request.nodes, strategy=strategy)


def _rank_group(request: ResourceRequest) -> PlacementGroup:
    """The placement group of the trainer: one bundle per block of ranks, on as few nodes as possible."""
    from ray.util.placement_group import placement_group

    return placement_group([dict(request.per_node)] * request.count, strategy="PACK")


def _remove(groups: list[PlacementGroup]) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    for group in groups if ray.is_initialized() else ():
        remove_placement_group(group)
