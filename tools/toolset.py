"""A set of tools made of plain async functions: this package's own, or those of an environment's author."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.errors import ToolDefinitionError, ToolError
from tools.schema import AsyncFunction, ToolFunction, check_levels, nearest, tool_function
from tools.text import MAX_CHARS, clip
from tools.types import ToolCall, ToolResult


class FunctionToolSet:
    """Offers async functions (or bound methods) as tools; the function's name is the tool's.

    A function returns a string or a :class:`ToolResult`. One that raises :class:`ToolError` answers a ``failed`` result
    with its message; any other exception is a broken sandbox or a bug and goes through. Answers are capped at
    ``max_chars`` characters, head and tail kept.
    """

    def __init__(self, functions: Iterable[AsyncFunction], *, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._tools: dict[str, ToolFunction] = {}
        for function in functions:
            tool = tool_function(function)
            if tool.name in self._tools:
                raise ToolDefinitionError(f"tool {tool.name}: two functions have this name")
            self._tools[tool.name] = tool

    @classmethod
    def from_object(cls, source: object, *, max_chars: int = MAX_CHARS) -> FunctionToolSet:
        """The public async methods of ``source``, in the order its class defines them."""
        names = [name for kind in reversed(type(source).__mro__) for name in vars(kind) if not name.startswith("_")]
        methods = (getattr(source, name) for name in dict.fromkeys(names))
        return cls([method for method in methods if inspect.iscoroutinefunction(method)], max_chars=max_chars)

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """OpenAI function schemas, in the order the functions were given."""
        return [tool.schema() for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> ToolResult:
        """Run ``call``. A wrong name or argument is a ``failed`` result of one line."""
        try:
            tool = self._tools.get(call.name)
            if tool is None:
                raise ToolError(f"there is no tool {call.name!r}{nearest(call.name, self._tools, 'tools')}")
            check_levels(call.arguments)
            answer = await tool.function(**tool.bind(call.arguments))
        except ToolError as error:
            return ToolResult(clip(str(error), self._max_chars), failed=True)
        if isinstance(answer, str):
            return ToolResult(clip(answer, self._max_chars))
        if not isinstance(answer, ToolResult):
            raise TypeError(f"tool {call.name} returned a {type(answer).__name__}, not a string or a ToolResult")
        return ToolResult(clip(answer.text, self._max_chars), answer.submitted, answer.failed)
