"""The host folder of one bubblewrap run: who owns it, where its boxes are, and how dead ones are removed.

::

    <base>/                     one for each user of the machine, readable by that user alone
    ├── .host-<hash>/           what the "host" root file system needs generated, shared by runs (:mod:`.root`)
    └── <run>-<random>/
        ├── owner.json          the process that made it (:mod:`sandbox.owner`); touched at every heartbeat
        ├── groups.json         where its boxes' control groups are, if it has any
        └── boxes/<box>/        work, home and tmp of a box
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
class RunFolder:
    """The folder of one run."""

    path: Path

    @classmethod
    def make(cls, base: Path, owner: Owner, parents: CgroupParents | None) -> RunFolder:
        """Make the run's folder below ``base``, its owner written before it gets the name that the reaper looks at."""
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = base.lstat()
        # In a folder that all may write to, another user may have made it first.
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
            raise SandboxStartError(f"{base}: not a folder that only this user may write to; remove it, or set TMPDIR")
        name = re.sub(r"[^A-Za-z0-9_.]", "_", owner.run_id)[:40]
        hidden = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=base))
        (hidden / "boxes").mkdir()
        if parents is not None:
            (hidden / _GROUPS).write_text(parents.to_json())
        (hidden / _OWNER).write_text(owner.to_json())
        return cls(hidden.rename(base / hidden.name.lstrip(".")))

    def beat(self) -> None:
        """Renew the lease."""
        os.utime(self.path / _OWNER)

    def remove(self) -> None:
        # The owner's record last: until then a reaper can finish what was begun.
        remove_tree(self.path / "boxes")
        remove_tree(self.path)


def folder_leases(base: Path) -> list[Lease]:
    """The leases of the runs below ``base``."""
    leases = []
    for folder in base.glob("*/"):
        try:
            owner = Owner.from_json((folder / _OWNER).read_text())
            silent_for = time.time() - (folder / _OWNER).stat().st_mtime
        except (FileNotFoundError, ValueError):
            # Being removed by its owner, or not one of ours.
            continue
        boxes = tuple(box.name for box in (folder / "boxes").glob("*"))
        leases.append(Lease("bubblewrap", owner, boxes, silent_for, str(folder)))
    return leases


def remove_lease(lease: Lease) -> int:
    """Remove a dead run's folder, processes and control groups; return how many boxes there were."""
    folder = Path(lease.place)
    for group in _leftover_groups(folder):
        group.remove()
    remove_tree(folder)
    return len(lease.boxes)


def _leftover_groups(folder: Path) -> list[Cgroup]:
    """The control groups of a run, below its own process's: not where this one would make any."""
    try:
        parents = CgroupParents.from_json((folder / _GROUPS).read_text())
    except FileNotFoundError:
        return []
    return parents.leftovers(f"agent-rl-{folder.name}-")


def remove_tree(path: Path) -> None:
    """Remove a folder that hostile code has written to: any depth, any permissions, links never followed."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        # Folders without permission for their own owner, or nested deeper than rmtree's recursion goes.
        subprocess.run(["chmod", "-R", "u+rwX", "--", path], stderr=subprocess.DEVNULL, timeout=_REMOVE_SECONDS)
        subprocess.run(["rm", "-rf", "--", path], check=True, capture_output=True, timeout=_REMOVE_SECONDS)
