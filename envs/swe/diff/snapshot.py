"""A repository as it was before the agent's first command: each file's mode and git's name of its content.

For a task in an image that is what the untouched sandbox's own git lists, once it has made the first commit.
Contents are looked up by those names afterwards, and believed only if they have them, so that where they come from
doesn't matter.
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

SKIPPED = frozenset({".git", "__pycache__", ".pytest_cache", ".venv"})
"""Names of files and directories that are not even looked at."""

LISTING = ".git/agent-rl-base"
LIST = f"git ls-files -t -s -o -z -x .venv -x __pycache__ > {LISTING}"
"""Bash that lists a repository of one commit into the file ``LISTING``, for :meth:`Base.of_listing`."""
MAX_LISTING = 32 << 20

_MOST_BYTES = 8 << 20
"""What a changed file may have had before: a larger one is shown as binary."""
_MOST_LOOKED_UP = 32
_HEADER = 32
_LISTED = re.compile(r"(?:\? |H (?P<mode>[0-7]{6}) (?P<blob>[0-9a-f]{40}) 0\t)(?P<path>.+)", re.DOTALL)
_LINK, _NESTED = 0o120000, 0o160000


@dataclass(frozen=True)
class Base:
    """``modes`` and ``blobs`` have the files and links that git keeps, by path; a mode is as in ``st_mode``.

    ``others`` are files that git ignored, and nested repositories. ``contents`` are those at hand, by their blob.
    """

    modes: Mapping[str, int]
    blobs: Mapping[str, str]
    others: frozenset[str]
    contents: Mapping[str, bytes]

    @classmethod
    def of_files(cls, files: Mapping[str, str]) -> Base:
        """The base of a record that brings its files along."""
        looked_at = {path: text.encode() for path, text in files.items() if _is_looked_at(path)}
        blobs = {path: blob_name(data) for path, data in looked_at.items()}
        modes = dict.fromkeys(looked_at, stat.S_IFREG | 0o644)
        return cls(modes, blobs, frozenset(), {blobs[path]: data for path, data in looked_at.items()})

    @classmethod
    def of_listing(cls, listing: bytes) -> Base:
        """The base that ``LIST`` listed. Raises ``ValueError`` where a line is none of git's."""
        modes: dict[str, int] = {}
        blobs: dict[str, str] = {}
        others: set[str] = set()
        for line in os.fsdecode(listing).split("\0")[:-1]:
            if (listed := _LISTED.fullmatch(line)) is None:
                raise ValueError(f"{line[:200]!r}: no line of git ls-files")
            path, mode = listed["path"], int(listed["mode"] or "0", 8)
            if mode in (0, _NESTED):
                others.add(path)
            elif _is_looked_at(path):
                modes[path], blobs[path] = mode, listed["blob"]
        return cls(modes, blobs, frozenset(others), {})

    @cached_property
    def rules(self) -> frozenset[str]:
        """The paths of the ``.gitignore`` files."""
        return frozenset(path for path in self.modes if path.rpartition("/")[2] == ".gitignore")

    @property
    def known(self) -> Mapping[str, str]:
        """The contents that need not be read again: those of all files but the ``.gitignore`` files."""
        return {path: blob for path, blob in self.blobs.items() if path not in self.rules and not self.is_link(path)}

    def limits(self, file_bytes: int) -> TreeLimits:
        """What may be read of a directory that started as this: new and changed files of ``file_bytes`` each."""
        return TreeLimits(file_bytes, files=TreeLimits().files + len(self.modes) + len(self.others))

    def is_link(self, path: str) -> bool:
        return stat.S_IFMT(self.modes[path]) == _LINK

    def has(self, path: str, file: TreeFile | None) -> bool:
        """Whether ``file`` is what stood at ``path``, as git compares: content, kind, and whether it is executable."""
        if file is None or path not in self.modes or git_mode(file.mode) != git_mode(self.modes[path]):
            return False
        return (blob_name(file.data) if file.data is not None else file.blob) == self.blobs[path]

    def is_other(self, path: str) -> bool:
        """Whether ``path`` was ignored from the start, or lies in a nested repository."""
        parts = path.split("/")
        return bool(self.others) and any("/".join(parts[:depth]) in self.others for depth in range(1, len(parts) + 1))


def git_mode(mode: int) -> str:
    """A mode as git writes it."""
    if stat.S_ISLNK(mode):
        return "120000"
    return "100755" if mode & stat.S_IXUSR else "100644"


def _is_looked_at(path: str) -> bool:
    return SKIPPED.isdisjoint(path.split("/"))


async def look_up(
    fresh_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]],
    sandbox: Sandbox,
    base: Base,
    blobs: Collection[str],
) -> Mapping[str, bytes]:
    """The contents named ``blobs``, as far as they are no larger than 8 MiB.

    They are read from the objects of the git directory in the agent's sandbox, without its git. What isn't there any
    more is read from a sandbox as ``fresh_sandbox`` opens them. Raises ``SandboxError``.
    """
    found = {blob: base.contents[blob] for blob in blobs if blob in base.contents}
    missing = {blob for blob in blobs if blob not in found}
    if 0 < len(missing) <= _MOST_LOOKED_UP:
        for contents in await asyncio.gather(*(_of_object(sandbox, blob) for blob in missing)):
            found |= contents
    missing -= found.keys()
    return {**found, **(await _of_fresh_sandbox(fresh_sandbox, base, missing) if missing else {})}


async def _of_object(sandbox: Sandbox, blob: str) -> Mapping[str, bytes]:
    """The content of a git object that is not packed, by its name; nothing where that is not found."""
    try:
        directory = await sandbox.read_tree(f".git/objects/{blob[:2]}", limits=TreeLimits(_MOST_BYTES))
        packed = directory[blob[2:]].data or b""
        whole = zlib.decompressobj().decompress(packed, _MOST_BYTES + _HEADER)
    except (SandboxFileError, KeyError, zlib.error):
        return {}
    is_it = hashlib.sha1(whole, usedforsecurity=False).hexdigest() == blob
    return {blob: whole.partition(b"\0")[2]} if is_it else {}


async def _of_fresh_sandbox(
    fresh_sandbox: Callable[[], AbstractAsyncContextManager[Sandbox]], base: Base, blobs: Collection[str]
) -> Mapping[str, bytes]:
    known = {path: blob for path, blob in base.known.items() if blob not in blobs}
    async with fresh_sandbox() as fresh:
        found = await fresh.read_tree(fresh.spec.workdir, skip=SKIPPED, limits=base.limits(_MOST_BYTES), known=known)
    contents = {blob_name(file.data): file.data for file in found.values() if file.data is not None}
    return {blob: contents[blob] for blob in blobs if blob in contents}
