"""Control groups, version 1 and 2: memory, process and CPU limits for a sandbox without a container engine.

Version 1 has a tree for each controller, version 2 one tree for all; a sandbox's group is a directory in each tree
that is used. Groups are made below this process's own where it may, so that limits set on it from outside keep holding.
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
_LOG_RECORD = 8192  # bytes, the kernel's own limit; a read of its log gives one record


@dataclass(frozen=True, slots=True)
class CgroupParents:
    """Directories below which groups can be made and joined, by controller; version 2 names the same directory for
    each."""

    version: int
    directories: dict[str, Path]

    def make(self, name: str, *, memory_mb: int, pids: int, cpus: float) -> Cgroup:
        """Make the group ``name`` with its limits. Raises ``OSError``."""
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
        """The groups whose name begins with ``prefix``."""
        names = {path.name for directory in set(self.directories.values()) for path in directory.glob(f"{prefix}*")}
        return [
            Cgroup(self.version, {c: directory / name for c, directory in self.directories.items()}) for name in names
        ]

    def to_json(self) -> str:
        return json.dumps([self.version, {name: str(directory) for name, directory in self.directories.items()}])

    @classmethod
    def from_json(cls, text: str) -> CgroupParents:
        """Read what ``to_json`` wrote."""
        version, directories = json.loads(text)
        return cls(version, {name: Path(directory) for name, directory in directories.items()})

    @property
    def description(self) -> str:
        return f"cgroup v{self.version} ({', '.join(self.directories)})"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One sandbox's group."""

    version: int
    directories: dict[str, Path]

    @property
    def paths(self) -> list[Path]:
        return list(dict.fromkeys(self.directories.values()))

    @property
    def procs_files(self) -> list[str]:
        """The files that a process writes its id (or 0) to in order to join."""
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
        """How many processes the kernel has killed here for want of memory."""
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
        """Kill what is left and remove the group. Raises ``OSError`` where it can't be removed within some seconds."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        for path in self.paths:
            while True:
                try:
                    path.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    # Busy: a process has not quite died yet.
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
    """The count of out-of-memory kills in a memory group's directory, of either version; 0 where it can't be read."""
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in (memory_dir / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def ran_out_of_memory(group: str, log: Path = Path("/dev/kmsg")) -> bool:
    """Whether the kernel's log has a process killed for the memory limit of a control group of this name, or of one
    below it; False also where the log can't be read. Of a group that was removed nothing else is left."""
    killed = re.compile(rf"oom_memcg=[^,\s]*/(?:\w+-)?{re.escape(group)}(?:\.scope)?[/,]".encode())
    with (
        contextlib.suppress(OSError),
        open(log, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as records,
    ):
        while record := records.read(_LOG_RECORD):
            if killed.search(record):
                return True
    return False


def dirs_of(pid: int | str) -> dict[str, Path]:
    """The directory of process ``pid`` in each mounted controller's tree ("" is version 2's). Empty where none is
    seen."""
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
    """Where this process can make groups and a child of it can join them, tried out; None where it can't."""
    return _find_v1() or _find_v2()


def _find_v1() -> CgroupParents | None:
    mounts, own = _mounts(), dirs_of("self")
    directories = {}
    for controller in CONTROLLERS:
        if controller in mounts:
            # Inside a container the path may be one of the host's that is not visible here: take the root of the view.
            mine = own.get(controller, mounts[controller])
            directories[controller] = mine if mine.is_dir() else mounts[controller]
    # Without these two a limit in the spec would silently not hold; a missing CPU limit only lets a sandbox run faster.
    if not {"memory", "pids"} <= directories.keys():
        return None
    parents = CgroupParents(1, directories)
    return parents if _joinable(parents) else None


def _find_v2() -> CgroupParents | None:
    root = _mounts().get("")
    if root is None:
        return None
    own = dirs_of("self")[""]
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
    """The wanted controllers that children of ``directory`` have, after trying to hand them down."""
    control = directory / "cgroup.subtree_control"
    for controller in CONTROLLERS:
        # Refused where it is not ours or holds processes: what is handed down already is what counts.
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
    """``argv`` run in the groups whose ``cgroup.procs`` are given, after the shell text ``prologue``.

    A shell joins and then becomes ``argv``: a fork in this process to do it would copy all of its page tables.
    """
    files = list(procs_files)
    joins = "".join(f'echo 0 > "${{{i}}}" || exit 125; ' for i in range(1, len(files) + 1))
    return ["/bin/sh", "-c", f'{prologue}{joins}shift {len(files)}; exec "$@"', "sh", *files, *argv]


def _mounts() -> dict[str, Path]:
    """Mount points of control groups: each version 1 controller, and "" for version 2."""
    found: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                found.setdefault("", Path(point))
            elif kind == "cgroup":
                for option in options.split(","):
                    if option in CONTROLLERS:
                        found.setdefault(option, Path(point))
    return found
