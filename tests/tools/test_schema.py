from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tools import FunctionToolSet, ToolCall, ToolDefinitionError, ToolError, ToolResult, tool_function
from tools.text import clip, split_lines


class Point(BaseModel):
    x: int


async def plot(
    kind: Literal["line", "bar"],
    points: list[int],
    title: str = "",
    width: float | None = None,
    grid: bool = False,
    at: Point | None = None,
) -> str:
    """Draw points.

    Second paragraph.

    Args:
        kind: The kind of plot,
            line or bar: as you like.
        points (list): What to draw.
        title: Its heading.

    Returns:
        nothing: to see here.
    """
    return f"{kind} {points!r} {title!r} {width!r} {grid!r} {at!r}"


TOOLS = FunctionToolSet([plot])


async def call(**arguments: Any) -> ToolResult:
    return await TOOLS.call(ToolCall("plot", arguments))


def test_schema_comes_from_signature_and_docstring() -> None:
    schema = tool_function(plot).schema()["function"]
    assert schema["name"] == "plot"
    assert schema["description"] == "Draw points.\n\nSecond paragraph."
    parameters = schema["parameters"]
    assert parameters["required"] == ["kind", "points"]
    properties = parameters["properties"]
    described = "The kind of plot, line or bar: as you like."
    assert properties["kind"] == {"type": "string", "enum": ["line", "bar"], "description": described}
    assert properties["points"] == {"type": "array", "items": {"type": "integer"}, "description": "What to draw."}
    assert properties["title"] == {"type": "string", "description": "Its heading.", "default": ""}
    assert properties["width"] == {"type": "number"}
    assert properties["grid"] == {"type": "boolean", "default": False}
    assert properties["at"] == {"$ref": "#/$defs/Point"}
    assert parameters["$defs"]["Point"]["properties"]["x"]["type"] == "integer"


async def test_strings_are_read_in_the_argument_s_type() -> None:
    as_text = await call(kind="bar", points="[1, 2]", title="3", width="1.5", grid="true", at='{"x": 7}')
    as_json = await call(kind="bar", points=[1, 2], title="3", width=1.5, grid=True, at={"x": 7})
    assert as_text == as_json == ToolResult("bar [1, 2] '3' 1.5 True Point(x=7)")


async def test_null_omits_an_optional_argument() -> None:
    assert (await call(kind="bar", points=[], title=None, grid=None)).text == "bar [] '' None False None"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"kind": "bar"}, "plot needs the argument 'points' (a list, each item an integer)"),
        ({"kind": "pie", "points": []}, "argument 'kind' must be one of line, bar, got 'pie'"),
        ({"kind": "bar", "points": [], "titel": ""}, "plot has no argument 'titel'; did you mean 'title'?"),
        ({"kind": "bar", "points": [], "q": ""}, "no argument 'q'; arguments: kind, points, title, width, grid, at"),
        ({"kind": "bar", "points": "1, 2"}, "argument 'points' must be a list, each item an integer, got '1, 2'"),
        ({"kind": "bar", "points": None}, "argument 'points' must be a list, each item an integer, got None"),
        ({"kind": "bar", "points": [], "width": "wide"}, "argument 'width' must be a number, got 'wide'"),
        ({"kind": "bar", "points": [], "title": 3}, "argument 'title' must be a string, got 3"),
        ({"kind": "bar", "points": [], "title": "a\0b"}, "argument 'title' holds a NUL character"),
        ({"kind": "bar", "points": [], "title": "\ud800"}, "argument 'title' holds half a surrogate pair"),
        ({"kind": "bar", "points": "[" * 100_000}, "argument 'points' must be a list"),
    ],
)
async def test_a_wrong_argument_is_reported_in_one_line(arguments: dict[str, Any], line: str) -> None:
    result = await call(**arguments)
    assert result.failed
    assert line in result.text
    assert "\n" not in result.text
    assert len(result.text) < 200


async def test_a_wrong_name_is_reported_in_one_line() -> None:
    near, far = await TOOLS.call(ToolCall("plott", {})), await TOOLS.call(ToolCall("x", {}))
    assert near == ToolResult("there is no tool 'plott'; did you mean 'plot'?", failed=True)
    assert far == ToolResult("there is no tool 'x'; tools: plot", failed=True)


class Calculator:
    """What an environment's author writes."""

    def __init__(self) -> None:
        self.total = 0

    async def add(self, number: int) -> str:
        """Add to the total."""
        self.total += number
        return str(self.total)

    async def divide(self, number: int) -> ToolResult:
        """Divide the total."""
        if number == 0:
            raise ToolError("division by zero; give another number")
        return ToolResult(str(self.total / number), submitted=True)

    async def crash(self) -> str:
        """Fail."""
        raise RuntimeError("a bug")

    async def _hidden(self) -> str:
        """Not a tool."""
        return ""

    def helper(self) -> None:
        """Not async, not a tool."""


async def test_the_async_methods_of_a_plain_class_are_tools() -> None:
    tools = FunctionToolSet.from_object(Calculator())
    assert [schema["function"]["name"] for schema in tools.schemas()] == ["add", "divide", "crash"]
    assert (await tools.call(ToolCall("add", {"number": "4"}))).text == "4"
    assert await tools.call(ToolCall("divide", {"number": 2})) == ToolResult("2.0", submitted=True)
    failed = await tools.call(ToolCall("divide", {"number": 0}))
    assert failed == ToolResult("division by zero; give another number", failed=True)
    with pytest.raises(RuntimeError, match="a bug"):
        await tools.call(ToolCall("crash", {}))


def test_a_function_that_cannot_be_a_tool_is_refused() -> None:
    def not_async() -> str:
        """Words."""
        return ""

    async def silent() -> str:
        return ""

    async def untyped(a) -> str:  # type: ignore[no-untyped-def]
        """Words."""
        return ""

    async def starred(*a: int) -> str:
        """Words."""
        return ""

    async def overdocumented(a: int) -> str:
        """Words.

        Args:
            b: Not there.
        """
        return ""

    reasons = {
        not_async: "must be an async function",
        silent: "needs a docstring",
        untyped: "argument 'a' needs a type",
        starred: "cannot be passed by name",
        overdocumented: "describes 'b'",
    }
    for function, reason in reasons.items():
        with pytest.raises(ToolDefinitionError, match=reason):
            tool_function(function)
    with pytest.raises(ToolDefinitionError, match="two functions have this name"):
        FunctionToolSet([plot, plot])


@given(text=st.text(), limit=st.integers(100, 300))
def test_clip_keeps_head_and_tail(text: str, limit: int) -> None:
    text = text * 20
    clipped = clip(text, limit)
    assert len(clipped) <= limit
    if len(text) <= limit:
        assert clipped == text
    else:
        kept = limit - 60
        assert clipped.startswith(text[: kept // 2])
        assert clipped.endswith(text[-(kept // 2) :])
        assert f"[... {len(text) - kept} characters left out ...]" in clipped


@given(text=st.text(st.sampled_from("a\n\r\x0b\x0c\u2028")))
def test_only_newlines_end_lines(text: str) -> None:
    lines = split_lines(text)
    assert "\n".join(lines) in (text, text.removesuffix("\n"))
    assert len(lines) == text.count("\n") + (not text.endswith("\n") and text != "")


async def test_a_method_is_described_once_and_called_on_its_own_object() -> None:
    first, second = Calculator(), Calculator()
    tools = [tool_function(calculator.add) for calculator in (first, second)]
    assert tools[0].arguments is tools[1].arguments
    for tool, number in zip(tools, (3, 5), strict=True):
        await tool.function(**tool.bind({"number": number}))
    assert (first.total, second.total) == (3, 5)
