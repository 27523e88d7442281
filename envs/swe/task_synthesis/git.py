"""Reads a git repository inside a sandbox, because its configuration, hooks and filters may run code."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from envs.context import EnvContext
from envs.swe.task_synthesis.candidate import MAX_RECORD_BYTES, CandidateRejected
from envs.swe.task_synthesis.files import MAX_FILE_BYTES
from envs.types import EnvsError
from sandbox import Sandbox

_GIT_DIR = "/opt/agent-rl/git"
_SECONDS = 300.0
_MAX_OUTPUT_BYTES = 96 << 20
_GIT = (
    *("git", f"--git-dir={_GIT_DIR}", "--no-replace-objects", "-c", "core.fsmonitor=false"),
    *("-c", "core.quotePath=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never"),
    # Small windows keep packs of gigabytes within a sandbox's memory limit.
    *("-c", "core.packedGitWindowSize=32m", "-c", "core.packedGitLimit=256m"),
)
_RAW = re.compile(r":(\d{6}) (\d{6}) [0-9a-f]{40} ([0-9a-f]{40}) [A-Z]\d*\t(.+)")
_TREE = re.compile(rb"(\d{6}) (\w+) ([0-9a-f]{40}) +(\d+|-|BAD)\t(.+)", re.DOTALL)
SUBMODULE, LINK = "160000", "120000"


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file that a commit changes: its old and new mode, and its new blob name (zeros for an absent file)."""

    path: str
    modes: tuple[str, str]
    new: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit: its hash, parents, message and changed files."""

    hash: str
    parents: tuple[str, ...]
    message: str
    changes: tuple[FileChange, ...]


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A file of a tree. ``size`` is in bytes."""

    mode: str
    blob: str
    size: int


@dataclass
class Git:
    """A repository that is mounted read-only in a sandbox."""

    sandbox: Sandbox
    _blobs: dict[str, bytes] = field(default_factory=dict)

    async def log(self, count: int) -> list[Commit]:
        """The newest ``count`` commits, without merges. Raises ``CandidateRejected``."""
        log_format = "--format=%x1e%H%x1f%P%x1f%B%x1f"
        options = ("--no-merges", "--raw", "--no-abbrev", "--no-renames", "--no-textconv", "--no-ext-diff")
        text = (await self._run("log", *options, log_format, f"-n{count}", "HEAD", "--")).decode(errors="replace")
        return [commit for part in text.split("\x1e")[1:] if (commit := _parse_commit(part)) is not None]

    async def tree(self, revision: str) -> dict[str, TreeEntry]:
        """The files of a commit by path. Files with unusual names, such as line ends, are left out."""
        listing = await self._run("ls-tree", "-r", "-z", "-l", "--full-tree", revision)
        matches = (_TREE.fullmatch(line) for line in listing.split(b"\0"))
        rows = ((_valid_path(match[5]), match) for match in matches if match)
        return {
            path: TreeEntry(match[1].decode(), match[3].decode(), int(match[4]) if match[4].isdigit() else 0)
            for path, match in rows
            if path
        }

    async def contents(self, tree: Mapping[str, TreeEntry]) -> dict[str, bytes]:
        """The regular files of a tree up to 1 MiB each. Raises ``CandidateRejected`` for too many bytes in total."""
        regular = {path: node for path, node in tree.items() if node.mode.startswith("100")}
        small = {path: node for path, node in regular.items() if node.size <= MAX_FILE_BYTES}
        if (total := sum(node.size for node in small.values())) > 2 * MAX_RECORD_BYTES:
            raise CandidateRejected("repository too large", f"{total >> 20} MiB of files")
        blobs = await self.blobs({node.blob for node in small.values()})
        return {path: blobs[node.blob] for path, node in small.items()}

    async def blobs(self, names: Iterable[str]) -> Mapping[str, bytes]:
        """Contents by blob name, at least of ``names``. Raises ``CandidateRejected`` for a missing blob."""
        names = list(names)
        missing = sorted({name for name in names if name not in self._blobs})
        if sum(map(len, self._blobs.values())) > _MAX_OUTPUT_BYTES:
            self._blobs = {name: self._blobs[name] for name in names if name in self._blobs}
        if missing:
            output = await self._run("cat-file", "--batch", "--buffer", stdin="\n".join(missing).encode() + b"\n")
            self._blobs |= _parse_batch(output)
        if absent := next((name for name in names if name not in self._blobs), None):
            raise CandidateRejected("objects are missing", f"{absent}: missing in a shallow or partial clone")
        return self._blobs

    async def _run(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        result = await self.sandbox.exec([*_GIT, *arguments], timeout=_SECONDS, cwd="/", stdin=stdin)
        if result.truncated or result.timed_out:
            raise CandidateRejected(
                "repository too large", f"git {arguments[0]} was cut off after {result.seconds:.0f} s"
            )
        if not result.ok:
            raise CandidateRejected("git can't read it", result.stderr.decode(errors="replace").strip()[-200:])
        return result.stdout


@asynccontextmanager
async def open_git(context: EnvContext, directory: Path) -> AsyncIterator[Git]:
    """Open the git repository of a checkout or a bare repository. Raises ``EnvsError`` if there is none."""
    env = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0", "HOME": "/tmp"}
    binds = {str(find_git_dir(directory)): _GIT_DIR}
    spec = replace(context.limits, env=env, ro_binds=binds, output_limit_bytes=_MAX_OUTPUT_BYTES, memory_mb=2048)
    async with context.sandbox(spec) as sandbox:
        yield Git(sandbox)


def find_git_dir(directory: Path) -> Path:
    """The directory with the objects of a checkout, a linked work tree, a submodule or a bare repository."""
    path = directory.resolve() / ".git"
    if path.is_file():  # in a linked work tree or a submodule, .git is a file with the path
        target = path.read_text(errors="replace").removeprefix("gitdir:").strip()
        path = (directory / target).resolve()
        if (path / "commondir").is_file():
            path = (path / (path / "commondir").read_text().strip()).resolve()
    for candidate in (path, directory.resolve()):
        if (candidate / "objects").is_dir() and (candidate / "HEAD").is_file():
            return candidate
    raise EnvsError(f"{directory}: not a git repository; right would be the directory of a clone (git clone URL)")


def _parse_commit(text: str) -> Commit | None:
    head, _, rest = text.partition("\x1f")
    parents, _, rest = rest.partition("\x1f")
    message, _, raw = rest.rpartition("\x1f")
    if not re.fullmatch(r"[0-9a-f]{40}", head):
        return None
    rows = [match.groups() for line in raw.splitlines() if (match := _RAW.fullmatch(line))]
    changes = tuple(FileChange(row[3], (row[0], row[1]), row[2]) for row in rows if _valid_path(row[3].encode()))
    return Commit(head, tuple(parents.split()), message.strip(), changes)


def _valid_path(name: bytes) -> str:
    """The path, or an empty string if a record cannot contain it."""
    try:
        path = name.decode()
    except UnicodeDecodeError:
        return ""
    return path if path.isprintable() and not path.startswith(('"', "/")) and ".." not in path.split("/") else ""


def _parse_batch(output: bytes) -> dict[str, bytes]:
    """The contents by name in the output of ``git cat-file --batch``."""
    blobs: dict[str, bytes] = {}
    offset = 0
    while offset < len(output):
        end = output.index(b"\n", offset)
        name, *rest = output[offset:end].decode(errors="replace").split(" ")
        offset = end + 1
        if rest[:1] != ["blob"]:
            continue  # "NAME missing", or not a file
        size = int(rest[1])
        blobs[name] = output[offset : offset + size]
        offset += size + 1
    return blobs
