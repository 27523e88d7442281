"""How one command is put into namespaces: the bwrap command line, its filter, its limits, and whether it ran."""

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
from sandbox.output_throttle import Toll
from sandbox.process import Finished, run_process
from sandbox.types import SandboxSpec

FILE_SIZE_LIMIT = 1 << 30
"""Bytes one file written in a sandbox may have."""
OWN_PROCESSES = 3
"""bwrap, the first process in the sandbox, and its inner shell: on top of a sandbox's own limit."""
_PROBE_SECONDS = 10.0
_FLAGS = (
    *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
    *("--hostname", "sandbox", "--uid", "0", "--gid", "0", "--as-pid-1"),
)
# The sandbox's first process. bwrap's own would outlive bwrap for a moment and then wait for the machine's init to
# reap it, which some machines do once a second and some containers never; this one is waited for, and with it all of
# the sandbox. The inner shell keeps what the outer one says about a killed command ("Killed") out of its standard
# error.
_FIRST = 'exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); exit $?'


@dataclass(frozen=True, slots=True)
class Launcher:
    """bwrap as it works on this machine. ``filter_file`` holds the system call filter, where there is one."""

    program: str
    flags: tuple[str, ...]
    filter_file: Path | None

    @classmethod
    def make(cls, program: str, flags: tuple[str, ...], filter_file: Path) -> Launcher:
        """A launcher whose filter is written to ``filter_file``; the rest is what ``find_bwrap`` found."""
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
        toll: Toll,
    ) -> tuple[Finished, bool]:
        """Run ``argv``; also whether it was reached. What bwrap itself failed at is not the command's failure."""
        with self._descriptors() as (pipe, report, seccomp):
            status = _Status(pipe)
            options = [*self.flags, "--json-status-fd", str(report), *mounts, "--chdir", cwd]
            options += [part for key, value in env.items() for part in ("--setenv", key, value)]
            if seccomp is not None:
                options += ["--seccomp", str(seccomp)]
            finished = await run_process(
                self._limited(spec, cgroup, options, argv),
                timeout=timeout,
                limit=spec.output_limit_bytes,
                stdin=stdin,
                pass_fds=[fd for fd in (report, seccomp) if fd is not None],
                kill_rest=status.kill_sandbox,
                toll=toll,
            )
            return finished, status.reached

    def _limited(
        self, spec: SandboxSpec, cgroup: Cgroup | None, options: Sequence[str], argv: Sequence[str]
    ) -> list[str]:
        prologue = f"ulimit -c 0; ulimit -f {FILE_SIZE_LIMIT // 512}; "
        bwrap = [self.program, *_FLAGS, *options, "--"]
        if cgroup is not None:
            first = ("/bin/sh", "-c", _FIRST, "sh")
            return join_command(cgroup.procs_files, [*bwrap, *first, *argv], prologue=prologue)
        # Set inside the sandbox: its user namespace counts its processes from zero there.
        limits = f"ulimit -v {spec.memory_mb << 10}; ulimit -u {spec.pids + OWN_PROCESSES}; "
        return join_command((), [*bwrap, "bash", "-c", limits + _FIRST, "bash", *argv], prologue=prologue)

    @contextlib.contextmanager
    def _descriptors(self) -> Iterator[tuple[int, int, int | None]]:
        """The status pipe's two ends and the opened filter, which bwrap reads from its start to its end each time."""
        with contextlib.ExitStack() as stack:
            status, report = os.pipe()
            os.set_blocking(status, False)
            stack.callback(os.close, status)
            stack.callback(os.close, report)
            seccomp = None
            if self.filter_file is not None:
                seccomp = os.open(self.filter_file, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, seccomp)
            yield status, report, seccomp


def find_bwrap() -> tuple[str, tuple[str, ...]]:
    """bwrap's path and its extra flags here, tried out on one command. Raises ``SandboxUnavailableError``."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailableError("bubblewrap is not installed: apt-get install bubblewrap (or your system's own)")
    trial = (*("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"), "--", "/bin/sh", "-c", _FIRST, "sh", "true")
    # A nested user namespace would give a command capabilities again; old versions and setuid ones can't forbid it.
    for extra in (("--unshare-user", "--disable-userns"), ()):
        try:
            run = subprocess.run([bwrap, *_FLAGS, *extra, *trial], capture_output=True, timeout=_PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            raise SandboxUnavailableError(f"bubblewrap gave no answer within {_PROBE_SECONDS:.0f} s") from None
        if run.returncode == 0:
            return bwrap, extra
    reason = run.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
    raise SandboxUnavailableError(
        f"bubblewrap is not allowed to make namespaces here ({reason[0]}): allow unprivileged user namespaces "
        f"(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0) or use docker"
    )


class _Status:
    """What bwrap says of itself on ``--json-status-fd``, a descriptor that the command does not have."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._text = pipe, b""

    @property
    def reached(self) -> bool:
        """Whether the command was executed: only then is its exit code written."""
        return b'"exit-code"' in self._read()

    def kill_sandbox(self) -> None:
        """Kill the sandbox's first process, and with it the sandbox, after bwrap was killed.

        ``--die-with-parent`` does so too, except in the moment between the first process's ``setsid``, which takes it
        out of bwrap's group, and its ``prctl``. Its id is written before it gets that far.
        """
        found = re.search(rb'"child-pid": *(\d+)', self._read())
        if found is not None and _is_first_process(pid := int(found[1])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read(self) -> bytes:
        """What was written so far. (The pipe's writing end may still be open here: nothing is waited for.)"""
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self._pipe, 4096)
        return self._text


def _is_first_process(pid: int) -> bool:
    """Whether ``pid`` is still the first process of a PID namespace below ours, and not another's id by now."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return re.search(r"^NSpid:.*\s1$", status, re.MULTILINE) is not None
