"""The tool that shows and edits files, with the semantics of R2E-Gym's and SWE-agent's editor.

A view takes one round trip to the sandbox and an edit two. The undo history stays outside of the sandbox.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Literal

from sandbox import SandboxFileError
from tools.runtime import ToolRuntime
from tools.text import DOS, line_end, number_lines, split_lines, with_line_ends
from tools.types import ToolError

Command = Literal["view", "create", "str_replace", "insert", "undo_edit"]

_CONTEXT_LINES = 4  # lines shown on either side of an edit
_MAX_LISTED_MATCHES = 10
_MIN_HIDDEN_BODY = 5  # lines
_NOTE_CHARS = 120  # reserved for the note of a truncated view

# cat keeps the file's mode and follows links; replacing the file would not.
_OVERWRITE = 'cat > "$1"'
_CREATE = 'if [ -e "$1" ]; then echo exists; exit 3; fi; mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_LIST = (
    'if [ -d "$1" ]; then cd -- "$1" && find . -mindepth 1 -maxdepth 2 -not -path "*/.*" | LC_ALL=C sort; exit 0; fi; '
    'if [ -e "$1" ]; then stat -L -c %s -- "$1"; exit 4; fi; exit 5'
)


class FileEditor:
    """``file_editor`` on one sandbox, with the undo history of one episode."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime
        self._history: dict[str, list[bytes | None]] = {}  # None: the file did not exist

    async def file_editor(
        self,
        command: Command,
        path: str,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        view_range: list[int] | None = None,
        concise: bool = False,
    ) -> str:
        """View, create and edit text files.

        `view` shows a file with numbered lines, or lists a directory two levels deep. `create` writes a new file.
        `str_replace` replaces `old_str`, which must match exactly one place of the file to the character, by `new_str`.
        `insert` puts `new_str` after a line. `undo_edit` takes back the last edit of a file.

        Args:
            command: What to do.
            path: The file (or directory, for `view`), absolute or relative to the working directory.
            file_text: The text of the file; for `create`.
            old_str: The text to replace; for `str_replace`.
            new_str: The text to put in its place (nothing if not given); for `str_replace`. The lines to put in; for
                `insert`.
            insert_line: The line after which to insert, 0 for the top; for `insert`.
            view_range: The first and last line to show, e.g. [11, 20]; -1 as the last means the end; for `view`.
            concise: Leave out the bodies of longer functions of a Python file; for `view`.
        """
        absolute = self._runtime.path(path)
        if command == "view":
            return await self._view(absolute, view_range, concise)
        if command == "create":
            return await self._create(absolute, _required(file_text, "create", "file_text"))
        if command == "str_replace":
            return await self._str_replace(absolute, _required(old_str, "str_replace", "old_str"), new_str or "")
        if command == "insert":
            if insert_line is None:
                raise ToolError("insert needs the argument 'insert_line'")
            return await self._insert(absolute, insert_line, _required(new_str, "insert", "new_str"))
        return await self._undo(absolute)

    async def _view(self, path: str, view_range: list[int] | None, condensed: bool) -> str:
        try:
            content = await self._runtime.sandbox.read_file(path)
        except SandboxFileError:
            return await self._list(path)
        lines = split_lines(content.decode("utf-8", errors="replace"))
        first, last = _line_range(view_range, len(lines))
        if condensed and view_range is None:
            return outline(lines)
        shown = lines[first - 1 : last]
        if self._runtime.concise:
            return "\n".join(shown)
        return self._numbered(path, shown, first, len(lines)) if lines else f"{path} is empty."

    def _numbered(self, path: str, shown: list[str], first: int, count: int) -> str:
        """The lines with their numbers, truncated at ``max_chars`` with a note on how to see the rest."""
        head = f"{path}, {count} lines:\n"
        text = head + number_lines(shown, first)
        complete = text[: self._runtime.max_chars - _NOTE_CHARS].rpartition("\n")[0]
        lines = complete.count("\n")
        if len(text) <= self._runtime.max_chars or not lines:
            return text
        last = first + lines - 1
        return f"{complete}\n[cut after line {last}: view_range [{last + 1}, {count}] shows more, search finds lines]"

    async def _list(self, path: str) -> str:
        """The listing of the directory ``path``. Raises ``ToolError`` if it is not a directory."""
        result = await self._runtime.run("bash", "-c", _LIST, "-", path)
        text = result.stdout.decode("utf-8", errors="replace")
        if result.exit_code == 4:
            raise ToolError(f"{path} cannot be shown: it is no regular file or too large ({text.strip()} bytes)")
        if not result.ok:
            raise ToolError(f"no such file or directory: {path}")
        names = [name.removeprefix("./") for name in split_lines(text)]
        if self._runtime.concise:
            return "\n".join(names)
        return "\n".join([f"{path}, files and directories up to two levels deep, hidden ones left out:", *names])

    async def _create(self, path: str, text: str) -> str:
        result = await self._runtime.run("bash", "-c", _CREATE, "-", path, stdin=text.encode())
        if result.exit_code == 3:
            raise ToolError(f"{path} exists already; edit it with str_replace")
        self._check_written(result.ok, path, result.text)
        self._history.setdefault(path, []).append(None)
        return "created" if self._runtime.concise else f"Created {path}."

    async def _str_replace(self, path: str, old: str, new: str) -> str:
        if not old:
            raise ToolError("old_str is empty; give the text to replace")
        if old == new:
            raise ToolError("old_str and new_str are the same; nothing would change")
        text = await self._read(path)
        end = line_end(text) if old in text else DOS if DOS in text else "\n"  # models write plain newlines
        old, new = with_line_ends(old, end), with_line_ends(new, end)
        count = text.count(old)
        if count != 1:
            raise ToolError(self._match_error(path, text, old, count))
        start = text.index(old)
        edited = text[:start] + new + text[start + len(old) :]
        await self._write(path, text, edited)
        first = text.count("\n", 0, start) + 1
        return self._edit_result(path, edited, first, first + new.count("\n"))

    def _match_error(self, path: str, text: str, old: str, count: int) -> str:
        if self._runtime.concise:
            return f"found {count} times" if count else "not found"
        if not count:
            return f"Nothing replaced: old_str does not occur in {path}. It must match to the character."
        pieces = text.split(old, _MAX_LISTED_MATCHES)[:-1]
        before = itertools.accumulate(piece.count("\n") for piece in pieces)
        lines = [1 + newlines + n * old.count("\n") for n, newlines in enumerate(before)]
        shown = ", ".join(map(str, lines)) + (", ..." if count > _MAX_LISTED_MATCHES else "")
        return f"Nothing replaced: old_str occurs {count} times in {path}, at lines {shown}. Give more of its context."

    async def _insert(self, path: str, line: int, new: str) -> str:
        text = await self._read(path)
        end = line_end(text)
        lines, new = text.split(end), with_line_ends(new, end)
        count = len(split_lines(text))
        if not 0 <= line <= count:
            raise ToolError(f"insert_line must be from 0 to {count}, the number of lines of {path}; got {line}")
        if line == count and text and not text.endswith("\n"):
            edited = f"{text}{end}{new}"
        else:
            edited = end.join([*lines[:line], new.removesuffix(end), *lines[line:]])
        await self._write(path, text, edited)
        return self._edit_result(path, edited, line + 1, line + 1 + new.removesuffix(end).count("\n"))

    async def _undo(self, path: str) -> str:
        history = self._history.get(path)
        if not history:
            raise ToolError(f"there is no edit of {path} to take back")
        before = history[-1]
        if before is None:
            result = await self._runtime.run("rm", "-f", "--", path)
        else:
            result = await self._runtime.run("bash", "-c", _OVERWRITE, "-", path, stdin=before)
        self._check_written(result.ok, path, result.text)
        history.pop()
        return "undone" if self._runtime.concise else f"The last edit of {path} was taken back."

    async def _read(self, path: str) -> str:
        """The file's text. Bytes that are not UTF-8 survive an edit unchanged (surrogateescape)."""
        try:
            return (await self._runtime.sandbox.read_file(path)).decode("utf-8", errors="surrogateescape")
        except SandboxFileError:
            raise ToolError(f"no such text file: {path}") from None

    async def _write(self, path: str, before: str, after: str) -> None:
        old, new = (text.encode("utf-8", errors="surrogateescape") for text in (before, after))
        result = await self._runtime.run("bash", "-c", _OVERWRITE, "-", path, stdin=new)
        self._check_written(result.ok, path, result.text)
        self._history.setdefault(path, []).append(old)

    def _check_written(self, ok: bool, path: str, output: str) -> None:
        if not ok:
            reason = output.strip().splitlines()[-1:] or ["no reason given"]
            raise ToolError(f"{path} could not be written: {reason[0]}")

    def _edit_result(self, path: str, text: str, first: int, last: int) -> str:
        """The result of an edit of lines ``first`` to ``last``."""
        if self._runtime.concise:
            return "edited"
        lines = split_lines(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
        top = max(1, first - _CONTEXT_LINES)
        return f"Edited {path}. It now reads:\n{number_lines(lines[top - 1 : last + _CONTEXT_LINES], top)}"


def _required(value: str | None, command: str, name: str) -> str:
    if value is None:
        raise ToolError(f"{command} needs the argument {name!r}")
    return value


def _line_range(view_range: list[int] | None, count: int) -> tuple[int, int]:
    """First and last line to show, from 1. Raises ``ToolError`` for a range outside of the file."""
    if view_range is None:
        return 1, count
    if len(view_range) != 2:
        raise ToolError("view_range must be two numbers, the first and the last line, e.g. [1, 20]")
    first, last = view_range
    last = count if last == -1 else last
    if not 1 <= first <= last:
        raise ToolError(f"view_range {view_range} is no range of lines; the file has {count}")
    if first > count:
        raise ToolError(f"view_range {view_range} starts past the end; the file has {count} lines")
    return first, min(last, count)


def outline(lines: list[str]) -> str:
    """Numbered lines with a note for each function body of 5 lines or more. Text that does not parse is shown in
    full."""
    hidden: dict[int, int] = {}
    for first, last in _long_bodies("\n".join(lines)):
        hidden.setdefault(first, last)
    shown = []
    number = 1
    while number <= len(lines):
        if number in hidden:
            shown.append(f"       ... lines {number}-{hidden[number]} left out ...")
            number = hidden[number] + 1
        else:
            shown.append(f"{number:6d}\t{lines[number - 1]}")
            number += 1
    return "\n".join(shown)


def _long_bodies(source: str) -> Iterator[tuple[int, int]]:
    """First and last line of each long function body, outer functions before those inside them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not Python, or too complex
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
            if last - first + 1 >= _MIN_HIDDEN_BODY and first > node.lineno:
                yield first, last
