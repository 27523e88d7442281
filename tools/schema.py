"""Derives a tool's schema from its function's signature and docstring, and checks arguments against the schema.

Types come from the annotations, descriptions from a Google-style docstring: the text before ``Args:`` describes the
tool, each entry below it one argument. Text formats such as XML carry only strings. If the signature requires another
type, a string is read as JSON first: ``"3"`` becomes 3, ``"[1, 10]"`` a list.
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

from tools.types import ToolDefinitionError, ToolError

AsyncFunction = Callable[..., Awaitable[Any]]

ToolSpec = tuple[str, Mapping[str, Mapping[str, Any]], Sequence[str]]
"""A tool's description, the JSON schema of each argument, and the required arguments."""

MAX_NESTING = 100
"""The maximum nesting of lists and objects in an argument. Python can print and compare values of this depth."""

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
    """One argument of a tool. ``schema`` is its JSON schema with description and default."""

    name: str
    schema: Mapping[str, Any]
    adapter: TypeAdapter[Any]
    required: bool

    @property
    def words(self) -> str:
        """The type in words: "an integer", "one of view, create"."""
        return _type_words(self.schema)

    def read(self, value: Any) -> Any:
        """``value`` converted to the argument's type. Raises ``ToolError``, one line with the expected type."""
        if isinstance(value, str):
            check_text(self.name, value)
        if isinstance(value, str) and not accepts_string(self.schema):
            value = _parse_json_text(value)
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
        properties = {name: dict(argument.schema) for name, argument in self.arguments.items()}
        required = [name for name, argument in self.arguments.items() if argument.required]
        schema = function_schema(self.name, (self.description, properties, required))
        if self.definitions:
            schema["function"]["parameters"]["$defs"] = dict(self.definitions)
        return schema

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments for the function. Raises ``ToolError`` for the first wrong argument."""
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
                continue  # models write null for omitted arguments
            bound[name] = argument.read(value)
        return bound


def tool_function(function: AsyncFunction) -> ToolFunction:
    """Describe ``function`` as a tool.

    Raises ``ToolDefinitionError`` if it is not async, has no docstring, has an argument without a type or one that
    cannot be passed by name, or documents an argument that it does not have.
    """
    method = getattr(function, "__func__", None)
    if method is None:
        return _describe(function)
    return replace(_describe_method(method), function=function)


@functools.lru_cache(maxsize=256)
def _describe_method(method: AsyncFunction) -> ToolFunction:
    """The tool for a method, independent of the bound object. It is cached because every episode binds the same methods
    and pydantic takes 5 ms for the schemas of a tool set."""
    return _describe(types.MethodType(method, object()))


def _describe(function: AsyncFunction) -> ToolFunction:
    name = getattr(function, "__name__", type(function).__name__)
    if not inspect.iscoroutinefunction(function):
        raise ToolDefinitionError(f"tool {name}: must be an async function")
    description, documented = parse_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ToolDefinitionError(f"tool {name}: needs a docstring, the description for the agent")
    parameters = inspect.signature(function).parameters
    for unknown in documented.keys() - parameters.keys():
        raise ToolDefinitionError(f"tool {name}: the docstring describes {unknown!r}, which is not an argument")
    hints = typing.get_type_hints(function, include_extras=True)
    arguments: dict[str, Argument] = {}
    definitions: dict[str, Any] = {}
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(f"tool {name}: {parameter} cannot be passed by name")
        if parameter.name not in hints:
            raise ToolDefinitionError(f"tool {name}: argument {parameter.name!r} needs a type")
        argument = _argument(parameter, hints[parameter.name], documented.get(parameter.name, ""), definitions)
        arguments[parameter.name] = argument
    return ToolFunction(name, description, arguments, definitions, function)


def parse_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The description of the tool and of each argument, from a dedented Google-style docstring."""
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
    """The hint at the end of an error line: the nearest known name, or all names."""
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
    """The schema without ``null``: an optional argument is already marked by its absence from ``required``."""
    options = [option for option in schema.get("anyOf", []) if option != {"type": "null"}]
    if len(options) != 1:
        return schema
    return {**{key: value for key, value in schema.items() if key != "anyOf"}, **options[0]}


def accepts_string(schema: Mapping[str, Any]) -> bool:
    """Whether a string can be a value of ``schema``."""
    if "anyOf" in schema:
        return any(accepts_string(option) for option in schema["anyOf"])
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values:
        return any(isinstance(value, str) for value in values)
    kind = schema.get("type", "string")
    return ("string" in kind if isinstance(kind, list) else kind == "string") and "$ref" not in schema


def function_schemas(tools: Mapping[str, ToolSpec]) -> list[Mapping[str, Any]]:
    """The OpenAI function schemas of ``tools``, by name."""
    return [function_schema(name, spec) for name, spec in tools.items()]


def function_schema(name: str, spec: ToolSpec) -> dict[str, Any]:
    """The OpenAI function schema of the tool ``name``."""
    description, properties, required = spec
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def check_text(name: str, value: str) -> None:
    """Raise ``ToolError`` for text that a command line or a file name cannot contain."""
    if "\0" in value:
        raise ToolError(f"argument {name!r} holds a NUL character; leave it out")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ToolError(f"argument {name!r} holds half a surrogate pair; write the whole character") from None


def check_nesting(arguments: Mapping[str, Any]) -> None:
    """Raise ``ToolError`` if an argument is nested more than ``MAX_NESTING`` levels deep."""
    for name, value in arguments.items():
        if not _is_within_nesting(value):
            raise ToolError(f"argument {name!r} is nested more than {MAX_NESTING} levels deep; write it flatter")


def read_json(text: str) -> Any:
    """The JSON value in ``text``. Raises ValueError if it is not JSON or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not _is_within_nesting(value):
        raise ValueError("nested too deeply")
    return value


def _is_within_nesting(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING + 1):
        parts = [each.values() if isinstance(each, Mapping) else each for each in level if _is_nested(each)]
        if not parts:
            return True
        level = list(itertools.chain.from_iterable(parts))
    return False


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _parse_json_text(value: str) -> Any:
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
