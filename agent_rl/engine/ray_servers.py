"""Engines on the nodes of a Ray cluster. Each engine has a reservation (a placement group), and on every node of it an
actor that runs a server (:mod:`agent_rl.engine.ray_actor`).

When a node is lost, Ray moves the reservation to another node with enough free resources, at once or when one joins. A
restarted engine starts there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import ServerNode, host_port
from agent_rl.engine.ray_actor import ActorLocation, CallResult, EngineActor, ServerRequest
from agent_rl.errors import EngineStartError
from agent_rl.utils.concurrency import first_error, shielded

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_NOTIFY_SECONDS = 20.0
"""How long an engine waits for its nodes before the user is notified."""
_STOP_SECONDS = 10.0
_CHECK_SECONDS = 180.0
"""How long a node may take to start an actor and import what reads SGLang's release."""
_MAX_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class Reservation:
    """An engine's reservation: one bundle of ``group`` per node. ``description``: its resources in words;
    ``device``: cpu or cuda."""

    group: PlacementGroup
    description: str
    device: str


@dataclass(frozen=True, slots=True)
class _EngineNode:
    """One node of an engine: its actor, the actor's location, and the path of its log."""

    actor: Any
    location: ActorLocation
    log: Path


class RayEngineServer:
    """One engine in its ``reservation``; implements :class:`agent_rl.engine.types.Server`.

    ``model`` is a checkpoint's directory on every node. The servers' logs are copied to ``log`` (one more file per
    further node) when they have ended. ``notify`` receives a line when the engine waits for nodes, and when it got
    them.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Path,
        log: Path,
        reservation: Reservation,
        *,
        number: int,
        capture_routes: bool,
        notify: Callable[[str], None],
    ) -> None:
        self._config = config.model_copy(update={"device": reservation.device, "count": 1})
        self._key = config.api_key
        self._model, self._log, self._reservation, self._number = model.absolute(), log.absolute(), reservation, number
        self._capture, self._notify = capture_routes, notify
        self._nodes: list[_EngineNode] = []
        self._actors: list[Any] = []
        self._watch: asyncio.Task[str] | None = None

    @property
    def gpus(self) -> Sequence[str]:
        return ()

    async def start(self) -> str:
        """Wait for the reservation, start the servers there and wait until they are healthy; returns the first one's
        address. A failed start stops what was started. Raises EngineStartError that names the node."""
        try:
            self._actors = await asyncio.to_thread(_start_actors, self._reservation)
            self._nodes = await self._locate_actors()
            url = await self._start_servers()
        except BaseException:
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._watch_servers(), name=f"watch-{self._log.stem}")
        return url

    def death(self) -> str | None:
        """Why the engine is dead, in one line; None while it runs. Raises what the watch raised."""
        return self._watch.result() if self._watch is not None and self._watch.done() else None

    async def stop(self) -> None:
        """Stop all servers and actors. Idempotent."""
        await shielded(self._stop())

    async def _locate_actors(self) -> list[_EngineNode]:
        """The actors' nodes, once the cluster has allocated the reservation."""
        calls = [asyncio.ensure_future(_awaited(actor.locate.remote())) for actor in self._actors]
        locating = asyncio.gather(*calls)
        try:
            done, _ = await asyncio.wait([locating], timeout=_NOTIFY_SECONDS)
            if not done:
                self._notify(f"{self._log.stem} waits until the Ray cluster has {self._reservation.description}")
            locations = await _unless_lost(locating, "a node of its reservation")
        finally:
            locating.cancel()
        if not done:
            self._notify(f"{self._log.stem} starts on {', '.join(location.node for location in locations)}")
        names = [self._log, *(self._log.with_suffix(f".{rank}.log") for rank in range(1, len(locations)))]
        return [_EngineNode(*fields) for fields in zip(self._actors, locations, names, strict=True)]

    async def _start_servers(self) -> str:
        """Start all servers at once, because each waits for the others; returns the address of the first."""
        first = self._nodes[0].location
        template = ServerNode(nodes=len(self._nodes), dist_init_addr=host_port(first.address, first.port))
        try:
            async with asyncio.TaskGroup() as starting:
                starts = [
                    starting.create_task(
                        self._start_on_node(node, replace(template, address=node.location.address, rank=rank))
                    )
                    for rank, node in enumerate(self._nodes)
                ]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return starts[0].result()

    async def _start_on_node(self, node: _EngineNode, server_node: ServerNode) -> str:
        request = ServerRequest(
            self._config, self._model, self._number, self._capture, server_node, node.log, self._key
        )
        result: CallResult = await _unless_lost(node.actor.start.remote(request), f"node {node.location.node}")
        if result.error:
            raise EngineStartError(f"{node.location.node}: {result.error}")
        return result.text

    async def _watch_servers(self) -> str:
        """Wait for the first server that ends; returns the reason."""
        endings = [asyncio.create_task(self._wait_dead(node)) for node in self._nodes]
        try:
            done, _ = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for ending in endings:
                ending.cancel()

    async def _wait_dead(self, node: _EngineNode) -> str:
        try:
            reason: str = await _unless_lost(node.actor.wait_dead.remote(node.log), f"node {node.location.node}")
        except EngineStartError as error:
            return str(error)
        return f"{node.location.node}: {reason}"

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        nodes = {id(node.actor): node for node in self._nodes}
        await asyncio.gather(*(_stop_actor(actor, nodes.get(id(actor))) for actor in self._actors))
        self._actors, self._nodes = [], []


async def check_nodes(config: EngineConfig, model: Path, nodes: Sequence[str]) -> list[CallResult]:
    """For each node of the Ray cluster, by its id: whether it has the checkpoint and SGLang."""
    actors, directory = await asyncio.to_thread(_start_actors_on, nodes), await asyncio.to_thread(model.absolute)
    try:
        return await asyncio.gather(*(_check_result(actor.check.remote(config, directory)) for actor in actors))
    finally:
        await asyncio.gather(*(_stop_actor(actor, None) for actor in actors))


async def _check_result(call: Any) -> CallResult:
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            result: CallResult = await _unless_lost(call, "the node")
            return result
    except TimeoutError:
        return CallResult(error=f"no response within {_CHECK_SECONDS:g} s")
    except EngineStartError as error:
        return CallResult(error=str(error))


def _start_actors(reservation: Reservation) -> list[Any]:
    """One actor per bundle of ``reservation``, with all of the bundle's resources. Blocking."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return [
        _actor_class()
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(reservation.group, placement_group_bundle_index=index),
        )
        .remote()
        for index, bundle in enumerate(reservation.group.bundle_specs)
    ]


def _start_actors_on(nodes: Sequence[str]) -> list[Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    return [_actor_class().options(num_cpus=0, scheduling_strategy=strategy).remote() for strategy in strategies]


def _actor_class() -> Any:
    import ray

    options: dict[str, Any] = {"max_restarts": 0, "max_concurrency": _MAX_CONCURRENCY}  # Ray's types lack the last
    return ray.remote(**options)(EngineActor)


async def _unless_lost(call: Any, who: str) -> Any:
    """The result of ``call``. Raises EngineStartError if ``who`` was lost."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await call
    except RayTaskError:
        raise  # a bug in this program, with its traceback
    except RayError as error:
        reason = str(error).strip().splitlines()[-1].strip()  # the first lines name Ray's ids
        raise EngineStartError(f"{who} is lost: {reason[:200]}") from None


async def _awaited(call: Any) -> Any:
    return await call


async def _stop_actor(actor: Any, node: _EngineNode | None) -> None:
    """Stop the server of ``actor`` and kill the actor. An actor that does not respond is killed directly."""
    import ray
    from ray.exceptions import RayError

    try:
        with suppress(RayError, TimeoutError):
            if node is not None:
                async with asyncio.timeout(_STOP_SECONDS):
                    await asyncio.to_thread(_store_log, node.log, await actor.stop.remote())
    finally:
        await asyncio.to_thread(ray.kill, actor)


def _store_log(log: Path, text: bytes) -> None:
    """Store a log here; the log of the start before is kept beside it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".before.log"))
    log.write_bytes(text)
