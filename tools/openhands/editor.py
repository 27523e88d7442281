"""OpenHands' ``str_replace_editor``: ``openhands_aci/editor/editor.py`` of openhands-aci 0.1.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sandbox import SandboxFileError
from tools.runtime import ToolRuntime

_CONTEXT_LINES = 4
_MOST_CHARS = 16_000
_MOST_BYTES = 16 << 20
_CLIPPED = (
    "<response clipped><NOTE>To save on context only part of this file has been shown to you. You should retry this "
    "tool after you have searched inside the file with `grep -n` in order to find the line numbers of what you are "
    "looking for.</NOTE>"
)
_COMMANDS = "view, create, str_replace, insert, undo_edit"
_KIND = 'if [ -d "$1" ]; then echo folder; elif [ -e "$1" ]; then echo file; else echo nothing; fi'
_WRITE = 'LC_ALL=C; cat > "$1"'


class EditorRefused(Exception):
    """What the editor answers after ``ERROR:``."""


class StrReplaceEditor:
    """The editor of one episode on one sandbox; its history is by path."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime
        self._history: dict[str, list[str]] = {}

    async def run(self, command: str, path: str, **given: Any) -> str:
        """What the editor answers. Raises ``EditorRefused``."""
        if not path.startswith("/"):
            hint = f"The path should be an absolute path, starting with `/`. Maybe you meant {path}?"
            raise _invalid("path", path, hint)
        text = await self._text(command, path)
        if command == "view":
            return _viewed(text, path, given.get("view_range")) if text is not None else await self._list(path, given)
        if command == "create":
            return await self._create(path, _needed(command, given, "file_text"))
        if text is None:
            only = f"The path {path} is a directory and only the `view` command can be used on directories."
            raise _invalid("path", path, only)
        if command == "str_replace":
            return await self._replace(path, text, _needed(command, given, "old_str"), given.get("new_str"))
        if command == "insert":
            line = _needed(command, given, "insert_line")
            return await self._insert(path, text, line, _needed(command, given, "new_str"))
        if command == "undo_edit":
            return await self._undo(path)
        raise EditorRefused(
            f"Unrecognized command {command}. The allowed commands for the oh_editor tool are: {_COMMANDS}"
        )

    async def _text(self, command: str, path: str) -> str | None:
        """The file's text; None for a folder, and for what is to be created."""
        try:
            data = await self._runtime.sandbox.read_file(path, max_bytes=_MOST_BYTES)
            kind = b"file"
        except SandboxFileError:
            data, kind = b"", (await self._runtime.run("bash", "-c", _KIND, "-", path)).stdout.strip()
        if command == "create":
            if kind != b"nothing":
                hint = f"File already exists at: {path}. Cannot overwrite files using command `create`."
                raise _invalid("path", path, hint)
            return None
        if kind == b"nothing":
            raise _invalid("path", path, f"The path {path} does not exist. Please provide a valid path.")
        return None if kind == b"folder" else data.decode("utf-8", errors="surrogateescape")

    async def _list(self, path: str, given: Mapping[str, Any]) -> str:
        if span := given.get("view_range"):
            hint = "The `view_range` parameter is not allowed when `path` points to a directory."
            raise _invalid("view_range", span, hint)
        result = await self._runtime.run("find", path, "-maxdepth", "2", "-not", "-path", "*/.*")
        if problem := result.stderr.decode("utf-8", errors="replace"):
            raise EditorRefused(problem)
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
        new, count = new or "", text.count(old)
        if count == 0:
            raise EditorRefused(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
        if count > 1:
            lines = [number for number, line in enumerate(text.split("\n"), 1) if old in line]
            raise EditorRefused(
                f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines {lines}. Please "
                "ensure it is unique."
            )
        edited = text.replace(old, new)
        await self._write(path, edited)
        self._history.setdefault(path, []).append(text)
        line = text.split(old)[0].count("\n")
        first = max(0, line - _CONTEXT_LINES)
        around = edited.split("\n")[first : line + _CONTEXT_LINES + new.count("\n") + 1]
        shown = _numbered("\n".join(around), f"a snippet of {path}", first + 1)
        note = "Review the changes and make sure they are as expected. Edit the file again if necessary."
        return f"The file {path} has been edited. {shown}{note}"

    async def _insert(self, path: str, text: str, line: int, new: str) -> str:
        lines, added = text.split("\n"), new.split("\n")
        if not 0 <= line <= len(lines):
            hint = f"It should be within the range of lines of the file: {[0, len(lines)]}"
            raise _invalid("insert_line", line, hint)
        await self._write(path, "\n".join([*lines[:line], *added, *lines[line:]]))
        self._history.setdefault(path, []).append(text)
        around = [*lines[max(0, line - _CONTEXT_LINES) : line], *added, *lines[line : line + _CONTEXT_LINES]]
        shown = _numbered("\n".join(around), "a snippet of the edited file", max(1, line - _CONTEXT_LINES + 1))
        note = (
            "Review the changes and make sure they are as expected (correct indentation, no duplicate lines, etc). "
            "Edit the file again if necessary."
        )
        return f"The file {path} has been edited. {shown}{note}"

    async def _undo(self, path: str) -> str:
        history = self._history.get(path)
        if not history:
            raise EditorRefused(f"No edit history found for {path}.")
        before = history.pop()
        await self._write(path, before)
        return f"Last edit to {path} undone successfully. {_numbered(before, path)}"

    async def _write(self, path: str, text: str) -> None:
        data = text.encode("utf-8", errors="surrogateescape")
        result = await self._runtime.run("bash", "-c", _WRITE, "-", path, stdin=data)
        if not result.ok:
            reason = result.text.strip().rpartition(": ")[2]
            raise EditorRefused(f"Ran into {reason}: '{path}' while trying to write to {path}")


def _viewed(text: str, path: str, span: Sequence[Any] | None) -> str:
    if not span:
        return _numbered(text, path)
    if len(span) != 2 or not all(isinstance(number, int) for number in span):
        raise _invalid("view_range", span, "It should be a list of two integers.")
    lines, (first, last) = text.split("\n"), span
    if not 1 <= first <= len(lines):
        within = f"should be within the range of lines of the file: {[1, len(lines)]}."
        raise _invalid("view_range", span, f"Its first element `{first}` {within}")
    if last > len(lines):
        smaller = f"should be smaller than the number of lines in the file: `{len(lines)}`."
        raise _invalid("view_range", span, f"Its second element `{last}` {smaller}")
    if last != -1 and last < first:
        greater = f"should be greater than or equal to the first element `{first}`."
        raise _invalid("view_range", span, f"Its second element `{last}` {greater}")
    return _numbered("\n".join(lines[first - 1 : None if last == -1 else last]), path, first)


def _needed(command: str, given: Mapping[str, Any], name: str) -> Any:
    """The argument ``name``; empty text counts as none."""
    if given.get(name) in (None, ""):
        raise EditorRefused(f"Parameter `{name}` is required for command: {command}.")
    return given[name]


def _invalid(name: str, value: Any, hint: str) -> EditorRefused:
    return EditorRefused(f"Invalid `{name}` parameter: {value}. {hint}")


def _numbered(text: str, what: str, first: int = 1) -> str:
    clipped = text if len(text) <= _MOST_CHARS else text[:_MOST_CHARS] + _CLIPPED
    shown = clipped.encode("utf-8", "surrogateescape").decode("utf-8", "replace").expandtabs()
    numbered = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(shown.split("\n"), first))
    return f"Here's the result of running `cat -n` on {what}:\n{numbered}\n"
