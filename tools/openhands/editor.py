"""OpenHands' ``str_replace_editor``: ``openhands_aci/editor/editor.py`` of openhands-aci 0.1.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandbox import SandboxFileError
from tools.foreign_editors import (
    MAX_FILE_BYTES,
    OVERWRITE,
    PATH_KIND,
    clip_head,
    describe_insertion,
    describe_replacement,
    number_lines,
    printable,
)
from tools.runtime import ToolRuntime

_MAX_CHARS = 16_000
_COMMANDS = "view, create, str_replace, insert, undo_edit"


class EditorError(Exception):
    """A refused edit. The agent reads the message after ``ERROR:``."""


class StrReplaceEditor:
    """The editor of one episode on one sandbox. It keeps an undo history for each path."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime
        self._history: dict[str, list[str]] = {}

    async def run(self, command: str, path: str, **arguments: Any) -> str:
        """Run a command and return its output. Raises ``EditorError`` for a command that is refused."""
        if not path.startswith("/"):
            hint = f"The path should be an absolute path, starting with `/`. Maybe you meant {path}?"
            raise _invalid("path", path, hint)
        text = await self._text(command, path)
        if command == "view":
            view_range = arguments.get("view_range")
            return await self._list(path, view_range) if text is None else _view(text, path, view_range)
        if command == "create":
            return await self._create(path, _required(command, arguments, "file_text"))
        if text is None:
            only = f"The path {path} is a directory and only the `view` command can be used on directories."
            raise _invalid("path", path, only)
        if command == "str_replace":
            return await self._replace(path, text, _required(command, arguments, "old_str"), arguments.get("new_str"))
        if command == "insert":
            line = _required(command, arguments, "insert_line")
            return await self._insert(path, text, line, _required(command, arguments, "new_str"))
        if command == "undo_edit":
            return await self._undo(path)
        raise EditorError(
            f"Unrecognized command {command}. The allowed commands for the oh_editor tool are: {_COMMANDS}"
        )

    async def _text(self, command: str, path: str) -> str | None:
        """The file's text; None for a directory, and for ``create``."""
        try:
            data = await self._runtime.sandbox.read_file(path, max_bytes=MAX_FILE_BYTES)
            kind = b"file"
        except SandboxFileError:
            data, kind = b"", (await self._runtime.run("bash", "-c", PATH_KIND, "-", path)).stdout.strip()
        if command == "create":
            if kind != b"nothing":
                hint = f"File already exists at: {path}. Cannot overwrite files using command `create`."
                raise _invalid("path", path, hint)
            return None
        if kind == b"nothing":
            raise _invalid("path", path, f"The path {path} does not exist. Please provide a valid path.")
        return None if kind == b"folder" else data.decode("utf-8", errors="surrogateescape")

    async def _list(self, path: str, view_range: Any) -> str:
        if view_range:
            hint = "The `view_range` parameter is not allowed when `path` points to a directory."
            raise _invalid("view_range", view_range, hint)
        result = await self._runtime.run("find", path, "-maxdepth", "2", "-not", "-path", "*/.*")
        if problem := result.stderr.decode("utf-8", errors="replace"):
            raise EditorError(problem)
        names = "".join(sorted(result.stdout.decode("utf-8", errors="replace").splitlines(keepends=True)))
        return f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n{names}\n"

    async def _create(self, path: str, text: str) -> str:
        await self._write(path, text)
        self._history.setdefault(path, []).append(text)
        return f"File created successfully at: {path}"

    async def _replace(self, path: str, text: str, old: str, new: str | None) -> str:
        if old == new:
            hint = "No replacement was performed. `new_str` and `old_str` must be different."
            raise _invalid("new_str", new, hint)
        count = text.count(old)
        if count == 0:
            raise EditorError(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
        if count > 1:
            lines = [number for number, line in enumerate(text.split("\n"), 1) if old in line]
            raise EditorError(
                f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines {lines}. Please "
                "ensure it is unique."
            )
        await self._edit(path, text, text.replace(old, new or ""))
        return describe_replacement(path, text, old, new or "", _number)

    async def _insert(self, path: str, text: str, line: int, new: str) -> str:
        lines = text.split("\n")
        if not 0 <= line <= len(lines):
            hint = f"It should be within the range of lines of the file: {[0, len(lines)]}"
            raise _invalid("insert_line", line, hint)
        await self._edit(path, text, "\n".join([*lines[:line], *new.split("\n"), *lines[line:]]))
        return describe_insertion(path, lines, line, new, _number)

    async def _undo(self, path: str) -> str:
        history = self._history.get(path)
        if not history:
            raise EditorError(f"No edit history found for {path}.")
        before = history.pop()
        await self._write(path, before)
        return f"Last edit to {path} undone successfully. {_number(before, path)}"

    async def _edit(self, path: str, text: str, edited: str) -> None:
        await self._write(path, edited)
        self._history.setdefault(path, []).append(text)

    async def _write(self, path: str, text: str) -> None:
        data = text.encode("utf-8", errors="surrogateescape")
        result = await self._runtime.run("bash", "-c", OVERWRITE, "-", path, stdin=data)
        if not result.ok:
            reason = result.text.strip().rpartition(": ")[2]
            raise EditorError(f"Ran into {reason}: '{path}' while trying to write to {path}")


def _view(text: str, path: str, view_range: Sequence[Any] | None) -> str:
    if not view_range:
        return _number(text, path)
    if len(view_range) != 2 or not all(isinstance(number, int) for number in view_range):
        raise _invalid("view_range", view_range, "It should be a list of two integers.")
    lines, (first, last) = text.split("\n"), view_range
    if not 1 <= first <= len(lines):
        within = f"should be within the range of lines of the file: {[1, len(lines)]}."
        raise _invalid("view_range", view_range, f"Its first element `{first}` {within}")
    if last > len(lines):
        smaller = f"should be smaller than the number of lines in the file: `{len(lines)}`."
        raise _invalid("view_range", view_range, f"Its second element `{last}` {smaller}")
    if last != -1 and last < first:
        greater = f"should be greater than or equal to the first element `{first}`."
        raise _invalid("view_range", view_range, f"Its second element `{last}` {greater}")
    return _number("\n".join(lines[first - 1 : None if last == -1 else last]), path, first)


def _required(command: str, arguments: Mapping[str, Any], name: str) -> Any:
    """The argument ``name``. Raises ``EditorError`` if it is missing or empty."""
    if arguments.get(name) in (None, ""):
        raise EditorError(f"Parameter `{name}` is required for command: {command}.")
    return arguments[name]


def _invalid(name: str, value: Any, hint: str) -> EditorError:
    return EditorError(f"Invalid `{name}` parameter: {value}. {hint}")


def _number(text: str, label: str, first: int = 1) -> str:
    return number_lines(printable(clip_head(text, _MAX_CHARS)), label, first)
