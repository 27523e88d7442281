"""Who owns a sandbox: the process that started it, identified so that a recycled process id is not mistaken for it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: its id and start time (clock ticks since boot), the boot, and the process-id namespace it lives in."""

    run_id: str
    pid: int
    started: int
    boot_id: str
    pid_namespace: str

    @classmethod
    def current(cls, run_id: str) -> Owner:
        """This process, as the owner of the run ``run_id``."""
        pid = os.getpid()
        started = _start_ticks(pid)
        if started is None:
            raise RuntimeError("/proc is not mounted: a process can't be told from a later one with its id")
        return cls(run_id, pid, started, _boot_id(), _pid_namespace())

    @classmethod
    def from_json(cls, text: str) -> Owner:
        """Read what ``to_json`` wrote. Raises ``ValueError`` on anything else."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"not an owner record: {error}") from None

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def same_boot(self) -> bool:
        """Whether the owner lives, or lived, on this machine since it was last started."""
        return self.boot_id == _boot_id()

    @property
    def visible(self) -> bool:
        """Whether the owner's process could be seen from here: of this boot, in this process-id namespace."""
        return self.same_boot and self.pid_namespace == _pid_namespace()

    @property
    def running(self) -> bool:
        """Whether a visible owner's process still runs."""
        return _start_ticks(self.pid) == self.started


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name may hold spaces and brackets, so fields are counted from the last closing one (proc(5)).
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
