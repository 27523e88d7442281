"""What the agent changed, as git file patches that are made here: its files, read out of its sandbox, against the base.

No program of the sandbox is asked, so nothing that the agent does to its git, its shell or its repository's data shows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from pathspec import GitIgnoreSpec

from envs.swe.diff.git_diff import FilePatch, diff_file, is_unusual
from envs.swe.diff.snapshot import Base, git_mode
from sandbox import TreeFile

LITTER = ("__pycache__/", "*.pyc", ".pytest_cache/", ".venv", "*.egg-info/")
"""What tools leave behind, in the words of a ``.gitignore``: no part of a patch unless the base has it."""


def changed_paths(base: Base, found: Mapping[str, TreeFile]) -> list[str]:
    """The paths whose file is not the base's, sorted; those of new files also where git would ignore them."""
    gone = [path for path in base.modes if path not in found]
    return sorted([*gone, *(path for path, file in found.items() if not base.has(path, file))])


def needed(base: Base, found: Mapping[str, TreeFile], paths: Collection[str]) -> frozenset[str]:
    """Git's names of the contents that :func:`changes` needs beside the files themselves."""
    before = {base.blobs[path] for path in {*paths, *base.rules} if path in base.blobs}
    return frozenset(before | {found[path].blob for path in paths if path in found} - {""})


def changes(
    base: Base, found: Mapping[str, TreeFile], paths: Collection[str], contents: Mapping[str, bytes]
) -> Iterator[FilePatch]:
    """The file patches that take the base to what was ``found`` at ``paths``. ``contents`` are those ``needed``.

    New files that git would ignore by the base's rules stay out. What is no text has a patch that can't be used.
    """
    ignored = _Ignored(base, found, contents)
    for path in paths:
        old = TreeFile(base.modes[path], contents.get(base.blobs[path])) if path in base.modes else None
        new = found.get(path)
        if new is not None and new.blob:
            new = replace(new, data=contents.get(new.blob))
            if new.data is None and old is not None and new.blob == base.blobs[path]:  # too large to look up
                old, new = replace(old, data=b""), replace(new, data=b"")
        if old is not None or not (base.is_other(path) or ignored(path)):
            yield from _changes(path, old, new)


def _changes(path: str, old: TreeFile | None, new: TreeFile | None) -> Iterator[FilePatch]:
    """The patches of one path: two where what stands there is of another kind now, or another link."""
    if old and new and old.data is not None and (old.data, git_mode(old.mode)) == (new.data, git_mode(new.mode)):
        return
    if old and new and "120000" in (git_mode(old.mode), git_mode(new.mode)):
        yield _change(path, old, None)
        yield _change(path, None, new)
    elif old or new:
        yield _change(path, old, new)


def _change(path: str, old: TreeFile | None, new: TreeFile | None) -> FilePatch:
    modes = git_mode(old.mode if old else 0), git_mode(new.mode if new else 0)
    is_chmod = old is not None and new is not None and old.data is not None and old.data == new.data
    before, after = (_as_text(b"" if is_chmod or file is None else file.data) for file in (old, new))
    if is_unusual(path) or before is None or after is None:
        shown = json.dumps(path)[1:-1] if is_unusual(path) else path
        text = f"diff --git a/{shown} b/{shown}\nBinary files differ\n"
        return FilePatch(shown, text, frozenset({path}), is_new=old is None, unusable="binary change")
    text = diff_file(path, before if old else None, after if new else None, modes)
    return FilePatch(path, text, frozenset({path}), rebuilt=text, is_new=old is None)


def _as_text(data: bytes | None) -> str | None:
    """The text, or None where a patch can't carry it: binary, in another encoding than UTF-8, or too large to read."""
    if data is None or b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class _Ignored:
    """Whether git would ignore a new path, by the ``.gitignore`` files that the base brings along.

    Of those that came later only a lone ``*`` is heeded, by which caches keep themselves out of git: patterns of an
    agent's could take for ever to match.
    """

    def __init__(self, base: Base, found: Mapping[str, TreeFile], contents: Mapping[str, bytes]) -> None:
        texts = {path: contents.get(base.blobs[path], b"").decode(errors="surrogateescape") for path in base.rules}
        rules = {_directory(path): text.splitlines() for path, text in texts.items()}
        rules |= {
            _directory(path): ["*"] for path, file in found.items() if path not in base.modes and _is_cache(path, file)
        }
        rules[""] = [*LITTER, *rules.get("", ())]
        self._specs = {directory: GitIgnoreSpec.from_lines(lines) for directory, lines in rules.items()}
        self._directories: dict[str, bool] = {}

    def __call__(self, path: str) -> bool:
        above = path.rpartition("/")[0]
        return self._is_in_ignored(above) or self._matches(path)

    def _is_in_ignored(self, directory: str) -> bool:
        """Whether a directory is ignored, or one above it: git does not look into those again."""
        if directory not in self._directories:
            above = directory.rpartition("/")[0]
            self._directories[directory] = bool(directory) and (
                self._is_in_ignored(above) or self._matches(f"{directory}/")
            )
        return self._directories[directory]

    def _matches(self, path: str) -> bool:
        parts = path.removesuffix("/").split("/")
        for depth in reversed(range(len(parts))):
            directory = "".join(f"{part}/" for part in parts[:depth])
            spec = self._specs.get(directory)
            decided = spec.check_file(path.removeprefix(directory)).include if spec else None
            if decided is not None:
                return decided
        return False


def _directory(path: str) -> str:
    return path.removesuffix(".gitignore")


def _is_cache(path: str, file: TreeFile) -> bool:
    """Whether a file is a ``.gitignore`` that ignores all that is beside it."""
    if path.rpartition("/")[2] != ".gitignore" or "/" not in path or file.data is None:
        return False
    return [line for line in file.data.splitlines() if line and not line.startswith(b"#")] == [b"*"]
