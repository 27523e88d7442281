"""A set of tools made from plain async functions: this package's, or those of an environment."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.schema import AsyncFunction, ToolFunction, check_nesting, nearest, tool_function
from tools.text import MAX_CHARS, clip
from tools.types import ToolCall, ToolDefinitionError, ToolError, ToolResult


class FunctionToolSet:
    """Offers async functions or bound methods as tools under their names. Implements :class:`tools.types.ToolSet`.

    A function returns a string or a :class:`ToolResult`. A :class:`ToolError` becomes a ``failed`` result with its
    message; any other exception (a broken sandbox, a bug) propagates. Results are limited to ``max_chars`` characters;
    longer ones keep head and tail.
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
        """The public async methods of ``source``, in the order of their definition."""
        names = [name for kind in reversed(type(source).__mro__) for name in vars(kind) if not name.startswith("_")]
        methods = (getattr(source, name) for name in dict.fromkeys(names))
        return cls([method for method in methods if inspect.iscoroutinefunction(method)], max_chars=max_chars)

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """OpenAI function schemas, in the order of the functions."""
        return [tool.schema() for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> ToolResult:
        """Run ``call``. A wrong name or argument gives a ``failed`` result of one line."""
        try:
            tool = self._tools.get(call.name)
            if tool is None:
                raise ToolError(f"there is no tool {call.name!r}{nearest(call.name, self._tools, 'tools')}")
            check_nesting(call.arguments)
            result = await tool.function(**tool.bind(call.arguments))
        except ToolError as error:
            return ToolResult(clip(str(error), self._max_chars), failed=True)
        if isinstance(result, str):
            return ToolResult(clip(result, self._max_chars))
        if not isinstance(result, ToolResult):
            raise TypeError(f"tool {call.name} returned a {type(result).__name__}, not a string or a ToolResult")
        return ToolResult(clip(result.text, self._max_chars), result.submitted, result.failed)
