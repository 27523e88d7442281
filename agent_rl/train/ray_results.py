"""The ranks' answers: awaited together, with a deadline; what Ray raises becomes an error of ours, in one line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from agent_rl.errors import AgentRlError, TrainerDied, TrainerError, UserError, WeightSyncError

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")

DEATH_SECONDS = 5.0
"""How long a death may take to show: the ranks that waited for the dead one often fail before Ray knows of it."""


async def gather(calls: Sequence[ObjectRef[T]], timeout: float) -> list[T]:
    """The answers, in order. Raises the first failure: the rank's own where it is one of ours, TrainerDied where one
    died, else TrainerError, which also says that no answer came within ``timeout`` seconds."""
    from ray.exceptions import RayError

    answers = [asyncio.ensure_future(_answer(call)) for call in calls]
    try:
        async with asyncio.timeout(timeout):
            return list(await asyncio.gather(*answers))
    except TimeoutError:
        raise TrainerError(f"the trainer did not answer within {timeout:g} s") from None
    except RayError as failure:
        cause = _cause(failure)
        if not isinstance(cause, UserError | WeightSyncError):  # others may follow from the death of another rank
            cause = await _death(answers) or cause
        raise _converted(cause) from failure
    finally:
        for answer in answers:
            answer.cancel()


async def _answer(call: ObjectRef[T]) -> T:
    return await call


async def _death(answers: Sequence[asyncio.Task[T]]) -> BaseException | None:
    """That a rank died, where one of the answers says so soon."""
    from ray.exceptions import RayActorError

    with suppress(TimeoutError):
        async with asyncio.timeout(DEATH_SECONDS):
            for answer in asyncio.as_completed(answers):
                try:
                    await answer
                except RayActorError as death:
                    return death
                except Exception:  # another rank's, which is told already or follows from it
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
        return TrainerDied(f"a trainer rank died: {_what_died(_one_line(cause))}")
    return TrainerError(f"a trainer rank failed: {type(cause).__name__}: {_one_line(cause)}")


def _what_died(words: str) -> str:
    """Ray's words for a dead actor name its process, among much else."""
    found = re.search(r"pid: (\d+) .*?ip: (\S+)", words)
    return f"process {found[1]} on {found[2]} was killed (for memory?) or crashed" if found else words


def _one_line(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:500]
