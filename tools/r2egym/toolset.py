"""R2E-Gym's four tools and its text format of calls.

Tools: ``run_action`` and ``step`` in ``src/r2egym/agenthub/environment/env.py``. Format:
``src/r2egym/agenthub/agent/agent.py`` (``parse_response``) and ``action/action.py``. The parser is lenient. It takes
the text from the first ``<function=...>`` to the first ``</function>`` and ignores text between the parameters. An
unclosed parameter extends to the next closing tag; without one it is ignored. The last of several parameters with one
name counts. Values are stripped.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from sandbox import ExecResult, Sandbox
from tools.formats.grammars import tagged_call
from tools.r2egym.command import CommandStopped, Output, format_crash, parse_arguments
from tools.r2egym.editor import FileEditor
from tools.runtime import ToolRuntime
from tools.schema import ToolSpec, check_nesting, check_text, function_schemas
from tools.text import Style, elements, split_lines
from tools.types import Form, ParseFailure, ToolCall, ToolError, ToolResult, ToolSet

CONTINUE = """
You forgot to use a function call in your response. 
YOU MUST USE A FUNCTION CALL IN EACH RESPONSE.

IMPORTANT: YOU SHOULD NEVER ASK FOR HUMAN HELP.
"""
"""``CONTINUE_MSG`` of ``src/r2egym/agenthub/__init__.py``, unchanged."""

_OPEN, _CLOSE = "<function=", "</function>"
_NAME = re.compile(r"<function\s*=\s*([^>]+)>")
_PARAMETER = re.compile(r"<parameter\s*=\s*([^>]+)>")


class R2EGymFormat:
    """Implements :class:`tools.types.ToolCallFormat`. Values are strings."""

    name = "r2egym"

    def parse(self, text: str) -> ToolCall | ParseFailure:
        start = text.find(_OPEN)
        end = text.find(_CLOSE, start)
        block = text[start : end + len(_CLOSE)] if 0 <= start < end else ""
        name_tag = _NAME.search(block)
        if name_tag is None or not name_tag[1].strip():
            return ParseFailure(CONTINUE)
        parameters = elements(block, _PARAMETER, "</parameter>")
        return ToolCall(name_tag[1].strip(), {key.strip(): value.strip() for key, value in parameters})

    def render(self, call: ToolCall) -> str:
        """The layout of past turns in R2E-Gym's training data."""
        parameters = [f"  <parameter={key}>{value}</parameter>\n" for key, value in call.arguments.items()]
        return f"<function={call.name}>\n{''.join(parameters)}</function>"

    def call_form(self, name: str, parameters: Mapping[str, Any]) -> Form:
        """See :class:`tools.types.ConstrainsCalls`."""
        markers = ("</parameter>", "</function>", "<parameter=", "<function=")
        return tagged_call(
            f"<function={name}>\n",
            lambda key, _: (f"  <parameter={key}>", "</parameter>\n"),
            _CLOSE,
            parameters,
            markers,
        )

    def describe(self, schemas: Sequence[Mapping[str, Any]]) -> str:
        """Empty: the scaffold's system prompt describes the tools."""
        return ""


_MAX_ARGUMENTS = 64  # argparse takes quadratic time
_BLOCKED = ("cd", "ipython", "jupyter", "pip", "nohup")
_MAX_FILES = 100

# Arguments: the term, the path, a file name pattern. Prints the kind of the path, its real path, and the matches.
_SEARCH = """
if [ -f "$2" ]; then
    where=$(realpath -- "$2") && printf 'file\\n%s\\n' "$where" && exec grep -n "$1" "$where"
fi
if cd -- "$2" 2>/dev/null; then
    printf 'folder\\n%s\\n' "$(pwd -P)"
    find . -mindepth 1 -name '.*' -prune -o \\( -type f -o -xtype f \\) -name "$3" -print0 |
        LC_ALL=C sort -z | xargs -0 -r grep -acHF -e "$1" -- | grep -v ':0$'
    exit 0
fi
printf 'nothing\\n%s\\n' "$(realpath -m -- "$2")"
"""
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_SCHEMAS: Mapping[str, ToolSpec] = {
    "file_editor": (
        "View, create and edit files: view, create, str_replace, insert, undo_edit.",
        dict.fromkeys(("command", "path", "file_text", "old_str", "new_str", "view_range", "concise"), _TEXT)
        | {"insert_line": _NUMBER},
        ("command", "path"),
    ),
    "search": ("Search for a term in a directory or a file.", {"search_term": _TEXT, "path": _TEXT}, ("search_term",)),
    "execute_bash": ("Execute a bash command in the terminal.", {"cmd": _TEXT}, ("cmd",)),
    "finish": ("Finish the interaction.", {"command": _TEXT, "result": _TEXT}, ("command",)),
}


def r2egym_tools(sandbox: Sandbox, *, style: Style = "full", timeout: float = 90.0) -> ToolSet:
    """``file_editor``, ``search``, ``execute_bash`` and ``finish`` on ``sandbox``, for one episode.

    ``timeout`` is in seconds for each command. ``style`` has no effect: observations are R2E-Gym's, with its limits.
    """
    return R2EGymTools(ToolRuntime(sandbox, style, timeout))


class R2EGymTools:
    """Implements :class:`tools.types.ToolSet`. It keeps the editor's undo history."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._timeout = runtime.timeout
        self._tools: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[Output]]] = {
            "file_editor": FileEditor(runtime).run,
            "search": Search(runtime).run,
            "execute_bash": Bash(runtime).run,
        }

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The arguments of the tools. R2E-Gym's own descriptions are in the scaffold's prompt."""
        return function_schemas(_SCHEMAS)

    async def call(self, call: ToolCall) -> ToolResult:
        """Run ``call``; ``finish`` ends the task, whatever its arguments."""
        if call.name == "finish":
            return ToolResult("<<< Finished >>>", submitted=True)
        if call.name not in self._tools:
            return ToolResult(_invalid(call.name), failed=True)
        try:
            output = await self._run(call)
        except ToolError as error:
            return ToolResult(str(error), failed=True)
        return ToolResult(output.observation(call.name, self._timeout), failed=bool(output.code or output.timed_out))

    async def _run(self, call: ToolCall) -> Output:
        if len(call.arguments) > _MAX_ARGUMENTS:
            raise ToolError(f"{len(call.arguments)} arguments; {_MAX_ARGUMENTS} are the most")
        check_nesting(call.arguments)
        for name, value in call.arguments.items():
            check_text(name, str(value))
        try:
            return await self._tools[call.name](call.arguments)
        except CommandStopped as stopped:
            return Output(stopped.text, stopped.code)


def _invalid(name: str) -> str:
    """The message that R2E-Gym's environment logs. Its agent sees an UnboundLocalError of the environment instead."""
    return (
        "Invalid Action: input action must be one of allowed actions \n "
        f"Allowed actions: {list(_SCHEMAS)} \n Input action: {name}\t"
    )


class Bash:
    """``execute_bash`` (``src/r2egym/agenthub/tools/execute_bash.py``): each call is a new ``/bin/sh`` in the working
    directory. One round trip to the sandbox."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime

    async def run(self, arguments: Mapping[str, Any]) -> Output:
        command: str = parse_arguments("execute_bash", arguments).cmd
        if not command.strip():
            return Output(format_crash(IndexError("list index out of range")), 1)
        first = command.split()[0]
        if first in _BLOCKED:
            return Output(f"Bash command '{first}' is not allowed. Please use a different command or tool.\n", 1)
        result = await self._runtime.run("/bin/sh", "-c", command)
        failed = "" if result.exit_code == 0 else "Error executing command:\n\n"
        stdout, stderr = _decode(result.stdout), _decode(result.stderr)
        text = f"{failed}[STDOUT]\n\n{stdout} \n\n[STDERR]\n\n{stderr}\n"
        return Output(text, _exit_code(result.exit_code), timed_out=result.timed_out)


def _decode(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n").strip()


def _exit_code(code: int) -> int:
    """R2E-Gym's script exits with ``-signal`` (modulo 256) where the sandbox reports 128 + signal."""
    return 384 - code if 128 < code <= 192 else code


class Search:
    """``search`` (``src/r2egym/agenthub/tools/search.py``): the matching lines of a file, or the number of matching
    lines of each Python file in a directory. One round trip to the sandbox."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime

    async def run(self, arguments: Mapping[str, Any]) -> Output:
        options = parse_arguments("search", arguments)
        names = "*.py" if options.python_only else "*"
        result = await self._runtime.run("sh", "-c", _SEARCH, "search", options.search_term, options.path or ".", names)
        if result.timed_out:
            return Output("", timed_out=True)
        kind, path, matches = [*result.stdout.decode("utf-8", errors="replace").split("\n", 2), "", ""][:3]
        if kind == "file":
            return _in_file(options.search_term, path, matches, result)
        if kind == "folder":
            return self._in_directory(options.search_term, path, split_lines(matches))
        if kind == "nothing":
            return Output(f"Directory '{path}' not found or not a directory.\n", 1)
        return Output(f"Error executing search:\n{result.text}\n", result.exit_code or 1)

    def _in_directory(self, term: str, path: str, counts: list[str]) -> Output:
        if not counts or "\n" in term or "\r" in term:  # no line contains a line end
            return Output(f'No matches found for "{term}" in {path}\n')
        if len(counts) > _MAX_FILES:
            text = f'More than {len(counts)} files matched for "{term}" in {path}. Please narrow your search.\n'
            return Output(text)
        parts = [line.rpartition(":") for line in counts]
        matches = [(name, int(count)) for name, _, count in parts if count.isdecimal()]
        lines = [f"{self._relative(posixpath.join(path, name))} ({count} matches)\n" for name, count in matches]
        total = sum(count for _, count in matches)
        head, foot = (f'Found {total} matches for "{term}" in {path}:\n', f'End of matches for "{term}" in {path}\n')
        return Output(f"{head}{''.join(lines)}{foot}")

    def _relative(self, path: str) -> str:
        relative = posixpath.relpath(posixpath.join("/", path), self._runtime.sandbox.spec.workdir)
        return relative if relative.startswith("./") else f"./{relative}"


def _in_file(term: str, path: str, matches: str, result: ExecResult) -> Output:
    if result.exit_code == 1:
        return Output(f'No matches found for "{term}" in {path}\n')
    if result.exit_code:
        reason = result.stderr.decode("utf-8", errors="replace")
        return Output(f"Error executing grep:\n{reason}\n", result.exit_code)
    return Output(f'Matches for "{term}" in {path}:\n{matches.strip()}\n')
