"""The trainer's workers as the driver sees them: it starts, calls and stops all of them together.

Every call goes to all workers at once, because they meet in collectives. A worker that fails or dies leaves the others
waiting there, so the first failure ends the group: later calls raise the same reason. An engine that refuses weights
(WeightSyncError) does not end the group.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from agent_rl.config import TrainConfig
from agent_rl.errors import AgentRlError, TrainerDied, TrainerError, UserError, WeightSyncError
from agent_rl.train.ray_launch import start_actors
from agent_rl.train.ray_session import check_ray
from agent_rl.train.requests import OptimizerSpec, WorkerDevice, WorkerRequest
from agent_rl.train.route_sharding import WorkerInfo
from agent_rl.utils.concurrency import restore_sigterm, run_alongside, shielded

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorProxy
    from ray.util.placement_group import PlacementGroup

    from agent_rl.train.actor import WorkerActor

T = TypeVar("T")

GIB = 1 << 30

START_SECONDS = 600.0
"""The start fails after this time without progress in reading weights."""
LOADING_SECONDS = 10.0
"""Time between two progress lines while workers read weights."""
CALL_SECONDS = 6 * 3600.0
DEATH_SECONDS = 5.0
"""How long to wait for the report of a death: workers that waited for the dead one often fail before Ray reports it."""


class WorkerGroup:
    """The worker actors, by rank. ``infos``: their positions, once they are started. ``ray`` closes the connection to
    Ray; another group may use the same one. ``placement_group``: the reservation of the workers, or None."""

    def __init__(self, ray: ExitStack, placement_group: PlacementGroup | None = None) -> None:
        self.infos: list[WorkerInfo] = []
        self._actors: list[ActorProxy[WorkerActor]] = []
        self._ray, self._placement_group = ray, placement_group
        self._ended: TrainerError | None = None

    async def launch(self, train: TrainConfig, planned_gpu_gb: float | None) -> WorkerDevice:
        """Start Ray and the actors, on the device that is returned. Raises TrainerError or UserError."""
        if train.ray_address is not None:
            await check_ray(train.ray_address)

        def start() -> WorkerDevice:
            self._actors, device = start_actors(train, planned_gpu_gb, self._ray, self._placement_group)
            return device

        # Shielded: after a cancelled start a thread would go on to start processes without an owner.
        device = await shielded(asyncio.to_thread(start))
        restore_sigterm()
        return device

    async def start(self, request: WorkerRequest, optimizer: OptimizerSpec, note: Callable[[str], None]) -> None:
        """Build the model in each actor. ``note`` receives lines about the progress and the kernels. Raises
        TrainerError or UserError."""
        meeting, *_ = await gather_results([actor.rendezvous.remote() for actor in self._actors], START_SECONDS)
        calls = [actor.start.remote(request, optimizer, rank, meeting) for rank, actor in enumerate(self._actors)]
        self.infos = await self._started(calls, note)
        for line in self.infos[0].notes:
            note(line)

    async def _started(self, calls: Sequence[ObjectRef[WorkerInfo]], note: Callable[[str], None]) -> list[WorkerInfo]:
        """The positions of all workers. Raises TrainerError after :data:`START_SECONDS` without progress."""
        try:
            async with asyncio.timeout(START_SECONDS) as limit, run_alongside(self._watch_loading(limit, note)):
                return await gather_results(calls, CALL_SECONDS)
        except TimeoutError:
            raise TrainerError(f"the trainer did not start: no rank read weights for {START_SECONDS:g} s") from None

    async def _watch_loading(self, limit: asyncio.Timeout, note: Callable[[str], None]) -> None:
        """Report the progress of reading weights, and extend ``limit`` while there is some."""
        loop, before = asyncio.get_running_loop(), 0
        while True:
            await asyncio.sleep(LOADING_SECONDS)
            progress = await gather_results([actor.loading.remote() for actor in self._actors], CALL_SECONDS)
            read, needed = sum(item.read for item in progress), sum(item.needed for item in progress)
            if read > before:
                limit.reschedule(loop.time() + START_SECONDS)
                note(loading_message(read, needed, (read - before) / LOADING_SECONDS))
            before = read

    async def call(
        self, call: Callable[[ActorProxy[WorkerActor]], ObjectRef[T]], *, timeout: float = CALL_SECONDS
    ) -> list[T]:
        """Make the same call on every worker; the results by rank. Raises as :func:`gather_results`."""
        return await self.call_each(lambda actor, _: call(actor), timeout=timeout)

    async def call_each(
        self, call: Callable[[ActorProxy[WorkerActor], WorkerInfo], ObjectRef[T]], *, timeout: float = CALL_SECONDS
    ) -> list[T]:
        """As :meth:`call`, with different arguments for each worker."""
        self.check_running()
        try:
            return await gather_results([call(*each) for each in zip(self._actors, self.infos, strict=True)], timeout)
        except AgentRlError as error:
            if not isinstance(error, WeightSyncError):
                self._end(error)
            raise

    async def written(self) -> tuple[int, ...]:
        """Wait until every worker's checkpoint is on the disk; the checksums of the files. Workers do not wait for each
        other here, so only the death of a worker ends the group."""
        try:
            return tuple(await gather_results([actor.written.remote() for actor in self._actors], CALL_SECONDS))
        except TrainerDied as error:
            self._end(error)
            raise

    def put(self, value: T) -> ObjectRef[T]:
        """Put a value into Ray's object store; calls take the reference."""
        import ray

        self.check_running()  # ray.put without a connection would start a new Ray
        return ray.put(value)

    def check_running(self) -> None:
        """Raises TrainerError with the reason where the group was not started or has ended, TrainerDied where a worker
        died."""
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))
        if not self.infos:
            raise TrainerError("the trainer was not started")

    def end(self, reason: str) -> None:
        """Refuse all further calls with ``reason``. An earlier reason stays."""
        self._end(TrainerError(reason))

    def _end(self, error: AgentRlError) -> None:
        error = error if isinstance(error, TrainerError) else TrainerError(str(error))
        self._ended = self._ended or error

    def kill(self) -> None:
        """End the actors; blocks. Idempotent."""
        import ray

        actors: list[Any] = list(self._actors)  # Ray's types do not allow ray.kill of a proxy
        self._actors = []
        for actor in actors:
            ray.kill(actor)


def loading_message(read: int, needed: int, rate: float) -> str:
    """The progress line. ``read`` and ``needed`` in bytes over all workers, ``rate`` in bytes per second."""
    return f"reading weights: {read / GIB:.1f} of {needed / GIB:.1f} GiB, {rate / GIB:.2f} GiB/s"


async def gather_results(calls: Sequence[ObjectRef[T]], timeout: float) -> list[T]:
    """The results, in order. Raises the first failure: an error of this package as it is, TrainerDied where a worker
    died, otherwise TrainerError; also TrainerError where no result came within ``timeout`` seconds."""
    from ray.exceptions import RayError

    pending = [asyncio.ensure_future(_result(call)) for call in calls]
    try:
        async with asyncio.timeout(timeout):
            return list(await asyncio.gather(*pending))
    except TimeoutError:
        raise TrainerError(f"the trainer did not answer within {timeout:g} s") from None
    except RayError as failure:
        cause = _cause(failure)
        # Errors other than these may follow from the death of another worker.
        if not isinstance(cause, UserError | WeightSyncError):
            cause = await _death(pending) or cause
        raise _converted(cause) from failure
    finally:
        for task in pending:
            task.cancel()


async def _result(call: ObjectRef[T]) -> T:
    return await call


async def _death(pending: Sequence[asyncio.Task[T]]) -> BaseException | None:
    """The death of a worker, if one of the calls reports it within :data:`DEATH_SECONDS`."""
    from ray.exceptions import RayActorError

    with suppress(TimeoutError):
        async with asyncio.timeout(DEATH_SECONDS):
            for task in asyncio.as_completed(pending):
                try:
                    await task
                except RayActorError as death:
                    return death
                except Exception:  # reported already, or a consequence of the death
                    continue
    return None


def _cause(failure: BaseException) -> BaseException:
    from ray.exceptions import RayTaskError

    return failure.cause if isinstance(failure, RayTaskError) else failure


def _converted(cause: BaseException) -> AgentRlError:
    from ray.exceptions import RayActorError

    if isinstance(cause, AgentRlError):
        return type(cause)(str(cause))
    if isinstance(cause, RayActorError):
        return TrainerDied(f"a trainer rank died: {_process_line(_one_line(cause))}")
    return TrainerError(f"a trainer rank failed: {type(cause).__name__}: {_one_line(cause)}")


def _process_line(message: str) -> str:
    """The dead process in Ray's message, or the whole message."""
    match = re.search(r"pid: (\d+) .*?ip: (\S+)", message)
    return f"process {match[1]} on {match[2]} was killed (for memory?) or crashed" if match else message


def _one_line(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:500]
