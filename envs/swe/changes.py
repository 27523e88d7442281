"""What the agent changed, as a git diff that is made here: its files, read out of its box, against the record's.

No program of the box is asked, so nothing that the agent does to its git, its shell or its repository's data shows.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping

from pathspec import GitIgnoreSpec

from envs.swe.patches import diff_file, is_unusual
from sandbox import TreeFile, TreeLimits

LITTER = ("__pycache__/", "*.pyc", ".pytest_cache/", ".venv", "*.egg-info/")
"""What tools leave behind, in the words of a ``.gitignore``: no part of a patch unless the record has it."""

SKIPPED = frozenset({".git", "__pycache__", ".pytest_cache", ".venv"})
"""Names of files and folders that are not even looked at."""

_FILE = "100644"


def limits_for(base: Mapping[str, str], max_patch: int) -> TreeLimits:
    """What may be read of a repository that starts as ``base`` and may change by ``max_patch`` bytes."""
    sizes = [len(text.encode()) for text in base.values()]
    most = TreeLimits()
    return TreeLimits(max([max_patch, *sizes]), most.total_bytes + sum(sizes), most.files + len(sizes))


def changes(base: Mapping[str, str], found: Mapping[str, TreeFile]) -> Iterator[str]:
    """The file patches that take the files ``base`` to what was ``found``. New files that git would ignore stay out."""
    ignored = _Ignored(base)
    known = {path: text for path, text in base.items() if SKIPPED.isdisjoint(path.split("/"))}
    for path in sorted({*known, *found}):
        if path in known or not ignored(path):
            yield _change(path, known.get(path), found.get(path))


def _change(path: str, old: str | None, file: TreeFile | None) -> str:
    if file is None:
        return diff_file(path, old, None)
    mode = _git_mode(file.mode)
    if mode == _FILE and old is not None and file.data == old.encode():
        return ""
    new = _as_text(file.data)
    if new is None or is_unusual(path):
        shown = json.dumps(path)[1:-1] if is_unusual(path) else path
        return f"diff --git a/{shown} b/{shown}\nBinary files differ\n"
    if old is not None and mode == "120000":
        return diff_file(path, old, None) + diff_file(path, None, new, mode)
    return diff_file(path, old, new, mode)


def _git_mode(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "120000"
    return "100755" if mode & stat.S_IXUSR else _FILE


def _as_text(data: bytes | None) -> str | None:
    """The text, or None where a patch can't carry it: binary, in another encoding than UTF-8, or too large to read."""
    if data is None or b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class _Ignored:
    """Whether git would ignore a new path, by the ``.gitignore`` files that the record brings along."""

    def __init__(self, base: Mapping[str, str]) -> None:
        rules = {path.removesuffix(".gitignore"): text.splitlines() for path, text in base.items() if _is_rules(path)}
        rules[""] = [*LITTER, *rules.get("", ())]
        self._specs = {folder: GitIgnoreSpec.from_lines(lines) for folder, lines in rules.items()}

    def __call__(self, path: str) -> bool:
        parts = path.split("/")
        for depth in reversed(range(len(parts))):
            folder = "".join(f"{part}/" for part in parts[:depth])
            spec = self._specs.get(folder)
            decided = spec.check_file(path.removeprefix(folder)).include if spec else None
            if decided is not None:
                return decided
        return False


def _is_rules(path: str) -> bool:
    return path == ".gitignore" or path.endswith("/.gitignore")
