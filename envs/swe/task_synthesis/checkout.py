"""Reads the text files of a repository's newest commit, a directory, or a source release, without running code."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from envs.context import EnvContext
from envs.swe.task_synthesis.candidate import MAX_RECORD_BYTES, CandidateRejected
from envs.swe.task_synthesis.files import MAX_FILE_BYTES, is_lfs_pointer, record_text, text_files
from envs.swe.task_synthesis.git import LINK, SUBMODULE, TreeEntry, open_git
from envs.swe.task_synthesis.requirements import project_name
from envs.types import EnvsError

_SKIPPED = frozenset({".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".tox", ".mypy_cache", "build"})
_MAX_FILES = 20_000


@dataclass(frozen=True, slots=True)
class Checkout:
    """The text files of a repository or source release. ``metadata`` is a release's PKG-INFO; ``omitted`` counts the
    files by kind that no record can contain."""

    repo: str
    files: Mapping[str, str]
    commit: str = ""
    metadata: str = ""
    omitted: Mapping[str, int] = field(default_factory=dict)

    @property
    def package(self) -> str:
        return project_name(self.files) or self.repo


async def read_checkout(context: EnvContext, path: Path) -> Checkout:
    """Read a git repository (its newest commit), a source release (``.tar.gz``), or a plain directory.

    Raises ``CandidateRejected`` if it is too large and ``EnvsError`` if ``path`` is none of these.
    """
    if await asyncio.to_thread((path / ".git").exists):
        return await _read_newest_commit(context, path)
    return await asyncio.to_thread(_read_plain, path)


async def _read_newest_commit(context: EnvContext, path: Path) -> Checkout:
    async with open_git(context, path) as git:
        commits = await git.log(1)
        if not commits:
            raise CandidateRejected("no commits")
        tree = await git.tree(commits[0].hash)
        contents = await git.contents(tree)
        return Checkout(
            repository_name(path), text_files(contents), commits[0].hash, omitted=count_omitted(tree, contents)
        )


def _read_plain(path: Path) -> Checkout:
    if path.name.endswith(".tar.gz") and path.is_file():
        return read_release(path)
    if not path.is_dir():
        raise EnvsError(f"{path}: right would be a directory with a repository, or a source release (.tar.gz)")
    return Checkout(repository_name(path), text_files(dict(_small_files(path))))


def repository_name(path: Path) -> str:
    """The name of the repository in a directory: the directory's name."""
    return path.resolve().name


def read_release(path: Path) -> Checkout:
    """Read a source release. Paths are without its top directory; hidden and metadata files are left out."""
    name, _, version = path.name.removesuffix(".tar.gz").rpartition("-")
    contents: dict[str, bytes] = {}
    metadata = ""
    try:
        with tarfile.open(path) as archive:
            for parts, data in _members(archive):
                if parts == ("PKG-INFO",):
                    metadata = data.decode(errors="replace")
                elif not _is_metadata(parts):
                    contents["/".join(parts)] = data
    except (tarfile.TarError, OSError, EOFError) as error:
        raise CandidateRejected("the source release can't be read", f"{path.name}: {error}") from None
    return Checkout(name, text_files(contents), version, metadata)


def count_omitted(tree: Mapping[str, TreeEntry], contents: Mapping[str, bytes]) -> dict[str, int]:
    """The number of files by kind that no record can contain."""
    kinds = {
        "submodules": sum(node.mode == SUBMODULE for node in tree.values()),
        "links": sum(node.mode == LINK for node in tree.values()),
        "large files": sum(node.mode.startswith("100") for node in tree.values()) - len(contents),
        "files in LFS": sum(map(is_lfs_pointer, contents.values())),
        "binary files": sum(record_text(data) is None and not is_lfs_pointer(data) for data in contents.values()),
    }
    return {kind: count for kind, count in kinds.items() if count}


def _members(archive: tarfile.TarFile) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """The regular files of an archive up to 1 MiB each. Raises ``CandidateRejected`` for too many or too large."""
    total = 0
    for number, member in enumerate(archive):
        parts = PurePosixPath(member.name).parts[1:]
        if number > _MAX_FILES or total > 2 * MAX_RECORD_BYTES:
            raise CandidateRejected("repository too large", f"more than {number} files or {total >> 20} MiB")
        if not member.isfile() or member.size > MAX_FILE_BYTES or not parts or ".." in parts:
            continue
        content = archive.extractfile(member)
        assert content is not None  # isfile() holds
        total += member.size
        yield parts, content.read()


def _is_metadata(parts: tuple[str, ...]) -> bool:
    return parts[-1] == "PKG-INFO" or any(part.startswith(".") or part.endswith(".egg-info") for part in parts)


def _small_files(top: Path) -> Iterator[tuple[str, bytes]]:
    """The files below a directory up to 1 MiB each. Does not follow links."""
    total = 0
    for parent, directories, names in os.walk(top):
        directories[:] = sorted(set(directories) - _SKIPPED)
        for path in (Path(parent, name) for name in sorted(names)):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                continue
            yield path.relative_to(top).as_posix(), (data := path.read_bytes())
            if (total := total + len(data)) > 2 * MAX_RECORD_BYTES:
                raise CandidateRejected("repository too large", f"more than {total >> 20} MiB")
