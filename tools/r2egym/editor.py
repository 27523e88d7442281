"""R2E-Gym's ``file_editor``: ``src/r2egym/agenthub/tools/file_editor.py``.

It shows only Python files, and condenses long ones. The undo history is keyed by the path as the call wrote it. A view
and a creation take one round trip to the sandbox, an edit two.
"""

from __future__ import annotations

import argparse
import ast
import errno
import os
import posixpath
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
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
from tools.r2egym.command import Output, format_crash, parse_arguments
from tools.runtime import ToolRuntime

_MAX_LINES = 110  # longer Python files are always condensed
_MAX_CHARS = 10_000
_MIN_HIDDEN_BODY = 3  # a body is hidden if its last line is at least this many lines after its first
_MIN_HIDDEN_DOCSTRING = 4
_LINT = """Your proposed edit has introduced new syntax error(s).
Please read this error message carefully and then retry editing the file.
ERRORS:
"""
_BOM = "\ufeff"

_CREATE = 'if [ -d "$1" ]; then exit 3; elif [ -e "$1" ]; then exit 4; fi; LC_ALL=C; cat > "$1"'


class _EditorError(Exception):
    """A refused command. The agent reads the message after ``ERROR:``; with ``newline`` an empty line comes first."""

    def __init__(self, message: str, *, newline: bool = False) -> None:
        super().__init__(message)
        self.newline = newline


@dataclass(frozen=True, slots=True)
class _Text:
    """A file's text with plain newlines, and the byte order mark and line ends to restore when it is written."""

    text: str
    bom: bool = False
    dos: bool = False

    @classmethod
    def decode(cls, data: bytes) -> _Text:
        """Bytes that are not UTF-8 survive an edit unchanged (surrogateescape)."""
        text = data.decode("utf-8", errors="surrogateescape")
        plain = text.removeprefix(_BOM).replace("\r\n", "\n").replace("\r", "\n")
        dos = text.count("\r\n") == text.count("\n") > 0
        return cls(plain, text.startswith(_BOM), dos)

    def encode(self, text: str) -> bytes:
        """``text`` with the file's byte order mark and line ends."""
        written = text.replace("\n", "\r\n") if self.dos else text
        return f"{_BOM if self.bom else ''}{written}".encode("utf-8", errors="surrogateescape")


class FileEditor:
    """The editor of one episode on one sandbox."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime
        self._history: dict[str, list[str]] = {}

    async def run(self, arguments: Mapping[str, Any]) -> Output:
        given = parse_arguments("file_editor", arguments)
        try:
            return Output(printable(await self._run(given)) + "\n")
        except _EditorError as refused:
            return Output(f"{chr(10) if refused.newline else ''}ERROR: {printable(str(refused))}\n")
        except (TypeError, ValueError, RecursionError, MemoryError) as error:
            # R2E-Gym's editor does not check every value, and Python's parser rejects files that are too complex.
            return Output(f"{format_crash(error)}ERROR: Unhandled exception: {error}\n")

    async def _run(self, given: argparse.Namespace) -> str:
        path = PurePosixPath(given.path)
        if given.command == "create":
            return await self._create(path, given.file_text, given.enable_linting)
        file = await self._file(path)
        if given.command == "view":
            return await self._view(path, file, given.view_range, given.concise.lower() == "true")
        if file is None:
            raise _EditorError(f"The path '{path}' is a directory. Only 'view' can be used on directories.")
        if given.command == "str_replace":
            return await self._str_replace(path, file, given)
        if given.command == "insert":
            return await self._insert(path, file, given)
        if given.command == "undo_edit":
            return await self._undo(path, file)
        raise _EditorError(
            f"Unrecognized command '{given.command}'. Allowed commands: view, create, str_replace, insert, undo_edit."
        )

    async def _file(self, path: PurePosixPath) -> _Text | None:
        """The file at ``path``; None for a directory. Raises ``_EditorError`` if there is neither."""
        absolute = self._absolute(path)
        try:
            return _Text.decode(await self._runtime.sandbox.read_file(absolute, max_bytes=MAX_FILE_BYTES))
        except SandboxFileError:
            kind = (await self._runtime.run("bash", "-c", PATH_KIND, "-", absolute)).stdout.strip()
        if kind == b"nothing":
            raise _EditorError(f"The path '{path}' does not exist.")
        if kind == b"file":
            raise _EditorError(
                f"Failed to read file {path}: no regular file, or larger than {MAX_FILE_BYTES >> 20} MiB"
            )
        return None

    async def _view(self, path: PurePosixPath, file: _Text | None, span: Sequence[int] | None, brief: bool) -> str:
        if file is None:
            return await self._list(path)
        if path.suffix != ".py":
            raise _EditorError(
                f"ERROR: Viewing non-Python files is disallowed for saving context. File '{path.name}' is not a .py "
                "file.",
                newline=True,
            )
        brief = brief or (span is None and len(file.text.splitlines()) > _MAX_LINES)
        lines = _condense(path, file.text) if brief else list(enumerate(file.text.splitlines()))
        shown = [f"{index + 1:6d} {line}" for index, line in _in_range(lines, span)]
        head = (
            f"Here is a condensed view for file: {path}; [Note: Useful for understanding file structure in a concise "
            "manner. Please use specific view_range without concise cmd if you want to explore further into the "
            "relevant parts.]\n"
            if brief
            else f"Here's the result of running `cat -n` on the file: {path}:\n"
        )
        return clip_head(head + "\n".join(shown), _MAX_CHARS)

    async def _list(self, path: PurePosixPath) -> str:
        filters = ["-maxdepth", "2", "-not", "-path", "*/.*", "(", "-type", "d", "-o", "-name", "*.py", ")"]
        result = await self._runtime.run("find", str(path), *filters)
        if problem := result.stderr.decode("utf-8", errors="replace").strip():
            raise _EditorError(problem, newline=True)
        names = sorted(result.stdout.decode("utf-8", errors="surrogateescape").splitlines(keepends=True))
        head = f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden:\n"
        return clip_head(head + "".join(names), _MAX_CHARS)

    async def _create(self, path: PurePosixPath, text: str | None, lint: bool) -> str:
        absolute = self._absolute(path)
        exists = f"File already exists at: {path}. Cannot overwrite with 'create'."
        if text is None:
            kind = (await self._runtime.run("bash", "-c", PATH_KIND, "-", absolute)).stdout
            missing = "Cannot create file without 'file_text' parameter."
            raise _EditorError(missing if kind == b"nothing\n" else exists)
        if lint and path.suffix == ".py":
            _check_syntax(path, text)
        result = await self._runtime.run("bash", "-c", _CREATE, "-", absolute, stdin=_Text("").encode(text))
        if result.exit_code in (3, 4):
            raise _EditorError(exists)
        if not result.ok:
            raise _EditorError(f"Error creating file at {path}: {_os_error(result.text, path)}")
        self._history.setdefault(str(path), []).append("")
        note = "Review the file and make sure that it is as expected. Edit the file if necessary."
        return f"File created at {path}. {_number(text, str(path))}{note}"

    async def _str_replace(self, path: PurePosixPath, file: _Text, given: argparse.Namespace) -> str:
        old: str | None = given.old_str
        if old is None:
            raise _EditorError("Missing required parameter 'old_str' for 'str_replace'.")
        new: str = given.new_str or ""
        count = file.text.count(old)
        if count == 0:
            raise _EditorError(f"No occurrences of '{old}' found in {path} for replacement.")
        if count > 1:
            raise _EditorError(
                f"Multiple occurrences of '{old}' found in {path}. Please ensure it is unique before using str_replace."
            )
        await self._edit(path, file, file.text.replace(old, new), given.enable_linting)
        return describe_replacement(str(path), file.text, old, new, _number)

    async def _insert(self, path: PurePosixPath, file: _Text, given: argparse.Namespace) -> str:
        if given.new_str is None:
            raise _EditorError("Missing required parameter 'new_str' for 'insert'.")
        line: int = given.insert_line
        lines, new = file.text.split("\n"), given.new_str
        if line < 0 or line > len(lines):
            raise _EditorError(f"Invalid insert_line {line}. Must be in [0, {len(lines)}].")
        await self._edit(path, file, "\n".join([*lines[:line], new, *lines[line:]]), given.enable_linting)
        return describe_insertion(str(path), lines, line, new, _number)

    async def _undo(self, path: PurePosixPath, file: _Text) -> str:
        """Restore the text before the last edit. Undoing a creation empties the file."""
        history = self._history.get(str(path))
        if not history:
            raise _EditorError(f"No previous edits found for {path} to undo.")
        before = history.pop()
        await self._write(path, file.encode(before))
        return f"Last edit to {path} undone successfully. {_number(before, str(path))}"

    async def _edit(self, path: PurePosixPath, file: _Text, edited: str, lint: bool) -> None:
        if lint and path.suffix == ".py":
            _check_syntax(path, edited)
        self._history.setdefault(str(path), []).append(file.text)
        await self._write(path, file.encode(edited))

    async def _write(self, path: PurePosixPath, data: bytes) -> None:
        result = await self._runtime.run("bash", "-c", OVERWRITE, "-", self._absolute(path), stdin=data)
        if not result.ok:
            raise _EditorError(f"Failed to write file {path}: {_os_error(result.text, path)}")

    def _absolute(self, path: PurePosixPath) -> str:
        return posixpath.join(self._runtime.sandbox.spec.workdir, str(path))


def _in_range(lines: list[tuple[int, str]], view_range: Sequence[int] | None) -> list[tuple[int, str]]:
    """The numbered ``lines`` within ``view_range``, first to last; -1 as the last means the end."""
    if view_range is None:
        return lines
    (first, last), count = view_range, len(lines)
    if not 1 <= first <= count:
        raise _EditorError(f"Invalid view_range {[*view_range]}: start line must be in [1, {count}]", newline=True)
    if last != -1 and not first <= last <= count:
        raise _EditorError(
            f"Invalid view_range {[*view_range]}: end must be >= start and <= {count}, or -1 to view until end.",
            newline=True,
        )
    return [(index, line) for index, line in lines if first <= index + 1 and (last == -1 or index + 1 <= last)]


def _condense(path: PurePosixPath, text: str) -> list[tuple[int, str]]:
    """The numbered lines to show, from 0, with a note for each hidden span (``_get_elided_lines`` of R2E-Gym's script).

    Raises ``_EditorError`` for a syntax error; ValueError, MemoryError or RecursionError for text that Python's parser
    cannot handle.
    """
    try:
        spans = list(_hidden_spans(_parse_python(path, text)))
    except SyntaxError as error:
        raise _EditorError(f"Syntax error for file {path}: {error}") from None
    hidden = {line for first, last in spans for line in range(first, last + 1)}
    notes = [(first, f"... eliding lines {first + 1}-{last + 1} ...") for first, last in spans]
    visible = [(index, line) for index, line in enumerate(text.splitlines()) if index not in hidden]
    return sorted(notes + visible, key=lambda line: line[0])


def _hidden_spans(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """First and last line, from 0, of each longer function body, and of the inside of each longer class docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0].lineno - 1, _last_line(node.body[-1])
            if last - first >= _MIN_HIDDEN_BODY:
                yield first, last
        elif isinstance(node, ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno - 1, _last_line(node.body[0])
            if last - first >= _MIN_HIDDEN_DOCSTRING:
                yield first + 1, last - 1


def _last_line(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - 1


def _parse_python(path: PurePosixPath, text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, filename=str(path))


def _check_syntax(path: PurePosixPath, text: str) -> None:
    try:
        _parse_python(path, text)
    except SyntaxError as error:
        raise _EditorError(f"{_LINT}{error}", newline=True) from None


def _number(text: str, label: str, first: int = 1) -> str:
    return number_lines(clip_head(text, _MAX_CHARS), label, first)


def _os_error(printed: str, path: PurePosixPath) -> str:
    """The error in Python's words, from bash's message ``bash: line 1: PATH: Permission denied``."""
    reason = printed.strip().rpartition(": ")[2]
    number = next((n for n in errno.errorcode if os.strerror(n) == reason), 0)
    return f"[Errno {number}] {reason}: {str(path)!r}"
