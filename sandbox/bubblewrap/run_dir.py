"""The host directory of one bubblewrap run: who owns it, where its sandboxes are, and how dead ones are removed.

::

    <base>/                     one for each user of the machine, readable by that user alone
    ├── .host-<hash>/           what the "host" root file system needs generated, shared by runs (:mod:`.root`)
    └── <run>-<random>/
        ├── owner.json          the process that made it (:mod:`sandbox.owner`); touched at every heartbeat
        ├── groups.json         where its sandboxes' control groups are, if it has any
        └── sandboxes/<sandbox>/        work, home and tmp of a sandbox
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox.cgroup import Cgroup, CgroupParents
from sandbox.errors import SandboxStartError
from sandbox.lease import Lease
from sandbox.owner import Owner

_OWNER = "owner.json"
_GROUPS = "groups.json"
_REMOVE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run."""

    path: Path

    @classmethod
    def make(cls, base: Path, owner: Owner, parents: CgroupParents | None) -> RunDirectory:
        """Make the run's directory below ``base``, its owner written before it gets the name that the reaper looks
        at."""
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = base.lstat()
        # In a directory that all may write to, another user may have made it first.
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
            raise SandboxStartError(
                f"{base}: not a directory that only this user may write to; remove it, or set TMPDIR"
            )
        name = re.sub(r"[^A-Za-z0-9_.]", "_", owner.run_id)[:40]
        hidden = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=base))
        (hidden / "sandboxes").mkdir()
        if parents is not None:
            (hidden / _GROUPS).write_text(parents.to_json())
        (hidden / _OWNER).write_text(owner.to_json())
        return cls(hidden.rename(base / hidden.name.lstrip(".")))

    def beat(self) -> None:
        """Renew the lease."""
        os.utime(self.path / _OWNER)

    def remove(self) -> None:
        # The owner's record last: until then a reaper can finish what was begun.
        remove_tree(self.path / "sandboxes")
        remove_tree(self.path)


def dir_leases(base: Path) -> list[Lease]:
    """The leases of the runs below ``base``."""
    leases = []
    for directory in base.glob("*/"):
        try:
            owner = Owner.from_json((directory / _OWNER).read_text())
            silent_for = time.time() - (directory / _OWNER).stat().st_mtime
        except (FileNotFoundError, ValueError):
            # Being removed by its owner, or not one of ours.
            continue
        sandboxes = tuple(sandbox.name for sandbox in (directory / "sandboxes").glob("*"))
        leases.append(Lease("bubblewrap", owner, sandboxes, silent_for, str(directory)))
    return leases


def remove_lease(lease: Lease) -> int:
    """Remove a dead run's directory, processes and control groups; return how many sandboxes there were."""
    directory = Path(lease.place)
    for group in _leftover_groups(directory):
        group.remove()
    remove_tree(directory)
    return len(lease.sandboxes)


def _leftover_groups(directory: Path) -> list[Cgroup]:
    """The control groups of a run, below its own process's: not where this one would make any."""
    try:
        parents = CgroupParents.from_json((directory / _GROUPS).read_text())
    except FileNotFoundError:
        return []
    return parents.leftovers(f"agent-rl-{directory.name}-")


def remove_tree(path: Path) -> None:
    """Remove a directory that hostile code has written to: any depth, any permissions, links never followed."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        # Directories without permission for their own owner, or nested deeper than rmtree's recursion goes.
        subprocess.run(["chmod", "-R", "u+rwX", "--", path], stderr=subprocess.DEVNULL, timeout=_REMOVE_SECONDS)
        subprocess.run(["rm", "-rf", "--", path], check=True, capture_output=True, timeout=_REMOVE_SECONDS)
