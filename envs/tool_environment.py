"""Environments as tool classes: an instance is one episode, its public async methods are the tools.

::

    class Sums:
        '''Work out the sum and answer it.'''             the system message; its first line is listed

        class Options(BaseModel):                         optional: validates the config's env.options
            count: int = 100

        @classmethod
        def tasks(cls, split: str, options: Options) -> list[dict]:     one row for each task, in a fixed order
            return [{"a": index, "b": 7} for index in range(options.count)]

        async def setup(self, task: Task) -> str:         called once; returns the user message
            self.total = task.record["a"] + task.record["b"]
            return f"{task.record['a']} + {task.record['b']}?"

        async def answer(self, number: int) -> str:       a tool: schema from the signature and this docstring
            '''Give the answer.'''
            self.given = number
            return "noted"

        async def grade(self) -> float:                   the reward; 1.0 or more counts as resolved. Or a Grade
            return float(self.given == self.total)

        async def respond(self, text: str) -> str:        optional: the user, who hears turns without a call

        async def close(self) -> None: ...                optional: called at the end, also on failure

        @classmethod
        def solution(cls, task: Task) -> list[ToolCall]: ...     optional: calls that solve the task (`--policy gold`)

``__init__`` may take ``options`` and ``sandbox`` by name. If it takes ``sandbox``, each episode gets its own sandbox.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from envs.context import EnvContext
from envs.types import EnvsError, Grade, Message, ProtocolError, Task
from tools import FunctionToolSet, ToolCall, ToolDefinitionError, ToolResult, ToolSet

_NOT_TOOLS = frozenset({"setup", "grade", "grade_group", "respond", "close", "tasks", "solution"})


class NoOptions(BaseModel):
    """The options of a class without ``Options``."""


class ToolClassError(EnvsError):
    """A tool class or options that cannot be used: one line for the user."""


@dataclass(frozen=True, slots=True)
class ToolEpisode:
    """One instance of the tool class, after ``setup``."""

    messages: Sequence[Message]
    tools: ToolSet
    instance: Any

    async def grade(self) -> Grade:
        """The result of the instance's ``grade``. A number becomes a Grade. Raises TypeError for other values."""
        return await _grade_of(self.instance)


class UserEpisode(ToolEpisode):
    """An instance with tools and a user."""

    async def respond(self, text: str) -> ToolResult:
        """The next message of the user, from the instance's ``respond``."""
        return await _next_message(self.instance, text)


@dataclass(frozen=True, slots=True)
class DialogueEpisode:
    """An instance with a user and without tools."""

    messages: Sequence[Message]
    instance: Any

    async def respond(self, text: str) -> ToolResult:
        """As :meth:`UserEpisode.respond`."""
        return await _next_message(self.instance, text)

    async def grade(self) -> Grade:
        """As :meth:`ToolEpisode.grade`."""
        return await _grade_of(self.instance)


async def _grade_of(instance: Any) -> Grade:
    grade = await instance.grade()
    if isinstance(grade, Grade):
        return grade
    if isinstance(grade, bool | int | float):
        return Grade(reward=float(grade), resolved=float(grade) >= 1.0)
    raise TypeError(f"{type(instance).__name__}.grade returned a {type(grade).__name__}, not a number or Grade")


async def _next_message(instance: Any, text: str) -> ToolResult:
    message = await instance.respond(text)
    if not isinstance(message, str | ToolResult):
        raise ProtocolError(
            f"{type(instance).__name__}.respond returned a {type(message).__name__}, not a text or ToolResult"
        )
    return ToolResult(message) if isinstance(message, str) else message


def takes_sandbox(cls: type[Any]) -> bool:
    """Whether the constructor of the tool class takes a sandbox."""
    return "sandbox" in _parameters(cls)


def is_tool_class(cls: Any) -> bool:
    """Whether ``cls`` is a tool class: it has ``tasks``, and async ``setup`` and ``grade``."""
    return (
        inspect.isclass(cls)
        and hasattr(cls, "tasks")
        and all(inspect.iscoroutinefunction(getattr(cls, name, None)) for name in ("setup", "grade"))
    )


class ToolClassEnvironment:
    """Implements :class:`envs.types.Environment` for a tool class. Raises ToolClassError for wrong options."""

    def __init__(self, context: EnvContext, cls: type[Any], name: str, options: Mapping[str, Any]) -> None:
        self._context, self._class, self._name = context, cls, name
        self._options = validate_options(cls, name, options)
        self._parameters = _check_constructor(cls, name)
        self._arguments = _check_tasks(cls, name)
        if hasattr(cls, "grade_group"):
            self.grade_group = cls.grade_group  # the optional method of the protocol GradesGroups
        _check_tools(cls, name)

    @property
    def name(self) -> str:
        return self._name

    async def prepare(self, *splits: str) -> None:
        """Create the rows of ``splits``, so that errors in them appear before the first episode."""
        for split in splits:
            self.tasks(split)

    def tasks(self, split: str) -> Sequence[Task]:
        """The class's rows of ``split``. A task's id is the row's ``id``, else ``SPLIT-INDEX``; a row may say
        ``noop_resolves`` (:class:`envs.Task`)."""
        rows = list(self._class.tasks(*(split, self._options)[: self._arguments]))
        for row in rows:
            self._expect(row, Mapping, "tasks", " in its list; expected dicts")
        return [
            Task(str(row.get("id", f"{split}-{index}")), self._name, row, bool(row.get("noop_resolves")))
            for index, row in enumerate(rows)
        ]

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[ToolEpisode | DialogueEpisode]:
        """Create an instance, set it up, and close it at the end."""
        async with AsyncExitStack() as stack:
            arguments: dict[str, Any] = {"options": self._options} if "options" in self._parameters else {}
            if "sandbox" in self._parameters:
                arguments["sandbox"] = await stack.enter_async_context(self._context.sandbox(self._context.limits))
            instance = self._class(**arguments)
            if hasattr(instance, "close"):
                stack.push_async_callback(instance.close)
            initial = await instance.setup(task)
            self._expect(initial, Sequence, "setup", "; expected the user message")
            yield self._episode(self._messages(initial), instance)

    def _episode(self, messages: Sequence[Message], instance: Any) -> ToolEpisode | DialogueEpisode:
        if not hasattr(instance, "respond"):
            return ToolEpisode(messages, tool_set(instance), instance)
        if not _tool_names(self._class):
            return DialogueEpisode(messages, instance)
        return UserEpisode(messages, tool_set(instance), instance)

    def gold(self, task: Task) -> str:
        """Empty: there is no repository to patch. :meth:`solution` returns the calls that solve a task."""
        return ""

    def solution(self, task: Task) -> Sequence[ToolCall | str]:
        """The turns that solve ``task``; empty if the class has no ``solution``."""
        return list(self._class.solution(task)) if hasattr(self._class, "solution") else []

    def _expect(self, value: object, kind: type[Any], method: str, expected: str) -> None:
        if not isinstance(value, kind):
            raise ProtocolError(f"{self._class.__name__}.{method} returned a {type(value).__name__}{expected}")

    def _messages(self, initial: str | Sequence[Message]) -> Sequence[Message]:
        if not isinstance(initial, str):
            return initial
        system = inspect.getdoc(self._class) or f"You are given a task of {self._name} and tools to solve it."
        return ({"role": "system", "content": system}, {"role": "user", "content": initial})


def tool_set(instance: Any) -> FunctionToolSet:
    """The public async methods of ``instance`` that are tools; plus ``finish`` if neither it nor a user ends the
    episode."""
    tools = [getattr(instance, name) for name in _tool_names(type(instance))]
    ends = hasattr(instance, "finish") or hasattr(instance, "respond")
    return FunctionToolSet(tools if ends else [*tools, finish])


async def finish(command: Literal["submit"] = "submit", result: str = "") -> ToolResult:
    """Say that you are done. Nothing can be changed afterwards. (R2E-Gym's name and arguments.)

    Args:
        command: Always submit.
        result: What you did, in a sentence.
    """
    return ToolResult("submitted", submitted=True)


def _tool_names(cls: type[Any]) -> list[str]:
    names = [name for kind in reversed(cls.__mro__) for name in vars(kind) if not name.startswith("_")]
    return [n for n in dict.fromkeys(names) if n not in _NOT_TOOLS and inspect.iscoroutinefunction(getattr(cls, n))]


def _check_tools(cls: type[Any], name: str) -> None:
    """Raise ToolClassError when the environment is loaded if a tool has no schema."""
    if hasattr(cls, "respond") and not inspect.iscoroutinefunction(cls.respond):
        raise ToolClassError(f"environment {name!r}: {cls.__name__}.respond has to be async: write async def")
    if not _tool_names(cls):
        if hasattr(cls, "respond"):
            return
        raise ToolClassError(
            f"environment {name!r}: {cls.__name__} has no tool and no user; expected a public async method"
        )
    try:
        tool_set(object.__new__(cls)).schemas()  # schemas need no constructor
    except ToolDefinitionError as error:
        raise ToolClassError(f"environment {name!r}: {cls.__name__}: {error}") from None


def validate_options(cls: type[Any], name: str, options: Mapping[str, Any]) -> BaseModel:
    schema: type[BaseModel] = getattr(cls, "Options", NoOptions)
    known = list(schema.model_fields)
    if unknown := [key for key in options if key not in known]:
        matches = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {matches[0]!r}?" if matches else f"options: {', '.join(known) or 'none'}"
        raise ToolClassError(f"environment {name!r}: unknown option {unknown[0]!r}: {hint}")
    try:
        return schema.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ToolClassError(f"environment {name!r}: option {key!r}: {first['msg']}") from None


def _check_tasks(cls: type[Any], name: str) -> int:
    """How many arguments the class's ``tasks`` takes: the split, and the options."""
    count = len(inspect.signature(cls.tasks).parameters)
    if isinstance(inspect.getattr_static(cls, "tasks"), classmethod | staticmethod) and count in (1, 2):
        return count
    raise ToolClassError(
        f"environment {name!r}: {cls.__name__}.tasks has to be a class method: @classmethod, "
        "def tasks(cls, split) or def tasks(cls, split, options)"
    )


def _parameters(cls: type[Any]) -> frozenset[str]:
    return frozenset() if cls.__init__ is object.__init__ else frozenset(inspect.signature(cls).parameters)


def _check_constructor(cls: type[Any], name: str) -> frozenset[str]:
    parameters = _parameters(cls)
    if unknown := parameters - {"options", "sandbox"}:
        raise ToolClassError(
            f"environment {name!r}: {cls.__name__}.__init__ takes {', '.join(sorted(unknown))}; it may take options "
            "and sandbox"
        )
    return parameters
