"""The small way to write an environment: a class whose object is one episode, its async methods the tools.

::

    class Sums:
        '''Work out the sum and answer it.'''             the system message; its first line is listed

        class Options(BaseModel):                         optional: the config's env.options, validated
            count: int = 100

        @classmethod
        def tasks(cls, split: str, options: Options) -> list[dict]:     one row a task, the same every time
            return [{"a": index, "b": 7} for index in range(options.count)]

        async def setup(self, task: Task) -> str:         called once; what it returns is the user's message
            self.total = task.record["a"] + task.record["b"]
            return f"{task.record['a']} + {task.record['b']}?"

        async def answer(self, number: int) -> str:       a tool: schema from the signature and this docstring
            '''Give the answer.'''
            self.given = number
            return "noted"

        async def grade(self) -> float:                   the reward, 1.0 and more counts as resolved; or a Grade
            return float(self.given == self.total)

        async def close(self) -> None: ...                optional: called at the end, also after a failure

        @classmethod
        def solution(cls, task: Task) -> list[ToolCall]: ...     optional: calls that solve it, for `--policy gold`

``__init__`` may take ``options`` and ``sandbox``, by name; one that takes a sandbox has a sandbox of its own each
episode.
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
from envs.types import EnvsError, Grade, Message, Task
from tools import FunctionToolSet, ToolCall, ToolDefinitionError, ToolResult, ToolSet

_NO_TOOLS = frozenset({"setup", "grade", "close", "tasks", "solution"})


class NoOptions(BaseModel):
    """The options of a class that names none."""


class ToolClassError(EnvsError):
    """A class, or the options it is given, that no environment can be made of: one line."""


@dataclass(frozen=True, slots=True)
class ToolEpisode:
    """One object of the class, set up."""

    messages: Sequence[Message]
    tools: ToolSet
    subject: Any

    async def grade(self) -> Grade:
        """What the object's own ``grade`` says; a number becomes a Grade. Raises TypeError for anything else."""
        grade = await self.subject.grade()
        if isinstance(grade, Grade):
            return grade
        if isinstance(grade, bool | int | float):
            return Grade(reward=float(grade), resolved=float(grade) >= 1.0)
        raise TypeError(f"{type(self.subject).__name__}.grade returned a {type(grade).__name__}, not a number or Grade")


def takes_sandbox(made: type[Any]) -> bool:
    """Whether the constructor of such a class asks for a sandbox."""
    return "sandbox" in _parameters(made)


def is_tool_class(made: Any) -> bool:
    """Whether ``made`` is such a class: it has ``tasks``, and async ``setup`` and ``grade``."""
    return (
        inspect.isclass(made)
        and hasattr(made, "tasks")
        and all(inspect.iscoroutinefunction(getattr(made, name, None)) for name in ("setup", "grade"))
    )


class ToolClassEnvironment:
    """Implements :class:`envs.types.Environment` over such a class. Raises ToolClassError for options it refuses."""

    def __init__(self, context: EnvContext, made: type[Any], name: str, options: Mapping[str, Any]) -> None:
        self._context, self._class, self._name = context, made, name
        self._options = _validated(made, name, options)
        self._takes = _constructor_takes(made, name)
        _check_tools(made, name)

    @property
    def name(self) -> str:
        return self._name

    async def prepare(self, *splits: str) -> None:
        """Make the rows of ``splits`` once, so that what is wrong with them is told before anything is started."""
        for split in splits:
            self.tasks(split)

    def tasks(self, split: str) -> Sequence[Task]:
        """The class' rows of ``split``; a row's ``id`` is the task's, else its place in the split."""
        rows = list(self._class.tasks(split, self._options))
        return [Task(str(row.get("id", f"{split}-{at}")), self._name, row) for at, row in enumerate(rows)]

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[ToolEpisode]:
        """Make an object, set it up, and close it at the end."""
        async with AsyncExitStack() as stack:
            given: dict[str, Any] = {"options": self._options} if "options" in self._takes else {}
            if "sandbox" in self._takes:
                given["sandbox"] = await stack.enter_async_context(self._context.sandbox(self._context.limits))
            subject = self._class(**given)
            if hasattr(subject, "close"):
                stack.push_async_callback(subject.close)
            opening = await subject.setup(task)
            yield ToolEpisode(self._messages(opening), tool_set(subject), subject)

    def gold(self, task: Task) -> str:
        """No patch: there is no repository. :meth:`solution` has the calls that solve a task."""
        return ""

    def solution(self, task: Task) -> Sequence[ToolCall]:
        """The calls that solve ``task``; none where the class tells none."""
        return list(self._class.solution(task)) if hasattr(self._class, "solution") else []

    def _messages(self, opening: str | Sequence[Message]) -> Sequence[Message]:
        if not isinstance(opening, str):
            return opening
        system = inspect.getdoc(self._class) or f"You are given a task of {self._name} and tools to solve it."
        return ({"role": "system", "content": system}, {"role": "user", "content": opening})


def tool_set(subject: Any) -> FunctionToolSet:
    """The public async methods of ``subject`` that are not the environment's own, and ``finish`` if it has none."""
    tools = [getattr(subject, name) for name in _tool_names(type(subject))]
    return FunctionToolSet(tools if hasattr(subject, "finish") else [*tools, finish])


async def finish(command: Literal["submit"] = "submit", result: str = "") -> ToolResult:
    """Say that you are done. Nothing can be changed afterwards. (R2E-Gym's name and arguments.)

    Args:
        command: Always submit.
        result: What you did, in a sentence.
    """
    return ToolResult("submitted", submitted=True)


def _tool_names(made: type[Any]) -> list[str]:
    names = [name for kind in reversed(made.__mro__) for name in vars(kind) if not name.startswith("_")]
    return [n for n in dict.fromkeys(names) if n not in _NO_TOOLS and inspect.iscoroutinefunction(getattr(made, n))]


def _check_tools(made: type[Any], name: str) -> None:
    """Every tool must have a schema: told when the environment is loaded, not in an episode."""
    if not _tool_names(made):
        raise ToolClassError(f"environment {name!r}: {made.__name__} has no tool: right would be a public async method")
    try:
        tool_set(object.__new__(made)).schemas()  # schemas need no constructor
    except ToolDefinitionError as error:
        raise ToolClassError(f"environment {name!r}: {made.__name__}: {error}") from None


def _validated(made: type[Any], name: str, options: Mapping[str, Any]) -> BaseModel:
    schema: type[BaseModel] = getattr(made, "Options", NoOptions)
    known = list(schema.model_fields)
    if unknown := [key for key in options if key not in known]:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"options: {', '.join(known) or 'none'}"
        raise ToolClassError(f"environment {name!r}: unknown option {unknown[0]!r}: {hint}")
    try:
        return schema.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ToolClassError(f"environment {name!r}: option {key!r}: {first['msg']}") from None


def _parameters(made: type[Any]) -> frozenset[str]:
    return frozenset() if made.__init__ is object.__init__ else frozenset(inspect.signature(made).parameters)


def _constructor_takes(made: type[Any], name: str) -> frozenset[str]:
    parameters = _parameters(made)
    if unknown := parameters - {"options", "sandbox"}:
        raise ToolClassError(
            f"environment {name!r}: {made.__name__}.__init__ takes {', '.join(sorted(unknown))}; it may take options "
            "and sandbox"
        )
    return parameters
