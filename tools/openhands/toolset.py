"""OpenHands' tools and text format of calls: ``openhands/llm/fn_call_converter.py``, which also checks arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sandbox import Sandbox, SessionResult, open_session
from tools.formats.grammars import tagged_call
from tools.openhands.editor import EditorError, StrReplaceEditor
from tools.runtime import ToolRuntime
from tools.schema import ToolSpec, check_nesting, check_text, function_schemas, read_json
from tools.text import Style, elements, through_last
from tools.types import Form, ParseFailure, ToolCall, ToolError, ToolResult, ToolSet

CONTINUE = (
    "Please continue working on the task on whatever approach you think is suitable.\n"
    "If you think you have solved the task, please first send your answer to user through message and then finish the "
    "interaction.\n"
    "IMPORTANT: YOU SHOULD NEVER ASK FOR HUMAN HELP.\n"
)
"""The observation after a turn without a call: ``codeact_user_response`` of ``evaluation/utils/shared.py``."""

_NAME = re.compile(r"<function=([^>]+)>")
_PARAMETER = re.compile(r"<parameter=([^>]+)>")


class OpenHandsFormat:
    """Implements :class:`tools.types.ToolCallFormat`. The closing tag may be missing at the end of a turn."""

    name = "openhands"

    def parse(self, text: str) -> ToolCall | ParseFailure:
        text = through_last(_close_tag(text), ">")
        name_tag = next((tag for tag in _NAME.finditer(text) if text.startswith("\n", tag.end())), None)
        end = -1 if name_tag is None else text.find("</function>", name_tag.end() + 1)
        if name_tag is None or end < 0:
            return ParseFailure(CONTINUE)
        parameters = elements(through_last(text[name_tag.end() + 1 : end], ">"), _PARAMETER, "</parameter>")
        return ToolCall(name_tag[1], {key: value.strip() for key, value in parameters})

    def render(self, call: ToolCall) -> str:
        fields = "".join(
            f"<parameter={key}>{_render_value(value)}</parameter>\n" for key, value in call.arguments.items()
        )
        return f"<function={call.name}>\n{fields}</function>"

    def call_form(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """See :class:`tools.types.ConstrainsCalls`."""
        markers = ("</parameter>", "</function>", "<parameter=", "<function=")
        return tagged_call(
            f"<function={name}>\n",
            lambda key, _: (f"<parameter={key}>", "</parameter>\n"),
            "</function>",
            parameters,
            markers,
        )

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Empty: the scaffold's system prompt describes the tools."""
        return ""


def _close_tag(text: str) -> str:
    if text.count("<function=") != 1:
        return text
    return f"{text.rstrip()}function>" if text.endswith("</") else f"{text}\n</function>"


def _render_value(value: Any) -> str:
    return f"\n{value}\n" if isinstance(value, str) and "\n" in value else str(value)


_MAX_CHARS = 30_000
_MAX_COMMAND_BYTES = 100_000  # below the kernel's 128 KiB for an argument, with space for the session's own script
_INTERRUPTED = 130
_PROMPT_CONTEXT = 'printf \'%s\\n\' "$(id -un)" "${PWD/#$HOME/\\~}" "$(command -v python)"'
_TEXT, _NUMBER, _LIST = {"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}
_COMMAND = {"type": "string", "enum": ["view", "create", "str_replace", "insert", "undo_edit"]}
_TOOLS: Mapping[str, ToolSpec] = {
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

    ``timeout`` is in seconds for each command. ``style`` has no effect: observations are OpenHands'.
    """
    return OpenHandsTools(ToolRuntime(sandbox, style, timeout))


class OpenHandsTools:
    """Implements :class:`tools.types.ToolSet`. It keeps the shell's state and the editor's undo history."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._shell, self._editor = Shell(runtime), StrReplaceEditor(runtime)

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The arguments of the tools. OpenHands' own descriptions are in the scaffold's prompt."""
        return function_schemas(_TOOLS)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run ``call``. A wrong call gets OpenHands' error text as its result."""
        try:
            arguments = _check_arguments(call)
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
        except EditorError as refused:
            return f"ERROR:\n{refused}\n", True


def _check_arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments in their types. Raises ``ToolError`` with OpenHands' message for the first wrong one."""
    if call.name not in _TOOLS:
        raise ToolError(f"Function '{call.name}' not found in available tools: {list(_TOOLS)}")
    _, properties, required = _TOOLS[call.name]
    if not properties:
        return {}
    check_nesting(call.arguments)
    for name in call.arguments:
        if name not in properties:
            allowed = ", ".join(map(repr, sorted(properties)))
            raise ToolError(
                f"Parameter '{name}' is not allowed for function '{call.name}'. Allowed parameters: {{{allowed}}}"
            )
    arguments = {name: _read_argument(name, value, properties[name]) for name, value in call.arguments.items()}
    if missing := [name for name in required if name not in arguments]:
        names = ", ".join(map(repr, missing))
        raise ToolError(f"Missing required parameters for function '{call.name}': {{{names}}}")
    return arguments


def _read_argument(name: str, value: Any, schema: Mapping[str, Any]) -> Any:
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


class Shell:
    """``execute_bash`` (``openhands/runtime/utils/bash.py``): one shell for the whole episode.

    As in ``codeact_agent.py`` the agent reads its command, the output with the line ends of a terminal, and the prompt.
    """

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime, self._session = runtime, open_session(runtime.sandbox)
        self._started = False

    async def run(self, command: str) -> tuple[str, int]:
        """The observation and the command's exit code."""
        if len(command.encode()) > _MAX_COMMAND_BYTES:
            raise ToolError(f"the command is longer than {_MAX_COMMAND_BYTES} bytes; write a file first")
        if not command:
            return await self._observation("", "", -1), -1
        if not self._started:
            await self._session.run(f"cd {self._runtime.sandbox.spec.workdir}", timeout=self._runtime.timeout)
            self._started = True
        finished = await self._session.run(f"{{ {command}\n}} 2>&1", timeout=self._runtime.timeout)
        code = _INTERRUPTED if finished.result.timed_out else finished.result.exit_code
        return await self._observation(command, self._output(finished), code), code

    def _output(self, finished: SessionResult) -> str:
        text = (finished.result.stdout + finished.result.stderr).decode("utf-8", errors="replace")
        output = text.replace("\r\n", "\n").replace("\n", "\r\n")
        if not finished.result.timed_out:
            return output
        notice = f"Command timed out after {self._runtime.timeout:g} seconds. "
        return f"{output}\r\n\r\n[{notice}SIGINT was sent to interrupt the command.]"

    async def _observation(self, command: str, output: str, code: int) -> str:
        context = await self._session.run(_PROMPT_CONTEXT, timeout=self._runtime.timeout)
        user, directory, python = [*context.result.text.split("\n"), "", "", ""][:3]
        prompt = f"{user}@openhands-workspace:{directory} {'#' if user == 'root' else '$'} "
        content = f"{command}\r\n{output}".rstrip("\r\n")
        text = f"{content}[Python Interpreter: {python}]\n{prompt}" if python else f"{content}\r\n\n{prompt}"
        return f"{_shorten(text)}\n[Command finished with exit code {code}]"


def _shorten(text: str) -> str:
    half = _MAX_CHARS // 2
    note = "\n[... Observation truncated due to length ...]\n"
    return text if len(text) <= _MAX_CHARS else f"{text[:half]}{note}{text[-half:]}"
