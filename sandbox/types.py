"""Protocols and data types of sandboxes: spec, sandbox, backend and command result.

A failed command is a value (:class:`ExecResult`); a failed sandbox is an exception (:mod:`sandbox.errors`). Every
backend passes ``tests/sandbox/test_conformance.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

EXIT_DISK_LIMIT = 122
"""Exit code of commands in a sandbox that exceeded its disk limit (the number of ``EDQUOT``)."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command in a sandbox.

    ``exit_code`` is the exit code of the process (128 + signal after a signal, as in a shell), 126 if ``cwd`` does not
    exist, 127 if the program does not exist, and -9 after a timeout. ``stdout`` and ``stderr`` hold at most
    ``SandboxSpec.output_limit_bytes`` each; ``truncated`` means that further output was dropped. ``seconds`` is wall
    time. ``oom_killed`` means that the kernel killed a process at the memory limit.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    truncated: bool = False
    oom_killed: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """Standard output followed by standard error; undecodable bytes are replaced."""
        return (self.stdout + self.stderr).decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The image and the limits of a sandbox. A sandbox has no network.

    ``image`` is a container image for docker; for bubblewrap it is the directory of a root file system, or ``"host"``
    for the machine's system directories, read-only. ``ro_binds`` maps host paths to read-only paths in the sandbox; a
    missing host path raises ``SandboxStartError``. ``memory_mb`` is in MiB and ``cpus`` in cores.

    If the files of a sandbox grow by more than ``disk_mb`` MiB or ``inodes`` files, directories and links, its
    processes are killed and its files removed. The running command and all later ones fail with ``EXIT_DISK_LIMIT``.
    """

    image: str = "host"
    workdir: str = "/testbed"
    env: Mapping[str, str] = field(default_factory=dict)
    memory_mb: int = 512
    pids: int = 128
    cpus: float = 1.0
    disk_mb: int = 4096
    inodes: int = 200_000
    output_limit_bytes: int = 1 << 20
    ro_binds: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImagePolicy:
    """Which images a backend may pull and use.

    ``pull`` allows pulling missing images. ``budget_gb`` limits the disk space of pulled images in GB (10^9 bytes).

    ``root`` and ``configured`` apply to bubblewrap, where images are directories of the host and a dataset row could
    name any of them. An image must be below ``root`` (None: no such images), or be ``configured``, the image of the
    user's config. ``private`` are directories and files of the host that no sandbox of bubblewrap may see, for example
    those of runs.
    """

    pull: bool = False
    budget_gb: float | None = None
    max_concurrent_pulls: int = 2
    attempts: int = 6
    initial_backoff: float = 2.0
    """Seconds before the second attempt; doubles with jitter up to 60 s."""
    root: Path | None = None
    configured: str | None = None
    private: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A regular file or a symbolic link. ``mode`` is its type and permissions, as in ``st_mode``.

    ``data`` is the content or the target of the link. It is None if the file exceeds the size limit, or if ``blob`` is
    set. ``blob`` is git's object name (:func:`sandbox.blob_name`) if the content equals the one that the caller knows.
    """

    mode: int
    data: bytes | None
    blob: str = ""


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Limits of reading a directory: bytes per file (larger files come without data), total bytes, number of files, and
    total bytes of files that are compared with known contents."""

    file_bytes: int = 1 << 20
    total_bytes: int = 64 << 20
    files: int = 20_000
    compared_bytes: int = 4 << 30


Change = Literal["added", "changed", "removed"]
"""How a path of a sandbox differs from its image."""


@runtime_checkable
class Sandbox(Protocol):
    """One isolated sandbox, started by a :class:`SandboxBackend` and closed by the caller of ``start``."""

    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> SandboxSpec: ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run ``command`` (a string runs under ``bash -c``) and return its result.

        After ``timeout`` seconds all processes of the command are killed and the result has ``timed_out``. ``user`` is
        a user of the image (a name, or numbers ``uid:gid``), by default root. Raises ``SandboxError`` only if the
        sandbox itself fails, and ``SandboxUnavailableError`` if the backend has no users but root.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Return the content. Raises ``SandboxFileError`` if missing, not regular, or larger than ``max_bytes``."""
        ...

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        """Return the regular files and links below the directory ``path`` by relative path; links are not followed.

        No program of the sandbox takes part, so code in the sandbox cannot falsify the result. ``path`` is the working
        directory or below it. Files and directories with a name in ``skip`` are left out. ``known`` maps paths to git
        object names; a file with that content has ``blob`` instead of ``data``, whatever its size. Raises
        ``SandboxFileError`` if ``path`` is not a directory or exceeds ``limits``.
        """
        ...

    async def changes(self) -> Mapping[str, Change]:
        """Return the paths that differ from the image's; a directory is left out if only entries of it differ.

        No program of the sandbox takes part. Raises ``SandboxUnavailableError`` if the backend cannot list them, and
        ``SandboxFileError`` if the sandbox exceeded its disk limit.
        """
        ...

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write ``files`` (path -> bytes) in one round trip, creating parent directories."""
        ...

    async def close(self) -> None:
        """Remove the sandbox. Idempotent, shielded from cancellation."""
        ...


@dataclass(frozen=True, slots=True)
class SessionResult:
    """The result of a command of a :class:`ShellSession`. ``state_saved``: the next command continues it."""

    result: ExecResult
    state_saved: bool

    @property
    def note(self) -> str:
        """One line for the agent if the state was not saved, else an empty string."""
        if self.state_saved:
            return ""
        why = f"was killed after {self.result.seconds:.0f} s" if self.result.timed_out else "took its shell with it"
        return f"the command {why}; directory and variables are as they were before it"


class ShellSession(Protocol):
    """Commands that share directory, variables, functions and options like commands of one shell."""

    async def run(self, command: str, *, timeout: float) -> SessionResult:
        """Run ``command`` and return its result; one command runs at a time. ``exit`` ends only the command.

        After ``timeout`` seconds its processes are killed and the session keeps the state from before it. Raises
        ``SandboxError`` only if the sandbox itself fails.
        """
        ...

    async def close(self) -> None:
        """Delete the state of the session; the sandbox stays open."""
        ...


@runtime_checkable
class SandboxBackend(Protocol):
    """Starts the sandboxes of one run and removes those of dead runs."""

    @property
    def name(self) -> str: ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. Raises ``SandboxStartError`` (retryable) or ``ImageMissingError`` (a user error)."""
        ...

    async def reap(self) -> int:
        """Remove the sandboxes of dead runs; return how many."""
        ...

    async def close(self) -> None:
        """Close every open sandbox of this backend. Idempotent, shielded from cancellation."""
        ...


@runtime_checkable
class ImageProvider(Protocol):
    """Optional methods of a backend that report and pull the images of its machine; used on several nodes."""

    async def image_id(self, image: str) -> str:
        """Return an id of ``image`` that is equal on nodes with equal images. Raises ``ImageMissingError``."""
        ...

    async def fetch(self, image: str) -> None:
        """Pull ``image``. Raises ``ImageMissingError`` or ``ImagePullError``."""
        ...


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """What an image says about its commands: the working directory ("/" if it names none) and the user."""

    workdir: str
    user: str


@runtime_checkable
class ImageBuilder(Protocol):
    """Optional methods of a backend that builds images on its machine."""

    async def build(self, directory: Path, *, timeout: float) -> str:
        """Build the image of ``directory``, which has a Dockerfile, and return its name.

        The commands of the Dockerfile have no network. Base images must be on the machine, or are pulled if the policy
        allows it. Raises ``ImageMissingError`` for a missing one, and ``ImageBuildError`` if the build fails or takes
        more than ``timeout`` seconds.
        """
        ...

    async def image_settings(self, image: str) -> ImageSettings:
        """Return the settings of ``image``, pulled if it is missing and the policy allows it. Raises
        ``ImageMissingError`` or ``ImagePullError``."""
        ...
