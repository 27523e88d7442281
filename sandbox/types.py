"""What a sandbox is: the spec it starts from, the protocol it serves, the result of a command.

A command that fails is a value (:class:`ExecResult`); a sandbox that breaks is an exception
(:mod:`sandbox.errors`). Every backend passes ``tests/sandbox/test_conformance.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

OVERGROWN = 122
"""Exit code of the commands of a sandbox that grew beyond its limit on the disk (the number of ``EDQUOT``)."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command in a sandbox did.

    ``exit_code`` is the process's own (128 + signal where a signal ended it, as a shell tells it), 126 where ``cwd``
    does not exist, 127 where the program does not, and -9 where the timeout killed it. ``stdout`` and ``stderr`` hold
    at most the spec's ``output_limit_bytes`` each; ``truncated`` says that more was written and dropped, while the
    command went on.
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
        """Standard output followed by standard error, undecodable bytes replaced."""
        return (self.stdout + self.stderr).decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox starts from and the limits it runs under. There is never a network.

    ``image`` is a container image for docker; for bubblewrap the directory of a root file system, or ``"host"`` for
    the machine's own system directories, read-only. ``ro_binds`` maps host paths to where they appear in the sandbox,
    read-only (docker: volumes with mode ``ro``); a host path that is absent is a ``SandboxStartError``.

    A sandbox whose files grow by more than ``disk_mb`` MiB or ``inodes`` files, directories and links is ended: its
    commands, and all that come after, fail with exit code ``OVERGROWN``, and its files are removed.
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
    """``pull``: fetch missing images, ``pulls_at_once`` at a time. ``budget_gb``: GB that pulled images may take.

    ``root`` and ``own`` concern bubblewrap, whose images are directories of the host, so that a name from a task's row
    could be any of them: such a name must lead below ``root`` (None: there are no such images), or be ``own``, the
    image that the user chose.
    """

    pull: bool = False
    budget_gb: float | None = None
    pulls_at_once: int = 2
    attempts: int = 6
    first_wait: float = 2.0
    """Seconds of the first wait between attempts; they double, with jitter, up to a minute."""
    root: Path | None = None
    own: str | None = None


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A regular file or a symbolic link. ``mode`` is its type and permissions, as in ``st_mode``.

    ``data`` is the content, or the link's target; None where it is larger than asked for, or where ``blob`` is given.
    ``blob`` is git's name of the content (:func:`sandbox.blob_name`) where that is how it is known to who reads it.
    """

    mode: int
    data: bytes | None
    blob: str = ""


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """What may be read of a directory: bytes of one file (a larger one comes without data), bytes and files in all."""

    file_bytes: int = 1 << 20
    total_bytes: int = 64 << 20
    files: int = 20_000


@runtime_checkable
class Sandbox(Protocol):
    """One isolated sandbox. Made by a :class:`SandboxBackend`, closed by whoever started it."""

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
    ) -> ExecResult:
        """Run ``command`` (a string runs under ``bash -c``) and return what it did.

        After ``timeout`` seconds the command's whole process group is killed inside the sandbox and the result says
        ``timed_out``. Raises ``SandboxError`` only when the sandbox itself is broken.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """The file's bytes. Raises ``SandboxFileError`` if absent, not regular, or larger than ``max_bytes``."""
        ...

    async def read_tree(
        self,
        path: str,
        *,
        skip: Collection[str] = (),
        limits: TreeLimits | None = None,
        known: Mapping[str, str] | None = None,
    ) -> Mapping[str, TreeFile]:
        """The regular files and links below the directory ``path``, by their path from there; links are not followed.

        No program of the sandbox takes part, so that nothing in the sandbox can say otherwise. Files and directories
        whose name is one of ``skip`` are left out. ``known`` gives git's names of the contents that files are
        thought to have: a file that has it comes with that name instead of its data, whatever its size. The
        directory is the working directory or below it. Raises ``SandboxFileError`` if it is no directory, or holds
        more than ``limits`` allow.
        """
        ...

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write all ``files`` (path -> bytes), making parent directories; one round trip however many there are."""
        ...

    async def close(self) -> None:
        """Remove the sandbox. Idempotent, shielded from cancellation."""
        ...


@dataclass(frozen=True, slots=True)
class SessionResult:
    """What a command of a :class:`ShellSession` did. ``kept``: whether the next one starts from what it left."""

    result: ExecResult
    kept: bool

    @property
    def note(self) -> str:
        """One line for whoever gave the command where its state was not kept, else nothing."""
        if self.kept:
            return ""
        why = f"was killed after {self.result.seconds:.0f} s" if self.result.timed_out else "took its shell with it"
        return f"the command {why}; directory and variables are as they were before it"


class ShellSession(Protocol):
    """Commands of one shell: directory, variables, functions and options last from one to the next."""

    async def run(self, command: str, *, timeout: float) -> SessionResult:
        """Run ``command`` and return what it did; one at a time. ``exit`` ends the command, not the session.

        After ``timeout`` seconds all that it started is killed, and the session goes on from before it. Raises
        ``SandboxError`` only when the sandbox itself is broken.
        """
        ...

    async def close(self) -> None:
        """Forget the session's state. The sandbox stays as it is."""
        ...


@runtime_checkable
class SandboxBackend(Protocol):
    """Starts sandboxes for one run, and cleans up after dead ones."""

    @property
    def name(self) -> str: ...

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox. Raises ``SandboxStartError`` (retryable) or ``ImageMissingError`` (a user's mistake)."""
        ...

    async def reap(self) -> int:
        """Remove sandboxes whose owning run is dead (killed, say); return how many."""
        ...

    async def close(self) -> None:
        """Close every sandbox this backend started and still owns. Idempotent, shielded."""
        ...


@runtime_checkable
class ImageKeeper(Protocol):
    """A backend that can tell which images are on its machine. Optional; backends of several machines ask."""

    async def image_id(self, image: str) -> str:
        """What ``image`` is here, the same on all machines that have the same. Raises ``ImageMissingError``."""
        ...

    async def fetch(self, image: str) -> None:
        """Have ``image`` fetched. Raises ``ImageMissingError`` or ``ImagePullError``."""
        ...
