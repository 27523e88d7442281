"""OpenHands' tools as one set, their arguments checked as ``openhands/llm/fn_call_converter.py`` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandbox import Sandbox
from tools.errors import ToolError
from tools.openhands.editor import EditorRefused, StrReplaceEditor
from tools.openhands.shell import Shell
from tools.runtime import ToolRuntime
from tools.schema import ToolOutline, check_levels, check_text, outlined, read_json
from tools.text import Style
from tools.types import ToolCall, ToolResult, ToolSet

_TEXT, _NUMBER, _LIST = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}
_COMMAND = {"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo_edit"]}
_TOOLS: Mapping[str, ToolOutline] = {
    "execute_bash": ("Execute a bash command in the terminal.", {"command": _TEXT}, ("command",)),
    "finish": ("Finish the interaction.", {}, ()),
    "str_replace_editor": (
        "View, create and edit files.",
        {
            "command": _COMMAND,
            **dict.fromkeys(("path", "file_text", "old_str", "new_str"), _TEXT),
            "insert_line": _NUMBER,
            "view_range": _LIST,
        },
        ("command", "path"),
    ),
}


def openhands_tools(sandbox: Sandbox, *, style: Style = "full", timeout: float = 300.0) -> ToolSet:
    """``execute_bash``, ``str_replace_editor`` and ``finish`` on ``sandbox``, for one episode.

    ``timeout`` is in seconds for each command. There is one style of answer, OpenHands' own.
    """
    return OpenHandsTools(ToolRuntime(sandbox, style, timeout))


class OpenHandsTools:
    """Implements :class:`tools.types.ToolSet`. The shell's state and the editor's history live in it."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._shell, self._editor = Shell(runtime), StrReplaceEditor(runtime)

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """What the tools take, in short; the interface's prompt has OpenHands' own description of them."""
        return outlined(_TOOLS)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run ``call``. A call that is wrong is answered as OpenHands' agent reads of it."""
        try:
            arguments = _checked(call)
        except ToolError as error:
            return ToolResult(f"{error}\n[Error occurred in processing last action]", failed=True)
        if call.name == "finish":
            return ToolResult("", submitted=True)
        try:
            text, failed = await self._run(call.name, arguments)
        except ToolError as error:
            text, failed = str(error), True
        return ToolResult(f"EXECUTION RESULT of [{call.name}]:\n{text}", failed=failed)

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        if name == "execute_bash":
            text, code = await self._shell.run(arguments["command"])
            return text, code != 0
        try:
            return f"{await self._editor.run(**arguments)}\n", False
        except EditorRefused as refused:
            return f"ERROR:\n{refused}\n", True


def _checked(call: ToolCall) -> dict[str, Any]:
    """The arguments in their types. Raises ``ToolError`` with OpenHands' words for the first that is wrong."""
    if call.name not in _TOOLS:
        raise ToolError(f"Function '{call.name}' not found in available tools: {list(_TOOLS)}")
    _, properties, required = _TOOLS[call.name]
    if not properties:
        return {}
    check_levels(call.arguments)
    for name in call.arguments:
        if name not in properties:
            allowed = ", ".join(map(repr, sorted(properties)))
            raise ToolError(
                f"Parameter '{name}' is not allowed for function '{call.name}'. Allowed parameters: {{{allowed}}}"
            )
    read = {name: _read(name, value, properties[name]) for name, value in call.arguments.items()}
    if missing := [name for name in required if name not in read]:
        names = ", ".join(map(repr, missing))
        raise ToolError(f"Missing required parameters for function '{call.name}': {{{names}}}")
    return read


def _read(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        check_text(name, value)
    if schema["type"] == "integer":
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            raise ToolError(f"Parameter '{name}' is expected to be an integer.") from None
    if schema["type"] == "array":
        return _read_list(name, value)
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"Parameter '{name}' is expected to be one of {schema['enum']}.")
    return str(value)


def _read_list(name: str, value: Any) -> Any:
    try:
        read = read_json(value) if isinstance(value, str) else value
    except ValueError:
        raise ToolError(f"Parameter '{name}' is expected to be an array.") from None
    return read if isinstance(read, list) else [read]
