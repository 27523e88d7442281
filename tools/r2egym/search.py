"""R2E-Gym's ``search``: ``src/r2egym/agenthub/tools/search.py``. One round trip a call."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

from sandbox import ExecResult
from tools.r2egym.arguments import parse
from tools.r2egym.output import Output
from tools.runtime import ToolRuntime
from tools.text import split_lines

_MOST_FILES = 100

# Says what the path is and where it leads, then finds: for the term, the path, and the names of the files looked at.
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


class Search:
    """In a file the lines that grep finds; in a folder how many lines of which Python files hold the term."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime

    async def run(self, arguments: Mapping[str, Any]) -> Output:
        given = parse("search", arguments)
        names = "*.py" if given.python_only else "*"
        result = await self._runtime.run("sh", "-c", _SEARCH, "search", given.search_term, given.path or ".", names)
        if result.timed_out:
            return Output("", timed_out=True)
        kind, where, found = [*result.stdout.decode("utf-8", errors="replace").split("\n", 2), "", ""][:3]
        if kind == "file":
            return _in_file(given.search_term, where, found, result)
        if kind == "folder":
            return self._in_directory(given.search_term, where, split_lines(found))
        if kind == "nothing":
            return Output(f"Directory '{where}' not found or not a directory.\n", 1)
        return Output(f"Error executing search:\n{result.text}\n", result.exit_code or 1)

    def _in_directory(self, term: str, directory: str, counted: list[str]) -> Output:
        if not counted or "\n" in term or "\r" in term:  # a line never holds its end
            return Output(f'No matches found for "{term}" in {directory}\n')
        if len(counted) > _MOST_FILES:
            text = f'More than {len(counted)} files matched for "{term}" in {directory}. Please narrow your search.\n'
            return Output(text)
        parts = [line.rpartition(":") for line in counted]
        found = [(name, int(count)) for name, _, count in parts if count.isdecimal()]
        lines = [f"{self._shown(posixpath.join(directory, name))} ({count} matches)\n" for name, count in found]
        total = sum(count for _, count in found)
        head, foot = (
            f'Found {total} matches for "{term}" in {directory}:\n',
            f'End of matches for "{term}" in {directory}\n',
        )
        return Output(f"{head}{''.join(lines)}{foot}")

    def _shown(self, path: str) -> str:
        relative = posixpath.relpath(posixpath.join("/", path), self._runtime.sandbox.spec.workdir)
        return relative if relative.startswith("./") else f"./{relative}"


def _in_file(term: str, path: str, found: str, result: ExecResult) -> Output:
    if result.exit_code == 1:
        return Output(f'No matches found for "{term}" in {path}\n')
    if result.exit_code:
        reason = result.stderr.decode("utf-8", errors="replace")
        return Output(f"Error executing grep:\n{reason}\n", result.exit_code)
    return Output(f'Matches for "{term}" in {path}:\n{found.strip()}\n')
