"""Leases: which run owns which sandboxes, and whether the run is still alive.

The owner of a run is a process. If this process can see the owner, the lease is alive while the owner runs. If it
cannot (the owner is in another process-id namespace, or on another machine that uses the same engine), the heartbeat
decides. Each backend renews its lease every ``BEAT_SECONDS``. It stores the heartbeat beside the sandboxes, so every
process that can see the sandboxes can also see the heartbeat.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from sandbox.errors import SandboxError

BEAT_SECONDS = 15.0
EXPIRY_SECONDS = 300.0
"""A lease with an invisible owner expires after this silence: 20 beats, because a suspended machine misses some."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that started a sandbox. The start time distinguishes it from a later process with the same id.

    ``started`` is in clock ticks since boot; ``boot_id`` and ``pid_namespace`` say where ``pid`` is valid.
    """

    run_id: str
    pid: int
    started: int
    boot_id: str
    pid_namespace: str

    @classmethod
    def current(cls, run_id: str) -> Owner:
        """Return this process as the owner of the run ``run_id``. Raises ``RuntimeError`` without /proc."""
        pid = os.getpid()
        started = _start_ticks(pid)
        if started is None:
            raise RuntimeError("/proc is not mounted: cannot identify this process; mount /proc")
        return cls(run_id, pid, started, _boot_id(), _pid_namespace())

    @classmethod
    def from_json(cls, text: str) -> Owner:
        """Parse the output of ``to_json``. Raises ``ValueError`` on anything else."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not an owner record: {error}") from None

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def same_boot(self) -> bool:
        """Whether the owner started on this machine since its last boot."""
        return self.boot_id == _boot_id()

    @property
    def visible(self) -> bool:
        """Whether this process can see the owner: same boot and same process-id namespace."""
        return self.same_boot and self.pid_namespace == _pid_namespace()

    @property
    def running(self) -> bool:
        """Whether the process of a visible owner still runs."""
        return _start_ticks(self.pid) == self.started


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may contain spaces and brackets; fields are counted from the last closing one (proc(5)).
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class Lease:
    """The ``sandboxes`` (ids) of one run at ``location``, a directory or the address of an engine.

    ``silence_seconds`` is the age of the last heartbeat, or None if it is unknown.
    """

    backend: str
    owner: Owner
    sandboxes: tuple[str, ...]
    silence_seconds: float | None
    location: str

    @property
    def dead(self) -> bool:
        """Whether the sandboxes can be removed; False if nothing is known about the owner."""
        if self.owner.visible:
            return not self.owner.running
        return self.silence_seconds is not None and self.silence_seconds > EXPIRY_SECONDS

    @property
    def status(self) -> str:
        """``dead`` with its reason, for people."""
        if self.owner.visible:
            return "alive" if self.owner.running else "dead: its process has ended"
        if self.silence_seconds is None:
            return "unknown: its process is not visible here and it has no heartbeat"
        return f"{'dead' if self.dead else 'alive'}: last heartbeat {self.silence_seconds:.0f} s ago"


class Heartbeat:
    """Calls ``beat`` at once and then every ``seconds`` in a thread, until it is stopped.

    It uses a thread so that a run with a busy event loop keeps its sandboxes.
    """

    def __init__(self, beat: Callable[[], None], seconds: float = BEAT_SECONDS) -> None:
        self._beat, self._seconds = beat, seconds
        self._stopped = threading.Event()
        beat()
        self._thread = threading.Thread(target=self._run, name="sandbox lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for a beat in progress."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._beat()
            except (SandboxError, OSError) as error:
                # Failed beats do no harm before EXPIRY_SECONDS.
                _log.warning("a sandbox lease could not be renewed: %s", error)
