"""The text files of a repository at its newest commit, of a directory, or of a source release. Nothing of it is run."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from envs.context import EnvContext
from envs.swe.task_synthesis.candidate import MAX_FILE_BYTES, MAX_RECORD_BYTES, Fallen, as_text, is_lfs
from envs.swe.task_synthesis.git import LINK, SUBMODULE, Node, open_git
from envs.swe.task_synthesis.requirements import name_of_project
from envs.types import EnvsError

_SKIPPED = frozenset({".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", ".tox", ".mypy_cache", "build"})
_MOST_FILES = 20_000


@dataclass(frozen=True, slots=True)
class Checkout:
    """The files of a repository or a source release, and what its metadata says (a release's PKG-INFO)."""

    repo: str
    files: Mapping[str, str]
    commit: str = ""
    metadata: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def package(self) -> str:
        return name_of_project(self.files) or self.repo


async def read_checkout(context: EnvContext, place: Path) -> Checkout:
    """What ``place`` holds: a git repository (its newest commit), a source release (``.tar.gz``), or a plain directory.

    Raises ``Fallen`` for one too large and ``EnvsError`` where there is nothing."""
    if await asyncio.to_thread((place / ".git").exists):
        return await _newest(context, place)
    return await asyncio.to_thread(_read_plain, place)


async def _newest(context: EnvContext, place: Path) -> Checkout:
    async with open_git(context, place) as git:
        commits = await git.log(1)
        if not commits:
            raise Fallen("no commits")
        tree = await git.tree(commits[0].hash)
        contents = await git.contents(tree)
        return Checkout(name_of(place), texts(contents), commits[0].hash, left_out=left_out(tree, contents))


def _read_plain(place: Path) -> Checkout:
    if place.name.endswith(".tar.gz") and place.is_file():
        return read_release(place)
    if not place.is_dir():
        raise EnvsError(f"{place}: right would be a directory with a repository, or a source release (.tar.gz)")
    return Checkout(name_of(place), dict(_text_files(place)))


def name_of(place: Path) -> str:
    """What the repository in a directory is called: the directory's name."""
    return place.resolve().name


def read_release(path: Path) -> Checkout:
    """A source release: its text files without its top directory; hidden and metadata files are left out."""
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
        raise Fallen("the source release can't be read", f"{path.name}: {error}") from None
    return Checkout(name, texts(contents), version, metadata)


def texts(contents: Mapping[str, bytes]) -> dict[str, str]:
    """The files that a record can hold: binary ones and pointers to LFS are left out."""
    found = {path: as_text(data) for path, data in contents.items()}
    return {path: text for path, text in found.items() if text is not None}


def left_out(tree: Mapping[str, Node], contents: Mapping[str, bytes]) -> dict[str, int]:
    """What of a repository's tree no record can hold, by kind."""
    kinds = {
        "submodules": sum(node.mode == SUBMODULE for node in tree.values()),
        "links": sum(node.mode == LINK for node in tree.values()),
        "large files": sum(node.mode.startswith("100") for node in tree.values()) - len(contents),
        "files in LFS": sum(map(is_lfs, contents.values())),
        "binary files": sum(as_text(data) is None and not is_lfs(data) for data in contents.values()),
    }
    return {kind: count for kind, count in kinds.items() if count}


def _members(archive: tarfile.TarFile) -> Iterator[tuple[tuple[str, ...], bytes]]:
    """The regular files of an archive up to 1 MiB. Raises ``Fallen`` where they are too many or too large."""
    total = 0
    for number, member in enumerate(archive):
        parts = PurePosixPath(member.name).parts[1:]
        if number > _MOST_FILES or total > 2 * MAX_RECORD_BYTES:
            raise Fallen("repository too large", f"more than {number} files or {total >> 20} MiB")
        if not member.isfile() or member.size > MAX_FILE_BYTES or not parts or ".." in parts:
            continue
        content = archive.extractfile(member)
        assert content is not None  # isfile() holds
        total += member.size
        yield parts, content.read()


def _is_metadata(parts: tuple[str, ...]) -> bool:
    return parts[-1] == "PKG-INFO" or any(part.startswith(".") or part.endswith(".egg-info") for part in parts)


def _text_files(top: Path) -> Iterator[tuple[str, str]]:
    """The text files below a directory; links are not followed."""
    total = 0
    for place, directories, names in os.walk(top):
        directories[:] = sorted(set(directories) - _SKIPPED)
        for path in (Path(place, name) for name in sorted(names)):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                continue
            text = as_text(path.read_bytes())
            total += len(text or "")
            if total > MAX_RECORD_BYTES:
                raise Fallen("repository too large", f"more than {total >> 20} MiB of text")
            if text is not None:
                yield path.relative_to(top).as_posix(), text
