"""The tools of a software-engineering agent, with R2E-Gym's names and arguments."""

from __future__ import annotations

import posixpath
from typing import Literal

from sandbox import ExecResult, Sandbox
from tools.editor import FileEditor
from tools.runtime import ToolRuntime
from tools.schema import AsyncFunction
from tools.text import MAX_CHARS, Style, clip, split_lines
from tools.toolset import FunctionToolSet
from tools.types import ToolError, ToolResult, ToolSet

_MAX_FILE_MATCHES = 50
_MAX_MATCHES = 200
_MAX_LINE_CHARS = 200

_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\[.*^$"})
"""Escapes the special characters of a basic regular expression."""

_GREP = f"""
if [ -d "$3" ]; then exec grep -rnHIF --exclude-dir=.git --exclude-dir=.venv -m{_MAX_FILE_MATCHES} -e "$1" -- "$3"; fi
grep -nHI -m{_MAX_FILE_MATCHES} -e "$1" -e "$2" -- "$3"
code=$?
if [ $code -lt 2 ]; then exit $code; fi
exec grep -nHIF -m{_MAX_FILE_MATCHES} -e "$1" -- "$3"
"""
"""Arguments: the term, the escaped term, the path. A term that is not a regular expression is matched as text."""


def swe_tools(sandbox: Sandbox, *, style: Style = "full", timeout: float = 90.0, max_chars: int = MAX_CHARS) -> ToolSet:
    """``execute_bash``, ``file_editor``, ``search`` and ``finish`` on ``sandbox``, for one episode.

    ``style="concise"`` shortens the results; names and arguments are the same. ``timeout`` is in seconds for each
    command, ``max_chars`` limits each result. The returned set keeps the editor's undo history.
    """
    runtime = ToolRuntime(sandbox, style, timeout, max_chars)
    functions: list[AsyncFunction] = [
        Bash(runtime).execute_bash,
        FileEditor(runtime).file_editor,
        Search(runtime).search,
        Submit(style).finish,
    ]
    return FunctionToolSet(functions, max_chars=max_chars)


class Bash:
    """``execute_bash``. One round trip to the sandbox."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime

    async def execute_bash(self, cmd: str) -> ToolResult:
        """Run a bash command and show what it prints.

        Every call is a new shell in the working directory: `cd` and variables last for one call only, files stay.

        Args:
            cmd: The command, e.g. `python -m pytest -x tests`.
        """
        result = await self._runtime.run("bash", "-c", cmd)
        notes = self._notes(result)
        output = result.text.rstrip("\n")
        if not output and not notes and not self._runtime.concise:
            output = "(no output)"
        return ToolResult("\n".join(filter(None, [output, *notes])), failed=not result.ok)

    def _notes(self, result: ExecResult) -> list[str]:
        """Truncation, kills and the exit code, a line each."""
        notes = []
        if result.truncated:
            notes.append("[output cut: it is over the limit]")
        if result.oom_killed:
            notes.append(f"[killed: more than {self._runtime.sandbox.spec.memory_mb} MB of memory]")
        if result.timed_out:
            notes.append(f"[killed: no end after {self._runtime.timeout:g} seconds]")
        elif result.exit_code != 0:
            notes.append(f"[exit code {result.exit_code}]")
        return notes


class Search:
    """``search``. One round trip to the sandbox."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime

    async def search(self, search_term: str, path: str = ".") -> str:
        """Find the lines that hold a text, in a file or in all text files below a directory (.git left out).

        Args:
            search_term: The text to look for, upper and lower case told apart. In a file it may also be a regular
                expression of grep, such as "^def [a-f]".
            path: A file or a directory; the working directory if not given.
        """
        if not search_term:
            raise ToolError("search_term is empty; give the text to look for")
        if "\n" in search_term:
            raise ToolError("search_term has more than one line; give a part of one line")
        workdir, absolute = self._runtime.sandbox.spec.workdir, self._runtime.path(path)
        inside = posixpath.commonpath([workdir, absolute]) == workdir
        target = posixpath.relpath(absolute, workdir) if inside else absolute
        literal = search_term.translate(_SPECIAL)
        result = await self._runtime.run("sh", "-c", _GREP, "search", search_term, literal, target)
        if result.timed_out:
            raise ToolError(f"the search took more than {self._runtime.timeout:g} seconds; give a smaller path")
        lines = split_lines(result.stdout.decode("utf-8", errors="replace"))
        if lines:
            return self._format(lines)
        if result.exit_code > 1:
            raise ToolError(f"no such file or directory: {path}")
        return "no matches" if self._runtime.concise else f"No line in {path} holds {search_term!r}."

    def _format(self, lines: list[str]) -> str:
        shown = [clip(line.removeprefix("./"), _MAX_LINE_CHARS) for line in lines[:_MAX_MATCHES]]
        if len(lines) > _MAX_MATCHES:
            shown.append(f"[{len(lines) - _MAX_MATCHES} more matches; give a longer text or a smaller path]")
        return "\n".join(shown)


class Submit:
    """``finish``. It runs nothing; the environment then grades the state of the sandbox."""

    def __init__(self, style: Style) -> None:
        self._style = style

    async def finish(self, command: Literal["submit"] = "submit", result: str = "") -> ToolResult:
        """Submit the work and end the task.

        Args:
            command: Always `submit`.
            result: A short account of what was done.
        """
        return ToolResult("" if self._style == "concise" else "Submitted.", submitted=True)
