"""Whether an environment keeps its protocol, found on one task. Every violation is one line for its author."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from envs.grades import checked_grade, weighted
from envs.types import Dialogue, Environment, EnvsError, Episode, Grade, ProtocolError, Task, target_of
from sandbox import SandboxError
from tools import ToolCall, ToolDefinitionError, ToolResult


async def try_first_task(env: Environment, split: str, weights: Mapping[str, float]) -> None:
    """Start the first task of ``split``, give its episode a wrong turn, and grade it. ``weights``: of the reward's
    parts.

    Raises ProtocolError, one line, for a violation and for any unexpected exception of the environment; SandboxError
    or GradingError if the infrastructure failed.
    """
    try:
        await awaited(env.prepare(split), "prepare")
        task = tasks_of(env, split)[0]
        async with started(env, task) as episode:
            check_messages(episode)
            await wrong_turn(episode)
            weighted(await grade(episode), weights)
    except (EnvsError, SandboxError, ToolDefinitionError):
        raise
    except Exception as error:
        raise ProtocolError(located(error)) from error


def located(error: Exception) -> str:
    """An unexpected exception and the place where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def tasks_of(env: Environment, split: str) -> Sequence[Task]:
    """The tasks of ``split``, at least one."""
    tasks = env.tasks(split)
    if not isinstance(tasks, Sequence) or not tasks:
        found = "no tasks" if isinstance(tasks, Sequence) else f"a {type(tasks).__name__}"
        raise ProtocolError(f"tasks({split!r}) returned {found}; expected a list of at least one Task")
    for task in tasks:
        if not isinstance(task, Task):
            raise ProtocolError(f"tasks({split!r}) returned a {type(task).__name__} in its list; expected Task objects")
        if task.env != env.name:
            raise ProtocolError(f"task {task.id!r} has env {task.env!r}, but the environment is {env.name!r}")
    return tasks


@asynccontextmanager
async def started(env: Environment, task: Task) -> AsyncIterator[Episode | Dialogue]:
    """``env.start(task)``, and the members that its episode needs."""
    context: Any = env.start(task)
    if not hasattr(context, "__aenter__"):
        if inspect.iscoroutine(context):
            context.close()
        raise ProtocolError(
            f"start returned a {type(context).__name__}; decorate it with contextlib.asynccontextmanager and yield the "
            "episode"
        )
    async with context as episode:
        missing = [name for name in ("messages", "grade") if not hasattr(episode, name)]
        missing += [] if hasattr(episode, "tools") or hasattr(episode, "respond") else ["tools or respond"]
        if missing:
            raise ProtocolError(f"the episode, a {type(episode).__name__}, lacks {' and '.join(missing)}")
        yield episode


def check_messages(episode: Episode | Dialogue) -> Sequence[str]:
    """The roles of the initial messages."""
    messages = episode.messages
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ProtocolError(f"messages is a {type(messages).__name__}; expected a list of role and content")
    for message in messages:
        texts = isinstance(message, Mapping) and [message.get("role"), message.get("content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ProtocolError(
                f'messages has {str(message)[:60]!r}; expected {{"role": "user", "content": TEXT}}, with strings'
            )
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise ProtocolError(f"the initial messages are {roles}: one must be of the user")
    return roles


async def wrong_turn(episode: Episode | Dialogue) -> str:
    """The result of an empty turn, or of calls of an unknown tool and with an unknown argument."""
    if isinstance(episode, Dialogue):
        await result_of(episode.respond(""), "respond")
    tools = target_of(episode)
    if isinstance(tools, Dialogue):
        return "an empty turn"
    result = await result_of(tools.call(ToolCall("no_such_tool", {})), "tools.call")
    if not result.failed:
        raise ProtocolError("a call of an unknown tool must return a failed result")
    name = tools.schemas()[0]["function"]["name"]
    await result_of(tools.call(ToolCall(name, {"no_such_argument": 1})), "tools.call")
    return result.text[:80]


async def grade(episode: Episode | Dialogue) -> Grade:
    """The episode's grade."""
    return checked_grade(await awaited(episode.grade(), "grade"))


async def result_of(call: Awaitable[Any], name: str) -> ToolResult:
    """The ToolResult of ``call``, of the method ``name``."""
    result = await awaited(call, name)
    if not isinstance(result, ToolResult):
        raise ProtocolError(f"{name} returned a {type(result).__name__}, not a ToolResult")
    return result


async def awaited(call: Any, name: str) -> Any:
    """What ``call``, of the method ``name``, gives when it is awaited."""
    if not inspect.isawaitable(call):
        raise ProtocolError(f"{name} returned a {type(call).__name__} at once: define it with async def")
    return await call
