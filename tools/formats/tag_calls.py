r"""Formats that write each argument between tags: xml, Qwen3-Coder, GLM, MiniMax and DeepSeek's DSML.

They differ in their tags and in the newlines around values. Values are strings. Other types are written as JSON, and
the tool's schema converts them back; only DSML marks the type. A closing tag inside a value is escaped:
``</parameter>`` becomes ``<\/parameter>``, with one more backslash for each existing one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from tools.formats.grammars import tagged_call
from tools.formats.json_calls import decode_json
from tools.formats.turns import NAME, check_name, describe_as_json, first_call
from tools.schema import accepts_string
from tools.types import CallBlock, Form, ParseFailure, ToolCall

_NAME = r"([^<>\n]*)"


class TagFormat:
    """A call between tags. A subclass gives the tags.

    White space between tags is read and not kept. With a section, calls count inside it only; its end may be missing.
    """

    name: str
    _section: tuple[str, str] = ("", "")
    _call: tuple[str, str, str]
    """The text before the tool's name, after it, and after the call."""
    _argument: tuple[str, str, str]
    """The text before the argument's name, between name and value, and after the value."""
    _line_end = "\n"
    """What stands between the tags of a rendered call."""
    _padding: Literal["none", "needed", "always"] = "none"
    """Newlines around a value. The parser takes one off either end unless there are none. The renderer writes both
    always, or to a value that begins or ends with a newline."""

    @cached_property
    def _open(self) -> re.Pattern[str]:
        section = f"{re.escape(self._section[0])}\\s*" if self._section[0] else ""
        return re.compile(section + self._call_pattern)

    @cached_property
    def _next_call(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{self._call_pattern}")

    @property
    def _call_pattern(self) -> str:
        return re.escape(self._call[0]) + _NAME + re.escape(self._call[1])

    @cached_property
    def _argument_open(self) -> re.Pattern[str]:
        between = re.escape(self._argument[1]).replace("><", r">\s*<")
        return re.compile(rf"\s*{re.escape(self._argument[0])}{_NAME}{between}")

    @cached_property
    def _escaped(self) -> re.Pattern[str]:
        return re.compile(rf"<\\(\\*){re.escape(self._argument[2][1:])}")

    @cached_property
    def _closing(self) -> re.Pattern[str]:
        return re.compile(rf"<(\\*){re.escape(self._argument[2][1:])}")

    def parse(self, text: str) -> ToolCall | ParseFailure:
        opening, closing = self._section[0] + self._call_tag("NAME"), self._call[2] + self._section[1]
        return first_call(self, text, f"no tool call found; write {opening}, its parameters, {closing}")

    def scan(self, content: str, position: int) -> CallBlock | ParseFailure | None:
        opened = self._open.search(content, position)
        if not opened:
            return None
        calls: list[ToolCall] = []
        start = end = opened.start()
        while opened:
            read = self._read(content, opened)
            if isinstance(read, ParseFailure):
                return (tuple(calls), start, end) if calls else read
            call, end = read
            calls.append(call)
            opened = self._next_call.match(content, end) if self._section[0] else None
        return tuple(calls), start, _after(content, end, self._section[1])

    def _read(self, content: str, opened: re.Match[str]) -> tuple[ToolCall, int] | ParseFailure:
        name = opened[1].strip()
        if not NAME.fullmatch(name):
            return ParseFailure(f"the tool call has no name; write {self._call_tag('NAME')}")
        arguments: dict[str, Any] = {}
        position = opened.end()
        close_tag = self._argument[2]
        while argument := self._argument_open.match(content, position):
            key = argument[1].strip()
            close = content.find(close_tag, argument.end())
            if problem := self._argument_problem(key, close, arguments):
                return ParseFailure(problem)
            arguments[key] = self._read_value(argument, content[argument.end() : close])
            position = close + len(close_tag)
        end = _after(content, position, self._call[2])
        if end == position:
            tag, close_call = self._call_tag(name), self._call[2]
            return ParseFailure(f"{tag} is not closed; only parameters may stand before {close_call}")
        return ToolCall(name, arguments), end

    def render(self, call: ToolCall) -> str:
        """Raises ``ValueError`` for a tool or argument name that a tag cannot hold."""
        for name in (call.name, *call.arguments):
            check_name(name)
        arguments = [self._write_argument(key, value) for key, value in call.arguments.items()]
        parts = [self._section[0], self._call_tag(call.name), *arguments, self._call[2], self._section[1]]
        return self._line_end.join(part for part in parts if part)

    def call_form(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """See :class:`tools.types.ConstrainsCalls`."""
        for each in (name, *(parameters.get("properties") or ())):
            check_name(each)
        padding, close_tag = "\n" if self._padding == "always" else "", self._argument[2]

        def argument(key: str, schema: Mapping[str, Any]) -> tuple[str, str]:
            tag = self._argument_tag(key, "" if accepts_string(schema) else 0)
            return tag + padding, padding + close_tag + self._line_end

        head = "".join(part + self._line_end for part in (self._section[0], self._call_tag(name)) if part)
        tail = self._line_end.join(filter(None, (self._call[2], self._section[1])))
        return tagged_call(head, argument, tail, parameters, [close_tag])

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        return describe_as_json(schemas, self.render(ToolCall("NAME", {"ARG": "value"})))

    def _call_tag(self, name: str) -> str:
        return f"{self._call[0]}{name}{self._call[1]}"

    def _argument_tag(self, key: str, value: Any) -> str:
        return f"{self._argument[0]}{key}{self._argument[1]}"

    def _write_argument(self, key: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = self._closing.sub(lambda match: f"<\\{match[0][1:]}", text)
        edged = text.startswith("\n") or text.endswith("\n")
        if self._padding == "always" or (self._padding == "needed" and edged):
            text = f"\n{text}\n"
        return f"{self._argument_tag(key, value)}{text}{self._argument[2]}"

    def _read_value(self, argument: re.Match[str], raw: str) -> Any:
        """The value of ``argument``, whose tag has the text ``raw`` after it."""
        text = raw if self._padding == "none" else raw.removeprefix("\n").removesuffix("\n")
        return self._escaped.sub(lambda match: f"<{match[0][2:]}", text) if "\\" in text else text

    def _argument_problem(self, key: str, close: int, seen: Mapping[str, Any]) -> str | None:
        if not key:
            return f"a parameter has no name; write {self._argument_tag('ARG', '')}"
        if close < 0:
            return f"{self._argument_tag(key, '')} is not closed; write {self._argument[2]} after its value"
        return f"parameter {key} is given twice" if key in seen else None


class XmlFormat(TagFormat):
    """R2E-Gym's tags. :meth:`describe` shows each on its own line, as R2E-Gym writes them; calls are rendered without
    space between them, so that a call of the demo model is unchanged when it is parsed and rendered."""

    name = "xml"
    _call = ("<function=", ">", "</function>")
    _argument = ("<parameter=", ">", "</parameter>")
    _line_end = ""
    _padding = "needed"

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        tools = "\n\n".join(_describe_function(schema["function"]) for schema in schemas)
        example = "<function=NAME>\n<parameter=ARG>value</parameter>\n</function>"
        return f"You may call these tools, one call a turn:\n\n{tools}\n\nWrite a call as\n{example}"


class Qwen3CoderFormat(TagFormat):
    """Qwen3-Coder, Qwen3.5 and Nemotron-3."""

    name = "qwen3-coder"
    _section = ("<tool_call>", "</tool_call>")
    _call = ("<function=", ">", "</function>")
    _argument = ("<parameter=", ">", "</parameter>")
    _padding = "always"


class GlmFormat(TagFormat):
    """GLM-4.5 to GLM-5. GLM-4.5 writes newlines between the tags, later models do not."""

    name = "glm"
    _call = ("<tool_call>", "", "</tool_call>")
    _argument = ("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
    _line_end = ""


class MiniMaxFormat(TagFormat):
    """MiniMax-M2 and M2.5."""

    name = "minimax"
    _section = ("<minimax:tool_call>", "</minimax:tool_call>")
    _call = ('<invoke name="', '">', "</invoke>")
    _argument = ('<parameter name="', '">', "</parameter>")
    _padding = "needed"


class DsmlFormat(TagFormat):
    """DeepSeek-V3.2. ``string="false"`` marks a value that is JSON; a value that is no JSON stays text."""

    name = "deepseek-dsml"
    _section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    _call = ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>")
    _argument = ('<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>")

    @cached_property
    def _argument_open(self) -> re.Pattern[str]:
        return re.compile(rf'\s*{self._argument[0]}{_NAME}" string="(true|false)">')

    def _argument_tag(self, key: str, value: Any) -> str:
        kind = "true" if isinstance(value, str) else "false"
        return f'{self._argument[0]}{key}" string="{kind}">'

    def _read_value(self, argument: re.Match[str], raw: str) -> Any:
        text = super()._read_value(argument, raw)
        if argument[2] == "true":
            return text
        decoded = decode_json(text, 0)
        return text if isinstance(decoded, ParseFailure) or text[decoded[1] :].strip() else decoded[0]


def _after(text: str, position: int, marker: str) -> int:
    """The end of ``marker`` if it stands at ``position`` after white space, else ``position``."""
    match = re.compile(rf"\s*{re.escape(marker)}").match(text, position) if marker else None
    return match.end() if match else position


def _describe_function(function: Mapping[str, Any]) -> str:
    lines = [f"{function['name']}: {function['description']}"]
    parameters = function["parameters"]
    for name, schema in parameters["properties"].items():
        choices = f" {'|'.join(map(str, schema['enum']))}" if "enum" in schema else ""
        need = "required" if name in parameters["required"] else "optional"
        kind = f"{schema.get('type', 'value')}{choices}, {need}"
        lines.append(f"  {name} ({kind}): {schema.get('description', '')}".rstrip(": "))
    return "\n".join(lines)
