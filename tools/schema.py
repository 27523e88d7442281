"""A tool's schema from its function's signature and docstring, and its arguments checked against it.

Types come from the annotations, descriptions from a Google-style docstring (what stands before ``Args:`` describes the
tool, each entry under it one argument). Text formats such as XML carry only strings, so a string that stands where the
signature wants another type is read as JSON first: ``"3"`` becomes 3, ``"[1, 10]"`` a list.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tools.errors import ToolDefinitionError, ToolError

AsyncFunction = Callable[..., Awaitable[Any]]

ToolOutline = tuple[str, Mapping[str, Mapping[str, Any]], Sequence[str]]
"""A tool in short: its description, the schema of each argument, and the arguments that it must have."""

MOST_LEVELS = 100
"""Lists and objects of an argument may lie in each other so deep. Python can print and compare what is no deeper."""

_TYPE_WORDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "object": "an object",
    "null": "null",
}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a tool. ``schema`` is its JSON schema, description and default included."""

    name: str
    schema: Mapping[str, Any]
    adapter: TypeAdapter[Any]
    required: bool

    @property
    def words(self) -> str:
        """The type in words: "an integer", "one of view, create"."""
        return _type_words(self.schema)

    def read(self, value: Any) -> Any:
        """``value`` in the argument's type. Raises ``ToolError``: one line that says what would be right."""
        if isinstance(value, str):
            check_text(self.name, value)
        if isinstance(value, str) and not accepts_string(self.schema):
            value = _from_text(value)
        try:
            return self.adapter.validate_python(value)
        except ValidationError:
            shown = repr(value)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise ToolError(f"argument {self.name!r} must be {self.words}, got {shown}") from None


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """An async function as a tool."""

    name: str
    description: str
    arguments: Mapping[str, Argument]
    definitions: Mapping[str, Any]
    function: AsyncFunction

    def schema(self) -> dict[str, Any]:
        """The OpenAI function schema, ``{"type": "function", "function": {...}}``."""
        parameters: dict[str, Any] = {
            "type": "object",
            "properties": {name: dict(argument.schema) for name, argument in self.arguments.items()},
            "required": [name for name, argument in self.arguments.items() if argument.required],
        }
        if self.definitions:
            parameters["$defs"] = dict(self.definitions)
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments for the function. Raises ``ToolError`` for the first one that is wrong."""
        for name in arguments:
            if name not in self.arguments:
                raise ToolError(f"{self.name} has no argument {name!r}{nearest(name, self.arguments, 'arguments')}")
        for argument in self.arguments.values():
            if argument.required and argument.name not in arguments:
                raise ToolError(f"{self.name} needs the argument {argument.name!r} ({argument.words})")
        bound = {}
        for name, value in arguments.items():
            argument = self.arguments[name]
            if value is None and not argument.required:
                continue  # models write null for what they leave out
            bound[name] = argument.read(value)
        return bound


def tool_function(function: AsyncFunction) -> ToolFunction:
    """Describe ``function`` as a tool.

    Raises ``ToolDefinitionError`` where it is not async, has an argument without a type (or a ``*args``, ``**kwargs``
    or positional-only one), has no docstring, or documents an argument that it does not have.
    """
    method = getattr(function, "__func__", None)
    if method is None:
        return _describe(function)
    return replace(_describe_method(method), function=function)


@functools.lru_cache(maxsize=256)
def _describe_method(method: AsyncFunction) -> ToolFunction:
    """The tool that a class's method is, whatever object it is bound to. Every episode binds the same methods anew,
    and pydantic takes 5 ms for the schemas of a set of tools."""
    return _describe(types.MethodType(method, object()))


def _describe(function: AsyncFunction) -> ToolFunction:
    name = getattr(function, "__name__", type(function).__name__)
    if not inspect.iscoroutinefunction(function):
        raise ToolDefinitionError(f"tool {name}: must be an async function")
    description, documented = parse_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ToolDefinitionError(f"tool {name}: needs a docstring that tells the agent what it does")
    parameters = inspect.signature(function).parameters
    for unknown in documented.keys() - parameters.keys():
        raise ToolDefinitionError(f"tool {name}: the docstring describes {unknown!r}, which is no argument of it")
    hints = typing.get_type_hints(function, include_extras=True)
    arguments: dict[str, Argument] = {}
    definitions: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(f"tool {name}: {parameter} cannot be given by name")
        if parameter.name not in hints:
            raise ToolDefinitionError(f"tool {name}: argument {parameter.name!r} needs a type")
        argument = _argument(parameter, hints[parameter.name], documented.get(parameter.name, ""), definitions)
        arguments[parameter.name] = argument
    return ToolFunction(name, description, arguments, definitions, function)


def parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring, dedented, into the tool's description and those of its arguments."""
    lines = doc.splitlines()
    start = lines.index("Args:") if "Args:" in lines else len(lines)
    section = list(itertools.takewhile(lambda line: not line or line[0].isspace(), lines[start + 1 :]))
    indent = min((len(line) - len(line.lstrip()) for line in section if line.strip()), default=0)
    arguments: dict[str, str] = {}
    current = None
    for line in section:
        entry = re.fullmatch(r"(\w+)(?: \([^)]*\))?: *(.*)", line[indent:])
        if entry:
            current = entry[1]
            arguments[current] = entry[2].strip()
        elif current and line.strip():
            arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return "\n".join(lines[:start]).strip(), arguments


def nearest(name: str, known: Iterable[str], kind: str) -> str:
    """A hint that ends an error line: the nearest known name, or all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; {kind}: {', '.join(known) or 'none'}"


def _argument(parameter: inspect.Parameter, hint: Any, description: str, definitions: dict[str, Any]) -> Argument:
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    schema = adapter.json_schema()
    definitions.update(schema.pop("$defs", {}))
    schema = _without_null(schema)
    schema.pop("title", None)
    if description:
        schema["description"] = description
    required = parameter.default is parameter.empty
    if not required and parameter.default is not None:
        schema["default"] = parameter.default
    return Argument(parameter.name, schema, adapter, required)


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """An optional argument is one that is not required; ``anyOf [X, null]`` says so twice."""
    options = [option for option in schema.get("anyOf", []) if option != {"type": "null"}]
    if len(options) != 1:
        return schema
    return {**{key: value for key, value in schema.items() if key != "anyOf"}, **options[0]}


def accepts_string(schema: Mapping[str, Any]) -> bool:
    """Whether a string may stand where ``schema`` is asked for."""
    if "anyOf" in schema:
        return any(accepts_string(option) for option in schema["anyOf"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return any(isinstance(value, str) for value in values)
    kind = schema.get("type", "string")
    return ("string" in kind if isinstance(kind, list) else kind == "string") and "$ref" not in schema


def outlined(tools: Mapping[str, ToolOutline]) -> list[Mapping[str, Any]]:
    """The OpenAI function schemas of tools that are outlined by name."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": dict(properties), "required": list(required)},
            },
        }
        for name, (description, properties, required) in tools.items()
    ]


def check_text(name: str, value: str) -> None:
    """Refuse what no command line and no file name can hold."""
    if "\0" in value:
        raise ToolError(f"argument {name!r} holds a NUL character; leave it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ToolError(f"argument {name!r} holds half a surrogate pair; write the whole character") from None


def check_levels(arguments: Mapping[str, Any]) -> None:
    """Refuse a call whose arguments are nested too deeply."""
    for name, value in arguments.items():
        if not _within_levels(value):
            raise ToolError(f"argument {name!r} is nested more than {MOST_LEVELS} levels deep; write it flatter")


def read_json(text: str) -> Any:
    """The JSON value in ``text``. Raises ``ValueError`` where there is none, or one that is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not _within_levels(value):
        raise ValueError("nested too deeply")
    return value


def _within_levels(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        parts = [each.values() if isinstance(each, Mapping) else each for each in level if _is_nested(each)]
        if not parts:
            return True
        level = list(itertools.chain.from_iterable(parts))
    return False


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _from_text(value: str) -> Any:
    try:
        return read_json(value)
    except ValueError:
        return value


def _type_words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type_words(option) for option in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return repr(schema["const"])
    if schema.get("type") == "array":
        return f"a list, each item {_type_words(schema['items'])}" if schema.get("items") else "a list"
    return _TYPE_WORDS.get(schema.get("type", ""), "an object" if "$ref" in schema else "a value")
