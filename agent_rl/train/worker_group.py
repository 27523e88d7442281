"""The trainer's ranks as the driver holds them: started together, called together, stopped together.

Every call reaches all ranks at once, since they meet in collectives. A rank that fails or dies leaves the others
waiting there, so the first failure ends the ranks: later calls raise the same reason. An engine that refuses weights
(WeightSyncError) is no such failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from agent_rl.config import RunConfig
from agent_rl.errors import AgentRlError, TrainerDied, TrainerError, WeightSyncError
from agent_rl.train.ray_launch import start_actors
from agent_rl.train.ray_results import gather
from agent_rl.train.ray_session import check_ray
from agent_rl.train.requests import OptimizerSpec, WorkerRequest
from agent_rl.train.route_sharding import RankInfo
from agent_rl.utils.concurrency import beside, shielded

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorProxy
    from ray.util.placement_group import PlacementGroup

    from agent_rl.train.actor import RankActor

T = TypeVar("T")

GIB = 1 << 30

START_SECONDS = 600.0
"""How long their start may go on without one of them reading weights."""
LOADING_SECONDS = 10.0
"""How often they are asked how far they are with reading."""
CALL_SECONDS = 6 * 3600.0


class Ranks:
    """The ranks' actors, in order. ``infos``: where each stands, once they are started. ``ray`` ends the connection to
    Ray that they need; other ranks may follow on it. ``room`` is reserved for them there, where it is not None."""

    def __init__(self, ray: ExitStack, room: PlacementGroup | None = None) -> None:
        self.infos: list[RankInfo] = []
        self._actors: list[ActorProxy[RankActor]] = []
        self._ray, self._room = ray, room
        self._ended: TrainerError | None = None

    async def start(self, config: RunConfig, optimizer: OptimizerSpec, note: Callable[[str], None]) -> None:
        """Start Ray and the actors, and build the model in each; ``note`` gets a line on how far the weights are read,
        and on the kernels. Raises TrainerError or UserError."""
        if config.train.ray_address is not None:
            await check_ray(config.train.ray_address)
        # Shielded: a cancelled start must not leave behind a thread that starts processes nobody owns.
        order = await shielded(asyncio.to_thread(self._launch, config))
        meeting, *_ = await gather([actor.rendezvous.remote() for actor in self._actors], START_SECONDS)
        calls = [actor.start.remote(order, optimizer, rank, meeting) for rank, actor in enumerate(self._actors)]
        self.infos = await self._started(calls, note)
        for line in self.infos[0].notes:
            note(line)

    async def _started(self, calls: Sequence[ObjectRef[RankInfo]], note: Callable[[str], None]) -> list[RankInfo]:
        """The answers; raises TrainerError where nothing was read for long and none came."""
        try:
            async with asyncio.timeout(START_SECONDS) as limit, beside(self._watch_loading(limit, note)):
                return await gather(calls, CALL_SECONDS)
        except TimeoutError:
            raise TrainerError(f"the trainer did not start: no rank read weights for {START_SECONDS:g} s") from None

    async def _watch_loading(self, limit: asyncio.Timeout, note: Callable[[str], None]) -> None:
        """Tell how far the ranks are with reading weights, as long as they read."""
        loop, before = asyncio.get_running_loop(), 0
        while True:
            await asyncio.sleep(LOADING_SECONDS)
            found = await gather([actor.loading.remote() for actor in self._actors], CALL_SECONDS)
            read, needed = sum(one.read for one in found), sum(one.needed for one in found)
            if read > before:
                limit.reschedule(loop.time() + START_SECONDS)
                note(loading_line(read, needed, (read - before) / LOADING_SECONDS))
            before = read

    def _launch(self, config: RunConfig) -> WorkerRequest:
        self._actors, order = start_actors(config, self._ray, self._room)
        return order

    async def call(
        self, call: Callable[[ActorProxy[RankActor]], ObjectRef[T]], *, timeout: float = CALL_SECONDS
    ) -> list[T]:
        """Make the same call to every rank; the answers by rank. Raises as
        :func:`agent_rl.train.ray_results.gather`."""
        return await self.call_each(lambda actor, _: call(actor), timeout=timeout)

    async def call_each(
        self, call: Callable[[ActorProxy[RankActor], RankInfo], ObjectRef[T]], *, timeout: float = CALL_SECONDS
    ) -> list[T]:
        """As :meth:`call`, with arguments of its own for each rank."""
        self.check_running()
        try:
            return await gather([call(*rank) for rank in zip(self._actors, self.infos, strict=True)], timeout)
        except AgentRlError as error:
            if not isinstance(error, WeightSyncError):
                self._end(error)
            raise

    async def written(self) -> tuple[int, ...]:
        """Wait until every rank's checkpoint is on the disk; the files' checksums. No rank waits for another here, so a
        failure ends the ranks only where one of them died."""
        try:
            return tuple(await gather([actor.written.remote() for actor in self._actors], CALL_SECONDS))
        except TrainerDied as error:
            self._end(error)
            raise

    def put(self, value: T) -> ObjectRef[T]:
        """Put a value into Ray's object store once, for calls to refer to."""
        import ray

        self.check_running()  # before Ray is touched: it would start a new one by itself
        return ray.put(value)

    def check_running(self) -> None:
        """Raises TrainerError, with the reason, where the ranks were not started or have ended; TrainerDied where one
        died."""
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))
        if not self.infos:
            raise TrainerError("the trainer was not started")

    def end(self, reason: str) -> None:
        """Refuse all further calls with ``reason``, or with an earlier one."""
        self._end(TrainerError(reason))

    def _end(self, error: AgentRlError) -> None:
        error = error if isinstance(error, TrainerError) else TrainerError(str(error))
        self._ended = self._ended or error

    def kill(self) -> None:
        """End the actors; blocks. Idempotent."""
        import ray

        actors: list[Any] = list(self._actors)  # Any: by Ray's types no proxy can be killed
        self._actors = []
        for actor in actors:
            ray.kill(actor)


def loading_line(read: int, needed: int, rate: float) -> str:
    """How far all ranks are with reading weights, in bytes, and how many they read a second."""
    return f"reading weights: {read / GIB:.1f} of {needed / GIB:.1f} GiB, {rate / GIB:.2f} GiB/s"
