"""A snapshot of the repository before the agent's first command: each file's mode and git blob name.

For a task in an image, the sandbox's git lists the files after the initial commit. Contents are read later by blob name
and verified against it, so their source need not be trusted.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property

from sandbox import Sandbox, SandboxFileError, TreeFile, TreeLimits, blob_name

SKIPPED_NAMES = frozenset({".git", "__pycache__", ".pytest_cache", ".venv"})
"""Names of files and directories that snapshots and patches ignore."""

LISTING_PATH = ".git/agent-rl-base"
LIST_COMMAND = f"git ls-files -t -s -o -z -x .venv -x __pycache__ > {LISTING_PATH}"
"""Bash that lists a repository of one commit into ``LISTING_PATH``, for :meth:`BaseSnapshot.from_listing`."""
MAX_LISTING_BYTES = 32 << 20

_MAX_BYTES = 8 << 20
"""Largest original size of a changed file; a larger one is shown as binary."""
_MAX_OBJECT_READS = 32
_HEADER_BYTES = 32
_LISTED = re.compile(r"(?:\? |H (?P<mode>[0-7]{6}) (?P<blob>[0-9a-f]{40}) 0\t)(?P<path>.+)", re.DOTALL)
_LINK, _NESTED = 0o120000, 0o160000


@dataclass(frozen=True)
class BaseSnapshot:
    """The files of a repository. ``modes`` (as in ``st_mode``) and ``blobs`` have git's files and links by path.

    ``untracked`` are files that git ignores, and nested repositories. ``contents`` are the available contents by blob.
    """

    modes: Mapping[str, int]
    blobs: Mapping[str, str]
    untracked: frozenset[str]
    contents: Mapping[str, bytes]

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> BaseSnapshot:
        """The snapshot of a local record's files."""
        included = {path: text.encode() for path, text in files.items() if _is_included(path)}
        blobs = {path: blob_name(data) for path, data in included.items()}
        modes = dict.fromkeys(included, stat.S_IFREG | 0o644)
        return cls(modes, blobs, frozenset(), {blobs[path]: data for path, data in included.items()})

    @classmethod
    def from_listing(cls, listing: bytes) -> BaseSnapshot:
        """The snapshot in the output of ``LIST_COMMAND``. Raises ``ValueError`` for a line not in git's format."""
        modes: dict[str, int] = {}
        blobs: dict[str, str] = {}
        untracked: set[str] = set()
        for line in os.fsdecode(listing).split("\0")[:-1]:
            if (match := _LISTED.fullmatch(line)) is None:
                raise ValueError(f"{line[:200]!r}: not a line of git ls-files")
            path, mode = match["path"], int(match["mode"] or "0", 8)
            if mode in (0, _NESTED):
                untracked.add(path)
            elif _is_included(path):
                modes[path], blobs[path] = mode, match["blob"]
        return cls(modes, blobs, frozenset(untracked), {})

    @cached_property
    def gitignores(self) -> frozenset[str]:
        """The paths of the ``.gitignore`` files."""
        return frozenset(path for path in self.modes if path.rpartition("/")[2] == ".gitignore")

    @property
    def known(self) -> Mapping[str, str]:
        """Blobs by path of the files that are read only if changed: all but ``.gitignore`` files and links."""
        return {
            path: blob for path, blob in self.blobs.items() if path not in self.gitignores and not self.is_link(path)
        }

    def limits(self, file_bytes: int) -> TreeLimits:
        """Limits for reading a directory that started as this snapshot; ``file_bytes`` per new or changed file."""
        return TreeLimits(file_bytes, files=TreeLimits().files + len(self.modes) + len(self.untracked))

    def is_link(self, path: str) -> bool:
        return stat.S_IFMT(self.modes[path]) == _LINK

    def is_unchanged(self, path: str, file: TreeFile | None) -> bool:
        """Whether ``file`` equals the original at ``path`` for git: content, kind and executable bit."""
        if file is None or path not in self.modes or git_mode(file.mode) != git_mode(self.modes[path]):
            return False
        return (blob_name(file.data) if file.data is not None else file.blob) == self.blobs[path]

    def was_untracked(self, path: str) -> bool:
        """Whether ``path`` was ignored in the snapshot or is in a nested repository."""
        parts = path.split("/")
        return bool(self.untracked) and any(
            "/".join(parts[:depth]) in self.untracked for depth in range(1, len(parts) + 1)
        )


def git_mode(mode: int) -> str:
    """The mode in git's notation, for example ``100644``."""
    if stat.S_ISLNK(mode):
        return "120000"
    return "100755" if mode & stat.S_IXUSR else "100644"


def _is_included(path: str) -> bool:
    return SKIPPED_NAMES.isdisjoint(path.split("/"))


async def read_blobs(
    fresh_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]],
    sandbox: Sandbox,
    base: BaseSnapshot,
    blobs: Collection[str],
) -> Mapping[str, bytes]:
    """The contents of ``blobs`` up to 8 MiB each; larger ones are left out.

    They are read from the git objects in the agent's sandbox without running its git. Missing ones are read from a
    sandbox that ``fresh_sandbox`` opens. Raises ``SandboxError``.
    """
    contents = {blob: base.contents[blob] for blob in blobs if blob in base.contents}
    missing = {blob for blob in blobs if blob not in contents}
    if 0 < len(missing) <= _MAX_OBJECT_READS:
        for loaded in await asyncio.gather(*(_read_git_object(sandbox, blob) for blob in missing)):
            contents |= loaded
    missing -= contents.keys()
    return {**contents, **(await _read_from_fresh_sandbox(fresh_sandbox, base, missing) if missing else {})}


async def _read_git_object(sandbox: Sandbox, blob: str) -> Mapping[str, bytes]:
    """The content of a loose git object by its name. Empty if the object is missing, packed or has another content."""
    try:
        directory = await sandbox.read_tree(f".git/objects/{blob[:2]}", limits=TreeLimits(_MAX_BYTES))
        compressed = directory[blob[2:]].data or b""
        data = zlib.decompressobj().decompress(compressed, _MAX_BYTES + _HEADER_BYTES)
    except (SandboxFileError, KeyError, zlib.error):
        return {}
    is_valid = hashlib.sha1(data, usedforsecurity=False).hexdigest() == blob
    return {blob: data.partition(b"\0")[2]} if is_valid else {}


async def _read_from_fresh_sandbox(
    fresh_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]], base: BaseSnapshot, blobs: Collection[str]
) -> Mapping[str, bytes]:
    known = {path: blob for path, blob in base.known.items() if blob not in blobs}
    async with fresh_sandbox() as fresh:
        limits = base.limits(_MAX_BYTES)
        tree = await fresh.read_tree(fresh.spec.workdir, skip=SKIPPED_NAMES, limits=limits, known=known)
    contents = {blob_name(file.data): file.data for file in tree.values() if file.data is not None}
    return {blob: contents[blob] for blob in blobs if blob in contents}
