"""Reads a git repository in a sandbox: its configuration, hooks and filters can do nothing to the machine."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.context import EnvContext
from envs.swe.task_synthesis.candidate import MAX_FILE_BYTES, MAX_RECORD_BYTES, Fallen
from envs.types import EnvsError
from sandbox import Sandbox

_PLACE = "/opt/agent-rl/git"
_SECONDS = 300.0
_OUTPUT = 96 << 20
_GIT = (
    *("git", f"--git-dir={_PLACE}", "--no-replace-objects", "-c", "core.fsmonitor=false"),
    *("-c", "core.quotePath=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never"),
    # A pack of gigabytes is mapped in small pieces, within a sandbox's memory.
    *("-c", "core.packedGitWindowSize=32m", "-c", "core.packedGitLimit=256m"),
)
_RAW = re.compile(r":(\d{6}) (\d{6}) ([0-9a-f]{40}) ([0-9a-f]{40}) ([A-Z])\d*\t(.+)")
_TREE = re.compile(rb"(\d{6}) (\w+) ([0-9a-f]{40}) +(\d+|-|BAD)\t(.+)", re.DOTALL)
SUBMODULE, LINK = "160000", "120000"


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that a commit changes: modes and git's names of the contents (zeros where there is none)."""

    path: str
    modes: tuple[str, str]
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit without its content."""

    hash: str
    parents: tuple[str, ...]
    message: str
    changes: tuple[FileChange, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A file of a tree; ``size`` in bytes."""

    mode: str
    blob: str
    size: int


@dataclass
class Git:
    """A repository that a sandbox shows read-only."""

    sandbox: Sandbox
    _kept: dict[str, bytes] = field(default_factory=dict)

    async def log(self, count: int, revision: str = "HEAD") -> list[Commit]:
        """The newest ``count`` commits up to ``revision`` that are no merges. Raises ``Fallen``."""
        form = "--format=%x1e%H%x1f%P%x1f%B%x1f"
        options = ("--no-merges", "--raw", "--no-abbrev", "--no-renames", "--no-textconv", "--no-ext-diff")
        text = (await self._run("log", *options, form, f"-n{count}", revision, "--")).decode(errors="replace")
        return [commit for part in text.split("\x1e")[1:] if (commit := _commit(part)) is not None]

    async def tree(self, revision: str) -> dict[str, Node]:
        """The files of a commit by path; those with line ends or other oddities in their name are left out."""
        listing = await self._run("ls-tree", "-r", "-z", "-l", "--full-tree", revision)
        matches = (_TREE.fullmatch(line) for line in listing.split(b"\0"))
        rows = ((_path(match[5]), match) for match in matches if match)
        return {
            path: Node(match[1].decode(), match[3].decode(), int(match[4]) if match[4].isdigit() else 0)
            for path, match in rows
            if path
        }

    async def contents(self, tree: Mapping[str, Node]) -> dict[str, bytes]:
        """The regular files of a tree that are no larger than 1 MiB. Raises ``Fallen`` for too many of them."""
        wanted = {path: node for path, node in tree.items() if node.mode.startswith("100")}
        small = {path: node for path, node in wanted.items() if node.size <= MAX_FILE_BYTES}
        if (total := sum(node.size for node in small.values())) > 2 * MAX_RECORD_BYTES:
            raise Fallen("repository too large", f"{total >> 20} MiB of files")
        blobs = await self.blobs({node.blob for node in small.values()})
        return {path: blobs[node.blob] for path, node in small.items()}

    async def blobs(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """Contents by their names. Raises ``Fallen`` where one is not in the repository (a partial clone)."""
        missing = sorted({name for name in names if name not in self._kept})
        if sum(map(len, self._kept.values())) > _OUTPUT:
            self._kept = {name: self._kept[name] for name in names if name in self._kept}
        if missing:
            answer = await self._run("cat-file", "--batch", "--buffer", stdin="\n".join(missing).encode() + b"\n")
            self._kept |= _batch(answer)
        if gone := next((name for name in names if name not in self._kept), None):
            raise Fallen("objects are missing", f"{gone}: a shallow or partial clone lacks it")
        return self._kept

    async def _run(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        result = await self.sandbox.exec([*_GIT, *arguments], timeout=_SECONDS, cwd="/", stdin=stdin)
        if result.truncated or result.timed_out:
            raise Fallen("repository too large", f"git {arguments[0]} was cut off after {result.seconds:.0f} s")
        if not result.ok:
            raise Fallen("git can't read it", result.stderr.decode(errors="replace").strip()[-200:])
        return result.stdout


@asynccontextmanager
async def open_git(context: EnvContext, directory: Path) -> AsyncIterator[Git]:
    """The repository that ``directory`` is a checkout of, or holds. Raises ``EnvsError`` where it is none."""
    env = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "HOME": "/tmp"}
    binds = {str(git_dir(directory)): _PLACE}
    spec = replace(context.limits, env=env, ro_binds=binds, output_limit_bytes=_OUTPUT, memory_mb=2048)
    async with context.sandbox(spec) as sandbox:
        yield Git(sandbox)


def git_dir(directory: Path) -> Path:
    """Where the objects of a checkout, a linked work tree, a submodule or a bare repository are."""
    place = directory.resolve() / ".git"
    if place.is_file():  # a linked work tree or a submodule says where its own directory is
        named = place.read_text(errors="replace").removeprefix("gitdir:").strip()
        place = (directory / named).resolve()
        if (place / "commondir").is_file():
            place = (place / (place / "commondir").read_text().strip()).resolve()
    for found in (place, directory.resolve()):
        if (found / "objects").is_dir() and (found / "HEAD").is_file():
            return found
    raise EnvsError(f"{directory}: no git repository; right would be the directory of a clone (git clone URL)")


def _commit(text: str) -> Commit | None:
    head, _, rest = text.partition("\x1f")
    parents, _, rest = rest.partition("\x1f")
    message, _, raw = rest.rpartition("\x1f")
    if not re.fullmatch(r"[0-9a-f]{40}", head):
        return None
    rows = [match.groups() for line in raw.splitlines() if (match := _RAW.fullmatch(line))]
    changes = tuple(FileChange(row[5], (row[0], row[1]), row[2], row[3]) for row in rows if _path(row[5].encode()))
    return Commit(head, tuple(parents.split()), message.strip(), changes)


def _path(name: bytes) -> str:
    """A path that a record can have; empty for any other."""
    try:
        path = name.decode()
    except UnicodeDecodeError:
        return ""
    return path if path.isprintable() and not path.startswith(('"', "/")) and ".." not in path.split("/") else ""


def _batch(answer: bytes) -> dict[str, bytes]:
    """The contents in what ``git cat-file --batch`` printed."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(answer):
        end = answer.index(b"\n", at)
        name, *rest = answer[at:end].decode(errors="replace").split(" ")
        at = end + 1
        if rest[:1] != ["blob"]:
            continue  # "NAME missing", or no file
        size = int(rest[1])
        found[name] = answer[at : at + size]
        at += size + 1
    return found
