"""The ranks' answers: awaited together, with a deadline; what Ray raises becomes an error of ours, in one line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from agent_rl.errors import AgentRlError, TrainerError

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")


async def gather(calls: Sequence[ObjectRef[T]], timeout: float) -> list[T]:
    """The answers, in order. Raises the first failure: the rank's own where it is one of ours, else TrainerError, which
    also says that no answer came within ``timeout`` seconds. ``__cause__`` is Ray's error."""
    from ray.exceptions import RayError

    try:
        async with asyncio.timeout(timeout):
            return list(await asyncio.gather(*calls))
    except TimeoutError:
        raise TrainerError(f"the trainer did not answer within {timeout:g} s") from None
    except RayError as failure:
        raise _converted(failure) from failure


def rank_died(error: AgentRlError) -> bool:
    """Whether an error of :func:`gather` is that a rank's process ended."""
    from ray.exceptions import RayActorError

    return isinstance(error.__cause__, RayActorError)


def _converted(failure: BaseException) -> AgentRlError:
    from ray.exceptions import RayActorError, RayTaskError

    cause = failure.cause if isinstance(failure, RayTaskError) else failure
    if isinstance(cause, AgentRlError):
        return type(cause)(str(cause))
    if isinstance(cause, RayActorError):
        return TrainerError(f"a trainer rank died: {_one_line(cause)}")
    return TrainerError(f"a trainer rank failed: {type(cause).__name__}: {_one_line(cause)}")


def _one_line(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:500]
