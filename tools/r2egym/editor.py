"""R2E-Gym's ``file_editor``: ``src/r2egym/agenthub/tools/file_editor.py``.

Only Python files are shown, long ones condensed; a file is known to the history by the path as it was written. A view
costs one round trip to the sandbox, a creation one, an edit two.
"""

from __future__ import annotations

import argparse
import ast
import errno
import os
import posixpath
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from sandbox import SandboxFileError
from tools.r2egym.arguments import parse
from tools.r2egym.condensed import condensed
from tools.r2egym.output import Output, crash
from tools.runtime import ToolRuntime

_CONTEXT_LINES = 4
_MOST_LINES = 110  # a longer Python file is condensed, asked for or not
_MOST_CHARS = 10_000
_MOST_BYTES = 16 << 20
_CLIPPED = (
    "<response clipped><NOTE>To save on context only part of this file has been shown to you. You should retry this "
    "tool after you have searched inside the file with `grep -n` in order to find the line numbers of what you are "
    "looking for.</NOTE>"
)
_LINT = """Your proposed edit has introduced new syntax error(s).
Please read this error message carefully and then retry editing the file.
ERRORS:
"""
_BOM = "\ufeff"

_KIND = 'if [ -d "$1" ]; then echo folder; elif [ -e "$1" ]; then echo file; else echo nothing; fi'
_CREATE = 'if [ -d "$1" ]; then exit 3; elif [ -e "$1" ]; then exit 4; fi; LC_ALL=C; cat > "$1"'
_OVERWRITE = 'LC_ALL=C; cat > "$1"'


class _Refused(Exception):
    """What the editor answers after ``ERROR:``. ``shown``: that stands on the answer's second line, not the first."""

    def __init__(self, message: str, *, shown: bool = False) -> None:
        super().__init__(message)
        self.shown = shown


@dataclass(frozen=True, slots=True)
class _Text:
    """A file's text with plain newlines, and what is to be put back when it is written."""

    text: str
    bom: bool = False
    dos: bool = False

    @classmethod
    def of(cls, data: bytes) -> _Text:
        """Bytes that are no UTF-8 come through an edit unchanged (surrogateescape)."""
        text = data.decode("utf-8", errors="surrogateescape")
        plain = text.removeprefix(_BOM).replace("\r\n", "\n").replace("\r", "\n")
        dos = text.count("\r\n") == text.count("\n") > 0
        return cls(plain, text.startswith(_BOM), dos)

    def encode(self, text: str) -> bytes:
        """``text`` as the file is to hold it."""
        written = text.replace("\n", "\r\n") if self.dos else text
        return f"{_BOM if self.bom else ''}{written}".encode("utf-8", errors="surrogateescape")


class FileEditor:
    """The editor of one episode on one sandbox."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime
        self._history: dict[str, list[str]] = {}

    async def run(self, arguments: Mapping[str, Any]) -> Output:
        given = parse("file_editor", arguments)
        try:
            return Output(_printable(await self._run(given)) + "\n")
        except _Refused as refused:
            return Output(f"{chr(10) if refused.shown else ''}ERROR: {_printable(str(refused))}\n")
        except (TypeError, ValueError, RecursionError, MemoryError) as error:
            # Of a value that R2E-Gym's editor does not look at, or of a file that is too complex for Python's parser.
            return Output(f"{crash(error)}ERROR: Unhandled exception: {error}\n")

    async def _run(self, given: argparse.Namespace) -> str:
        path = PurePosixPath(given.path)
        if given.command == "create":
            return await self._create(path, given.file_text, given.enable_linting)
        file = await self._file(path)
        if given.command == "view":
            return await self._view(path, file, given.view_range, given.concise.lower() == "true")
        if file is None:
            raise _Refused(f"The path '{path}' is a directory. Only 'view' can be used on directories.")
        if given.command == "str_replace":
            return await self._str_replace(path, file, given)
        if given.command == "insert":
            return await self._insert(path, file, given)
        if given.command == "undo_edit":
            return await self._undo(path, file)
        raise _Refused(
            f"Unrecognized command '{given.command}'. Allowed commands: view, create, str_replace, insert, undo_edit."
        )

    async def _file(self, path: PurePosixPath) -> _Text | None:
        """The file at ``path``; None for a folder. Raises ``_Refused`` where nothing is there."""
        where = self._where(path)
        try:
            return _Text.of(await self._runtime.sandbox.read_file(where, max_bytes=_MOST_BYTES))
        except SandboxFileError:
            kind = (await self._runtime.run("bash", "-c", _KIND, "-", where)).stdout.strip()
        if kind == b"nothing":
            raise _Refused(f"The path '{path}' does not exist.")
        if kind == b"file":
            raise _Refused(f"Failed to read file {path}: no regular file, or larger than {_MOST_BYTES >> 20} MiB")
        return None

    async def _view(self, path: PurePosixPath, file: _Text | None, span: Sequence[int] | None, concise: bool) -> str:
        if file is None:
            return await self._list(path)
        if path.suffix != ".py":
            raise _Refused(
                f"ERROR: Viewing non-Python files is disallowed for saving context. File '{path.name}' is not a .py "
                "file.",
                shown=True,
            )
        concise = concise or (span is None and len(file.text.splitlines()) > _MOST_LINES)
        lines = _condensed(path, file.text) if concise else list(enumerate(file.text.splitlines()))
        shown = [f"{at + 1:6d} {line}" for at, line in _between(lines, span)]
        head = (
            f"Here is a condensed view for file: {path}; [Note: Useful for understanding file structure in a concise "
            "manner. Please use specific view_range without concise cmd if you want to explore further into the "
            "relevant parts.]\n"
            if concise
            else f"Here's the result of running `cat -n` on the file: {path}:\n"
        )
        return _clipped(head + "\n".join(shown))

    async def _list(self, path: PurePosixPath) -> str:
        filters = ["-maxdepth", "2", "-not", "-path", "*/.*", "(", "-type", "d", "-o", "-name", "*.py", ")"]
        result = await self._runtime.run("find", str(path), *filters)
        if problem := result.stderr.decode("utf-8", errors="replace").strip():
            raise _Refused(problem, shown=True)
        names = sorted(result.stdout.decode("utf-8", errors="surrogateescape").splitlines(keepends=True))
        head = f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden:\n"
        return _clipped(head + "".join(names))

    async def _create(self, path: PurePosixPath, text: str | None, lint: bool) -> str:
        kind = (
            None if text is not None else (await self._runtime.run("bash", "-c", _KIND, "-", self._where(path))).stdout
        )
        exists = f"File already exists at: {path}. Cannot overwrite with 'create'."
        if text is None:
            missing = "Cannot create file without 'file_text' parameter."
            raise _Refused(missing if kind == b"nothing\n" else exists)
        if lint and path.suffix == ".py":
            _check_syntax(path, text)
        result = await self._runtime.run("bash", "-c", _CREATE, "-", self._where(path), stdin=_Text("").encode(text))
        if result.exit_code in (3, 4):
            raise _Refused(exists)
        if not result.ok:
            raise _Refused(f"Error creating file at {path}: {_os_error(result.text, path)}")
        self._history.setdefault(str(path), []).append("")
        shown = _numbered(text, str(path))
        note = "Review the file and make sure that it is as expected. Edit the file if necessary."
        return f"File created at {path}. {shown}{note}"

    async def _str_replace(self, path: PurePosixPath, file: _Text, given: argparse.Namespace) -> str:
        old: str | None = given.old_str
        if old is None:
            raise _Refused("Missing required parameter 'old_str' for 'str_replace'.")
        new: str = given.new_str or ""
        count = file.text.count(old)
        if count == 0:
            raise _Refused(f"No occurrences of '{old}' found in {path} for replacement.")
        if count > 1:
            raise _Refused(
                f"Multiple occurrences of '{old}' found in {path}. Please ensure it is unique before using str_replace."
            )
        edited = file.text.replace(old, new)
        await self._edit(path, file, edited, given.enable_linting)
        line = file.text.split(old)[0].count("\n")
        first = max(0, line - _CONTEXT_LINES)
        around = edited.split("\n")[first : line + _CONTEXT_LINES + new.count("\n") + 1]
        shown = _numbered("\n".join(around), f"a snippet of {path}", first + 1)
        note = "Review the changes and make sure they are as expected. Edit the file again if necessary."
        return f"The file {path} has been edited. {shown}{note}"

    async def _insert(self, path: PurePosixPath, file: _Text, given: argparse.Namespace) -> str:
        if given.new_str is None:
            raise _Refused("Missing required parameter 'new_str' for 'insert'.")
        line: int = given.insert_line
        lines, new = file.text.split("\n"), given.new_str.split("\n")
        if line < 0 or line > len(lines):
            raise _Refused(f"Invalid insert_line {line}. Must be in [0, {len(lines)}].")
        await self._edit(path, file, "\n".join([*lines[:line], *new, *lines[line:]]), given.enable_linting)
        around = [*lines[max(0, line - _CONTEXT_LINES) : line], *new, *lines[line : line + _CONTEXT_LINES]]
        first = max(1, line - _CONTEXT_LINES + 1)
        shown = _numbered("\n".join(around), "a snippet of the edited file", first)
        note = (
            "Review the changes and make sure they are as expected (correct indentation, no duplicate lines, etc). "
            "Edit the file again if necessary."
        )
        return f"The file {path} has been edited. {shown}{note}"

    async def _undo(self, path: PurePosixPath, file: _Text) -> str:
        """Write the text before the last edit; a file that was created is left, empty."""
        history = self._history.get(str(path))
        if not history:
            raise _Refused(f"No previous edits found for {path} to undo.")
        before = history.pop()
        await self._write(path, file.encode(before))
        return f"Last edit to {path} undone successfully. {_numbered(before, str(path))}"

    async def _edit(self, path: PurePosixPath, file: _Text, edited: str, lint: bool) -> None:
        if lint and path.suffix == ".py":
            _check_syntax(path, edited)
        self._history.setdefault(str(path), []).append(file.text)
        await self._write(path, file.encode(edited))

    async def _write(self, path: PurePosixPath, data: bytes) -> None:
        result = await self._runtime.run("bash", "-c", _OVERWRITE, "-", self._where(path), stdin=data)
        if not result.ok:
            raise _Refused(f"Failed to write file {path}: {_os_error(result.text, path)}")

    def _where(self, path: PurePosixPath) -> str:
        return posixpath.join(self._runtime.sandbox.spec.workdir, str(path))


def _between(lines: list[tuple[int, str]], span: Sequence[int] | None) -> list[tuple[int, str]]:
    """Those of ``lines`` from the first to the last number of ``span`` (-1: to the end)."""
    if span is None:
        return lines
    (first, last), count = span, len(lines)
    if not 1 <= first <= count:
        raise _Refused(f"Invalid view_range {[*span]}: start line must be in [1, {count}]", shown=True)
    if last != -1 and not first <= last <= count:
        raise _Refused(
            f"Invalid view_range {[*span]}: end must be >= start and <= {count}, or -1 to view until end.", shown=True
        )
    return [(at, line) for at, line in lines if first <= at + 1 and (last == -1 or at + 1 <= last)]


def _condensed(path: PurePosixPath, text: str) -> list[tuple[int, str]]:
    try:
        return condensed(text, str(path))
    except SyntaxError as error:
        raise _Refused(f"Syntax error for file {path}: {error}") from None


def _check_syntax(path: PurePosixPath, text: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text, filename=str(path))
    except SyntaxError as error:
        raise _Refused(f"{_LINT}{error}", shown=True) from None


def _numbered(text: str, what: str, first: int = 1) -> str:
    lines = _clipped(text).expandtabs().split("\n")
    numbered = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, first))
    return f"Here's the result of running `cat -n` on {what}:\n{numbered}\n"


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else text[:_MOST_CHARS] + _CLIPPED


def _printable(text: str) -> str:
    """``text`` with a mark in the place of each byte that was no UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _os_error(printed: str, path: PurePosixPath) -> str:
    """The error as Python words it, from what bash ``printed``: ``bash: line 1: PATH: Permission denied``."""
    reason = printed.strip().rpartition(": ")[2]
    number = next((n for n in errno.errorcode if os.strerror(n) == reason), 0)
    return f"[Errno {number}] {reason}: {str(path)!r}"
