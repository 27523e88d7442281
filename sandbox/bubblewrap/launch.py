"""Runs one command under bwrap: its command line, system call filter, limits and status."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.bubblewrap.seccomp import sandbox_filter
from sandbox.cgroup import Cgroup, join_command
from sandbox.errors import SandboxUnavailableError
from sandbox.process import OutputThrottle, ProcessResult, run_process
from sandbox.types import SandboxSpec

FILE_SIZE_LIMIT = 1 << 30
"""Maximum bytes of one file written in a sandbox."""
OVERHEAD_PROCESSES = 3
"""bwrap, the first process of the sandbox, and its inner shell; added to the process limit of the spec."""
_PROBE_SECONDS = 10.0
_FLAGS = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
    *("--hostname", "sandbox", "--uid", "0", "--gid", "0", "--as-pid-1"),
)
# The first process of the sandbox. bwrap waits for it, so the whole sandbox has ended when bwrap ends. bwrap's own init
# would outlive bwrap and wait for the machine's init to reap it: some do so once a second, some containers never. The
# inner shell keeps the outer shell's message about a killed command ("Killed") out of standard error.
_FIRST = 'exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); exit $?'


@dataclass(frozen=True, slots=True)
class Launcher:
    """bwrap with the flags that work on this machine. ``filter_file`` contains the system call filter, if any."""

    program: str
    flags: tuple[str, ...]
    filter_file: Path | None

    @classmethod
    def make(cls, program: str, flags: tuple[str, ...], filter_file: Path) -> Launcher:
        """Write the filter to ``filter_file`` and return a launcher; ``find_bwrap`` returns the other arguments."""
        code = sandbox_filter()
        if code is None:
            return cls(program, flags, None)
        filter_file.write_bytes(code)
        return cls(program, flags, filter_file)

    async def run(
        self,
        spec: SandboxSpec,
        cgroup: Cgroup | None,
        mounts: Sequence[str],
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        timeout: float,
        stdin: bytes | None,
        throttle: OutputThrottle,
    ) -> tuple[ProcessResult, bool]:
        """Run ``argv``; return its result and whether it was executed. If not, the result is a failure of bwrap."""
        with self._descriptors() as (pipe, status_fd, seccomp):
            status = _BwrapStatus(pipe)
            options = [*self.flags, "--json-status-fd", str(status_fd), *mounts, "--chdir", cwd]
            options += [part for key, value in env.items() for part in ("--setenv", key, value)]
            if seccomp is not None:
                options += ["--seccomp", str(seccomp)]
            finished = await run_process(
                self._limited(spec, cgroup, options, argv),
                timeout=timeout,
                limit=spec.output_limit_bytes,
                stdin=stdin,
                pass_fds=[fd for fd in (status_fd, seccomp) if fd is not None],
                kill_escaped=status.kill_sandbox,
                throttle=throttle,
            )
            return finished, status.executed

    def _limited(
        self, spec: SandboxSpec, cgroup: Cgroup | None, options: Sequence[str], argv: Sequence[str]
    ) -> list[str]:
        prologue = f"ulimit -c 0; ulimit -f {FILE_SIZE_LIMIT // 512}; "
        bwrap = [self.program, *_FLAGS, *options, "--"]
        if cgroup is not None:
            first = ("/bin/sh", "-c", _FIRST, "sh")
            return join_command(cgroup.procs_files, [*bwrap, *first, *argv], prologue=prologue)
        # Set inside the sandbox: its user namespace counts its processes from zero.
        limits = f"ulimit -v {spec.memory_mb << 10}; ulimit -u {spec.pids + OVERHEAD_PROCESSES}; "
        return join_command((), [*bwrap, "bash", "-c", limits + _FIRST, "bash", *argv], prologue=prologue)

    @contextlib.contextmanager
    def _descriptors(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield the read end and the write end of the status pipe, and the open filter file (or None)."""
        with contextlib.ExitStack() as stack:
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            stack.callback(os.close, read_end)
            stack.callback(os.close, write_end)
            seccomp = None
            if self.filter_file is not None:
                seccomp = os.open(self.filter_file, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, seccomp)
            yield read_end, write_end, seccomp


def find_bwrap() -> tuple[str, tuple[str, ...]]:
    """Return the path of bwrap and its additional flags after a test. Raises ``SandboxUnavailableError``."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailableError("bubblewrap is not installed: apt-get install bubblewrap (or another installer)")
    probe = (*("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"), "--", "/bin/sh", "-c", _FIRST, "sh", "true")
    # A nested user namespace would give a command capabilities; old and setuid versions of bwrap cannot forbid it.
    for extra in (("--unshare-user", "--disable-userns"), ()):
        try:
            run = subprocess.run([bwrap, *_FLAGS, *extra, *probe], capture_output=True, timeout=_PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            raise SandboxUnavailableError(f"bubblewrap did not respond within {_PROBE_SECONDS:.0f} s") from None
        if run.returncode == 0:
            return bwrap, extra
    reason = run.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
    raise SandboxUnavailableError(
        f"bubblewrap may not create namespaces ({reason[0]}): allow unprivileged user namespaces "
        f"(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0) or use docker"
    )


class _BwrapStatus:
    """The status that bwrap writes to ``--json-status-fd``; the command does not have this descriptor."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._text = pipe, b""

    @property
    def executed(self) -> bool:
        """Whether the command was executed: only then does bwrap write its exit code."""
        return b'"exit-code"' in self._read()

    def kill_sandbox(self) -> None:
        """Kill the first process of the sandbox, and so the sandbox, after bwrap was killed.

        ``--die-with-parent`` covers all but one moment: between ``setsid`` of the first process, which removes it from
        bwrap's group, and its ``prctl``. bwrap writes its id before that.
        """
        match = re.search(rb'"child-pid": *(\d+)', self._read())
        if match is not None and _is_first_process(pid := int(match[1])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read(self) -> bytes:
        """Return the text so far without blocking; the write end may still be open in this process."""
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self._pipe, 4096)
        return self._text


def _is_first_process(pid: int) -> bool:
    """Whether ``pid`` is the first process of a nested PID namespace, and not a reused id."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return re.search(r"^NSpid:.*\s1$", status, re.MULTILINE) is not None
