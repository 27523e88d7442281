"""Engines on the machines of a Ray cluster: each has room reserved there, an actor on every machine of its room, and a
server beside each actor (:mod:`agent_rl.engine.ray_actor`).

When a machine is lost, Ray moves the room to another that has as much free, at once or when one joins; an engine that
is started again starts there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import Seat, at
from agent_rl.engine.ray_actor import Answer, Arrival, EngineHost, ServerRequest
from agent_rl.errors import EngineStartError
from agent_rl.utils.concurrency import first_leaf, shielded

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_PATIENCE_SECONDS = 20.0
"""How long an engine waits for its machines before a user is told."""
_STOP_SECONDS = 10.0
_LOOK_SECONDS = 180.0
"""How long a machine may take to start an actor, and to import what tells SGLang's release."""
_CALLS = 16


@dataclass(frozen=True, slots=True)
class Reservation:
    """What an engine reserved: a bundle of ``group`` on each of its machines. ``what`` says what that is in words;
    ``device``: cpu or cuda."""

    group: PlacementGroup
    what: str
    device: str


@dataclass(frozen=True, slots=True)
class _Place:
    """One machine of an engine: the actor's handle, and where it is."""

    actor: Any
    arrival: Arrival
    log: Path


class HostedServer:
    """One engine in its ``room``; a :class:`agent_rl.engine.supervisor.Server`.

    ``model`` is a checkpoint's directory on every machine. The servers' logs come to ``log`` (of an engine over several
    machines one beside it for each further one) when they have ended. ``tell`` is given a line when the engine waits
    for a machine, and when it got one.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Path,
        log: Path,
        room: Reservation,
        *,
        number: int,
        capture_routes: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._config = config.model_copy(update={"device": room.device, "count": 1})
        self._model, self._log, self._room, self._number = model.absolute(), log.absolute(), room, number
        self._capture, self._tell = capture_routes, tell
        self._places: list[_Place] = []
        self._actors: list[Any] = []
        self._watch: asyncio.Task[str] | None = None

    async def start(self) -> str:
        """Wait for the room, start the servers there and wait until they are healthy; the first one's address. What was
        started is ended if that fails. Raises EngineStartError, in a line that names the machine."""
        try:
            self._actors = await asyncio.to_thread(_start_actors, self._room)
            self._places = await self._arrived()
            url = await self._started()
        except BaseException:
            await self.stop()
            raise
        self._watch = asyncio.create_task(self._watched(), name=f"watch-{self._log.stem}")
        return url

    def death(self) -> str | None:
        """Why it is dead, in one line; None while it lives. Raises what the watch over it raised."""
        return self._watch.result() if self._watch is not None and self._watch.done() else None

    async def stop(self) -> None:
        """End all servers and actors. Idempotent."""
        await shielded(self._stop())

    async def _arrived(self) -> list[_Place]:
        """The actors' places, once the cluster has the room."""
        asked = [asyncio.ensure_future(_awaited(actor.arrive.remote())) for actor in self._actors]
        arriving = asyncio.gather(*asked)
        try:
            done, _ = await asyncio.wait([arriving], timeout=_PATIENCE_SECONDS)
            if not done:
                self._tell(f"{self._log.stem} waits for {self._room.what}: it is started when the Ray cluster has them")
            arrivals = await _unless_lost(arriving, "a machine that was to run it")
        finally:
            arriving.cancel()
        if not done:
            self._tell(f"{self._log.stem} is started on {', '.join(arrival.node for arrival in arrivals)}")
        names = [self._log, *(self._log.with_suffix(f".{rank}.log") for rank in range(1, len(arrivals)))]
        return [_Place(*place) for place in zip(self._actors, arrivals, names, strict=True)]

    async def _started(self) -> str:
        """Start all servers at once, since each waits for the others; the address of the first."""
        first = self._places[0].arrival
        seat = Seat(nodes=len(self._places), meeting=at(first.address, first.port))
        try:
            async with asyncio.TaskGroup() as starting:
                starts = [
                    starting.create_task(self._start_at(place, replace(seat, address=place.arrival.address, rank=rank)))
                    for rank, place in enumerate(self._places)
                ]
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from None
        return starts[0].result()

    async def _start_at(self, place: _Place, seat: Seat) -> str:
        order = ServerRequest(self._config, self._model, self._number, self._capture, seat, place.log)
        answer: Answer = await _unless_lost(place.actor.start.remote(order), f"the machine {place.arrival.node}")
        if answer.fault:
            raise EngineStartError(f"{place.arrival.node}: {answer.fault}")
        return answer.text

    async def _watched(self) -> str:
        """Wait for the first server that ends; why."""
        endings = [asyncio.create_task(self._ended(place)) for place in self._places]
        try:
            done, _ = await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for ending in endings:
                ending.cancel()

    async def _ended(self, place: _Place) -> str:
        try:
            reason: str = await _unless_lost(place.actor.ended.remote(place.log), f"the machine {place.arrival.node}")
        except EngineStartError as error:
            return str(error)
        return f"{place.arrival.node}: {reason}"

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        places = {id(place.actor): place for place in self._places}
        await asyncio.gather(*(_end(actor, places.get(id(actor))) for actor in self._actors))
        self._actors, self._places = [], []


async def look_at_hosts(config: EngineConfig, model: Path, nodes: Sequence[str]) -> list[Answer]:
    """What each node of the Ray cluster, by its id, has of what a server takes."""
    actors, directory = await asyncio.to_thread(_start_on, nodes), await asyncio.to_thread(model.absolute)
    try:
        return await asyncio.gather(*(_looked(actor.look.remote(config, directory)) for actor in actors))
    finally:
        await asyncio.gather(*(_end(actor, None) for actor in actors))


async def _looked(call: Any) -> Answer:
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            answer: Answer = await _unless_lost(call, "the machine")
            return answer
    except TimeoutError:
        return Answer(fault=f"no answer within {_LOOK_SECONDS:g} s")
    except EngineStartError as error:
        return Answer(fault=str(error))


def _start_actors(room: Reservation) -> list[Any]:
    """An actor in every bundle of ``room``, with all that is reserved there. Blocking."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return [
        _actor_class()
        .options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(room.group, placement_group_bundle_index=index),
        )
        .remote()
        for index, bundle in enumerate(room.group.bundle_specs)
    ]


def _start_on(nodes: Sequence[str]) -> list[Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    return [_actor_class().options(num_cpus=0, scheduling_strategy=strategy).remote() for strategy in strategies]


def _actor_class() -> Any:
    import ray

    options: dict[str, Any] = {"max_restarts": 0, "max_concurrency": _CALLS}  # Ray's types lack the last
    return ray.remote(**options)(EngineHost)


async def _unless_lost(call: Any, who: str) -> Any:
    """What ``call`` answers. Raises EngineStartError where ``who`` is gone."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await call
    except RayTaskError:
        raise  # a mistake in this program, whose traceback it has
    except RayError as error:
        reason = str(error).strip().splitlines()[-1].strip()  # the first ones name Ray's ids
        raise EngineStartError(f"{who} is lost: {reason[:200]}") from None


async def _awaited(call: Any) -> Any:
    return await call


async def _end(actor: Any, place: _Place | None) -> None:
    """End the server of ``actor``, and it; an actor that does not answer is ended as it is."""
    import ray
    from ray.exceptions import RayError

    try:
        with suppress(RayError, TimeoutError):
            if place is not None:
                async with asyncio.timeout(_STOP_SECONDS):
                    await asyncio.to_thread(_write, place.log, await actor.stop.remote())
    finally:
        await asyncio.to_thread(ray.kill, actor)


def _write(log: Path, text: bytes) -> None:
    """Keep a log here, and that of the start before beside it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".before.log"))
    log.write_bytes(text)
