"""The tool that looks for text in files."""

from __future__ import annotations

import posixpath

from tools.errors import ToolError
from tools.runtime import ToolRuntime
from tools.text import clip, split_lines

_MATCHES_A_FILE = 50
_MATCHES = 200
_LINE_CHARS = 200

_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\[.*^$"})
"""What is not itself in a basic regular expression."""

_GREP = f"""
if [ -d "$3" ]; then exec grep -rnHIF --exclude-dir=.git --exclude-dir=.venv -m{_MATCHES_A_FILE} -e "$1" -- "$3"; fi
grep -nHI -m{_MATCHES_A_FILE} -e "$1" -e "$2" -- "$3"
code=$?
if [ $code -lt 2 ]; then exit $code; fi
exec grep -nHIF -m{_MATCHES_A_FILE} -e "$1" -- "$3"
"""
"""For the term, the term with nothing special in it, and the path. What is no regular expression is text."""


class Search:
    """``search``: one round trip a call."""

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
        workdir, where = self._runtime.sandbox.spec.workdir, self._runtime.path(path)
        inside = posixpath.commonpath([workdir, where]) == workdir
        target = posixpath.relpath(where, workdir) if inside else where
        literal = search_term.translate(_SPECIAL)
        result = await self._runtime.run("sh", "-c", _GREP, "search", search_term, literal, target)
        if result.timed_out:
            raise ToolError(f"the search took more than {self._runtime.timeout:g} seconds; give a smaller path")
        lines = split_lines(result.stdout.decode("utf-8", errors="replace"))
        if lines:
            return self._answer(lines)
        if result.exit_code > 1:
            raise ToolError(f"no such file or directory: {path}")
        return "no matches" if self._runtime.concise else f"No line in {path} holds {search_term!r}."

    def _answer(self, lines: list[str]) -> str:
        shown = [clip(line.removeprefix("./"), _LINE_CHARS) for line in lines[:_MATCHES]]
        if len(lines) > _MATCHES:
            shown.append(f"[{len(lines) - _MATCHES} more matches; give a longer text or a smaller path]")
        return "\n".join(shown)
