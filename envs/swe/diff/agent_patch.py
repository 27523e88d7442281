"""Makes git file patches from the files of the agent's sandbox and the base snapshot.

No program of the sandbox runs, so changes to its git, shell or repository data have no effect on the patch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from pathspec import GitIgnoreSpec

from envs.swe.diff.git_diff import FilePatch, diff_file, is_unsafe_path
from envs.swe.diff.snapshot import BaseSnapshot, git_mode
from sandbox import TreeFile

BUILD_ARTIFACTS = ("__pycache__/", "*.pyc", ".pytest_cache/", ".venv", "*.egg-info/")
"""``.gitignore`` patterns of files that tools create. They are not part of a patch unless the base has them."""


def changed_paths(base: BaseSnapshot, tree: Mapping[str, TreeFile]) -> list[str]:
    """The sorted paths whose file differs from the base, including new files that git would ignore."""
    deleted = [path for path in base.modes if path not in tree]
    return sorted([*deleted, *(path for path, file in tree.items() if not base.is_unchanged(path, file))])


def required_blobs(base: BaseSnapshot, tree: Mapping[str, TreeFile], paths: Collection[str]) -> frozenset[str]:
    """The blobs whose contents :func:`file_patches` needs in addition to ``tree``."""
    before = {base.blobs[path] for path in {*paths, *base.gitignores} if path in base.blobs}
    return frozenset(before | {tree[path].blob for path in paths if path in tree} - {""})


def file_patches(
    base: BaseSnapshot, tree: Mapping[str, TreeFile], paths: Collection[str], contents: Mapping[str, bytes]
) -> Iterator[FilePatch]:
    """The file patches from the base to ``tree`` at ``paths``. ``contents`` has the :func:`required_blobs`.

    New files that git would ignore by the base's rules are left out. A file that is not text gets an unusable patch.
    """
    is_ignored = _IgnoreRules(base, tree, contents)
    for path in paths:
        old = TreeFile(base.modes[path], contents.get(base.blobs[path])) if path in base.modes else None
        new = tree.get(path)
        if new is not None and new.blob:
            new = replace(new, data=contents.get(new.blob))
            if new.data is None and old is not None and new.blob == base.blobs[path]:  # unchanged, too large to read
                old, new = replace(old, data=b""), replace(new, data=b"")
        if old is not None or not (base.was_untracked(path) or is_ignored(path)):
            yield from _path_patches(path, old, new)


def _path_patches(path: str, old: TreeFile | None, new: TreeFile | None) -> Iterator[FilePatch]:
    """The patches of one path: two for a changed link or a change of kind, else one, or none for equal files."""
    if old and new and old.data is not None and (old.data, git_mode(old.mode)) == (new.data, git_mode(new.mode)):
        return
    if old and new and "120000" in (git_mode(old.mode), git_mode(new.mode)):
        yield _file_patch(path, old, None)
        yield _file_patch(path, None, new)
    elif old or new:
        yield _file_patch(path, old, new)


def _file_patch(path: str, old: TreeFile | None, new: TreeFile | None) -> FilePatch:
    modes = git_mode(old.mode if old else 0), git_mode(new.mode if new else 0)
    is_chmod = old is not None and new is not None and old.data is not None and old.data == new.data
    before, after = (decode_text(b"" if is_chmod or file is None else file.data) for file in (old, new))
    if is_unsafe_path(path) or before is None or after is None:
        shown = json.dumps(path)[1:-1] if is_unsafe_path(path) else path
        text = f"diff --git a/{shown} b/{shown}\nBinary files differ\n"
        return FilePatch(shown, text, frozenset({path}), is_new=old is None, unusable="binary change")
    text = diff_file(path, before if old else None, after if new else None, modes)
    return FilePatch(path, text, frozenset({path}), rebuilt=text, is_new=old is None)


def decode_text(data: bytes | None) -> str | None:
    """The text of a file, or None if a patch cannot contain it: binary, not UTF-8, or too large to read."""
    if data is None or b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class _IgnoreRules:
    """Whether git would ignore a new path by the ``.gitignore`` files of the base.

    Of later ``.gitignore`` files only a single ``*`` counts, which caches use to exclude themselves. An agent's
    patterns could take unbounded time to match.
    """

    def __init__(self, base: BaseSnapshot, tree: Mapping[str, TreeFile], contents: Mapping[str, bytes]) -> None:
        texts = {path: contents.get(base.blobs[path], b"").decode(errors="surrogateescape") for path in base.gitignores}
        rules = {path.removesuffix(".gitignore"): text.splitlines() for path, text in texts.items()}
        rules |= {
            path.removesuffix(".gitignore"): ["*"]
            for path, file in tree.items()
            if path not in base.modes and _ignores_directory(path, file)
        }
        rules[""] = [*BUILD_ARTIFACTS, *rules.get("", ())]
        self._specs = {directory: GitIgnoreSpec.from_lines(lines) for directory, lines in rules.items()}
        self._ignored_directories: dict[str, bool] = {}

    def __call__(self, path: str) -> bool:
        parent = path.rpartition("/")[0]
        return self._is_in_ignored(parent) or self._matches(path)

    def _is_in_ignored(self, directory: str) -> bool:
        """Whether a directory or one of its parents is ignored. git does not search ignored directories."""
        if directory not in self._ignored_directories:
            parent = directory.rpartition("/")[0]
            self._ignored_directories[directory] = bool(directory) and (
                self._is_in_ignored(parent) or self._matches(f"{directory}/")
            )
        return self._ignored_directories[directory]

    def _matches(self, path: str) -> bool:
        parts = path.removesuffix("/").split("/")
        for depth in reversed(range(len(parts))):
            directory = "".join(f"{part}/" for part in parts[:depth])
            spec = self._specs.get(directory)
            decision = spec.check_file(path.removeprefix(directory)).include if spec else None
            if decision is not None:
                return decision
        return False


def _ignores_directory(path: str, file: TreeFile) -> bool:
    """Whether a file is a ``.gitignore`` in a subdirectory that ignores everything in it."""
    if path.rpartition("/")[2] != ".gitignore" or "/" not in path or file.data is None:
        return False
    return [line for line in file.data.splitlines() if line and not line.startswith(b"#")] == [b"*"]
