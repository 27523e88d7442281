"""Control groups, versions 1 and 2: memory, process and CPU limits of a sandbox without a container engine.

Version 1 has one tree per controller, version 2 one tree for all. The group of a sandbox is a directory in each tree in
use. If possible, it is created below the group of this process, so that limits of this process still apply.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
_REMOVE_SECONDS = 5.0
_PROBE_SECONDS = 5.0
_LOG_RECORD_BYTES = 8192  # the kernel's maximum; each read of /dev/kmsg returns one record


@dataclass(frozen=True, slots=True)
class CgroupParents:
    """Directories below which groups can be created and joined, by controller (version 2: one for all controllers)."""

    version: int
    directories: dict[str, Path]

    def make(self, name: str, *, memory_mb: int, pids: int, cpus: float) -> Cgroup:
        """Create the group ``name`` with its limits. Raises ``OSError``."""
        group = Cgroup(self.version, {c: directory / name for c, directory in self.directories.items()})
        try:
            for path in group.paths:
                path.mkdir()
            group.limit(memory_mb=memory_mb, pids=pids, cpus=cpus)
        except OSError:
            group.remove()
            raise
        return group

    def leftovers(self, prefix: str) -> list[Cgroup]:
        """Return the groups whose name begins with ``prefix``."""
        names = {path.name for directory in set(self.directories.values()) for path in directory.glob(f"{prefix}*")}
        return [
            Cgroup(self.version, {c: directory / name for c, directory in self.directories.items()}) for name in names
        ]

    def to_json(self) -> str:
        return json.dumps([self.version, {name: str(directory) for name, directory in self.directories.items()}])

    @classmethod
    def from_json(cls, text: str) -> CgroupParents:
        """Parse the output of ``to_json``."""
        version, directories = json.loads(text)
        return cls(version, {name: Path(directory) for name, directory in directories.items()})

    @property
    def description(self) -> str:
        return f"cgroup v{self.version} ({', '.join(self.directories)})"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The control group of one sandbox."""

    version: int
    directories: dict[str, Path]

    @property
    def paths(self) -> list[Path]:
        return list(dict.fromkeys(self.directories.values()))

    @property
    def procs_files(self) -> list[str]:
        """The files to which a process writes its id, or 0 for itself, to join the group."""
        return [str(path / "cgroup.procs") for path in self.paths]

    def limit(self, *, memory_mb: int, pids: int, cpus: float) -> None:
        memory, quota = memory_mb << 20, int(cpus * _CPU_PERIOD_US)
        if self.version == 1:
            self._set("memory", "memory.limit_in_bytes", memory)
            self._set("memory", "memory.memsw.limit_in_bytes", memory, optional=True)
            self._set("cpu", "cpu.cfs_period_us", _CPU_PERIOD_US)
            self._set("cpu", "cpu.cfs_quota_us", quota)
        else:
            self._set("memory", "memory.max", memory)
            self._set("memory", "memory.swap.max", 0, optional=True)
            self._set("cpu", "cpu.max", f"{quota} {_CPU_PERIOD_US}")
        self._set("pids", "pids.max", pids)

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed in the group at the memory limit."""
        if "memory" not in self.directories:
            return 0
        return oom_kills(self.directories["memory"])

    def kill(self) -> None:
        """Kill every process in the group."""
        for path in self.paths:
            with contextlib.suppress(FileNotFoundError):
                for pid in (path / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def remove(self) -> None:
        """Kill its processes and remove the group. Raises ``OSError`` if that takes more than 5 seconds."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        for path in self.paths:
            while True:
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    # Busy: a killed process still exists.
                    if time.monotonic() > deadline:
                        raise
                    self.kill()
                    time.sleep(0.005)
                else:
                    break

    def _set(self, controller: str, file: str, value: int | str, *, optional: bool = False) -> None:
        if controller not in self.directories:
            return
        path = self.directories[controller] / file
        if optional and not path.exists():
            return
        path.write_text(str(value))


def oom_kills(memory_dir: Path) -> int:
    """Return the out-of-memory kills of the memory group ``memory_dir`` (either version); 0 if it cannot be read."""
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in (memory_dir / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def ran_out_of_memory(group: str, log: Path = Path("/dev/kmsg")) -> bool:
    """Whether the kernel log reports an out-of-memory kill in the control group ``group`` or below it.

    The log is the only trace of a removed group. Returns False if it cannot be read.
    """
    killed = re.compile(rf"oom_memcg=[^,\s]*/(?:\w+-)?{re.escape(group)}(?:\.scope)?[/,]".encode())
    with (
        contextlib.suppress(OSError),
        open(log, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as records,
    ):
        while record := records.read(_LOG_RECORD_BYTES):
            if killed.search(record):
                return True
    return False


def cgroup_directories(pid: int | str) -> dict[str, Path]:
    """Return the control-group directory of process ``pid`` by controller ("" for version 2); empty if not visible."""
    mounts = _mounts()
    directories = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                if name in mounts:
                    directories[name] = mounts[name] / path.lstrip("/")
    return directories


def find_parents() -> CgroupParents | None:
    """Return the directories in which this process can create groups that a child can join, or None; tests it."""
    return _find_v1() or _find_v2()


def _find_v1() -> CgroupParents | None:
    mounts, own = _mounts(), cgroup_directories("self")
    directories = {}
    for controller in CONTROLLERS:
        if controller in mounts:
            # In a container, the path may be a host path that is not visible here: use the mount point instead.
            current = own.get(controller, mounts[controller])
            directories[controller] = current if current.is_dir() else mounts[controller]
    # Both are required: without them a limit of the spec would silently not hold. The CPU limit is optional.
    if not {"memory", "pids"} <= directories.keys():
        return None
    parents = CgroupParents(1, directories)
    return parents if _joinable(parents) else None


def _find_v2() -> CgroupParents | None:
    root = _mounts().get("")
    if root is None:
        return None
    own = cgroup_directories("self")[""]
    candidates = [own, *own.parents] if own.is_relative_to(root) and own.is_dir() else [root]
    for directory in candidates:
        if not directory.is_relative_to(root):
            break
        controllers = _enabled_v2(directory)
        parents = CgroupParents(2, dict.fromkeys(controllers, directory))
        if {"memory", "pids"} <= set(controllers) and _joinable(parents):
            return parents
    return None


def _enabled_v2(directory: Path) -> list[str]:
    """Try to enable the controllers for children of ``directory``; return the enabled ones."""
    control = directory / "cgroup.subtree_control"
    for controller in CONTROLLERS:
        # Fails if the directory belongs to another user or contains processes; it may be enabled already.
        with contextlib.suppress(OSError):
            control.write_text(f"+{controller}")
    try:
        enabled = control.read_text().split()
    except OSError:
        return []
    return [controller for controller in CONTROLLERS if controller in enabled]


def _joinable(parents: CgroupParents) -> bool:
    try:
        group = parents.make(f"agent-rl-probe-{os.getpid()}", memory_mb=64, pids=16, cpus=1.0)
    except OSError:
        return False
    try:
        probe = join_command(group.procs_files, ("true",))
        return subprocess.run(probe, stderr=subprocess.DEVNULL, timeout=_PROBE_SECONDS).returncode == 0
    finally:
        group.remove()


def join_command(procs_files: Iterable[str], argv: Sequence[str], *, prologue: str = "") -> list[str]:
    """Return a command that runs the shell ``prologue``, joins the groups of ``procs_files`` and executes ``argv``.

    A shell joins the groups and then becomes ``argv``; a fork of this process would copy all of its page tables.
    """
    files = list(procs_files)
    joins = "".join(f'echo 0 > "${{{i}}}" || exit 125; ' for i in range(1, len(files) + 1))
    return ["/bin/sh", "-c", f'{prologue}{joins}shift {len(files)}; exec "$@"', "sh", *files, *argv]


def _mounts() -> dict[str, Path]:
    """Return the mount points of control groups by version 1 controller, and "" for version 2."""
    mounts: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                mounts.setdefault("", Path(point))
            elif kind == "cgroup":
                for option in options.split(","):
                    if option in CONTROLLERS:
                        mounts.setdefault(option, Path(point))
    return mounts
