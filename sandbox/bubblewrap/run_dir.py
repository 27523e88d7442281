"""The host directory of one bubblewrap run: its owner, its sandboxes, and the removal of dead runs.

::

    <base>/                             one per user of the machine; only that user may access it
    ├── .host-<hash>/                   generated files of the "host" root file system, shared by runs (:mod:`.rootfs`)
    └── <run>-<random>/
        ├── owner.json                  the owner process (:mod:`sandbox.lease`); touched at every heartbeat
        ├── groups.json                 the parents of its sandboxes' control groups, if it has any
        ├── sandboxes/<sandbox>/        work, home and tmp of a sandbox
        └── trash/                      closed sandboxes that are being removed (:mod:`sandbox.removal`)
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sandbox.cgroup import Cgroup, CgroupParents
from sandbox.errors import SandboxStartError
from sandbox.lease import Lease, Owner
from sandbox.removal import remove_tree

_OWNER = "owner.json"
_GROUPS = "groups.json"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run."""

    path: Path

    @classmethod
    def make(cls, base: Path, owner: Owner, parents: CgroupParents | None) -> RunDirectory:
        """Create the run's directory below ``base``. It gets the name that the reaper searches for when its owner
        file is complete. Raises ``SandboxStartError`` if another user may write to ``base``."""
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = base.lstat()
        # The temporary directory is writable for all: another user may have created ``base`` first.
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
            raise SandboxStartError(
                f"{base}: must be a directory that only this user may write to; remove it or set TMPDIR"
            )
        name = re.sub(r"[^A-Za-z0-9_.]", "_", owner.run_id)[:40]
        hidden = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=base))
        (hidden / "sandboxes").mkdir()
        (hidden / "trash").mkdir()
        if parents is not None:
            (hidden / _GROUPS).write_text(parents.to_json())
        (hidden / _OWNER).write_text(owner.to_json())
        return cls(hidden.rename(base / hidden.name.lstrip(".")))

    @property
    def trash(self) -> Path:
        """The directory of closed sandboxes that are being removed."""
        return self.path / "trash"

    def beat(self) -> None:
        """Renew the lease."""
        os.utime(self.path / _OWNER)

    def remove(self) -> None:
        # Sandboxes first: while owner.json exists, a reaper can finish an interrupted removal.
        remove_tree(self.path / "sandboxes")
        remove_tree(self.trash)
        remove_tree(self.path)


def dir_leases(base: Path) -> list[Lease]:
    """Return the leases of the runs below ``base``."""
    leases = []
    for directory in base.glob("*/"):
        try:
            owner = Owner.from_json((directory / _OWNER).read_text())
            silence_seconds = time.time() - (directory / _OWNER).stat().st_mtime
            sandboxes = tuple(sandbox.name for sandbox in (directory / "sandboxes").glob("*"))
        except (FileNotFoundError, ValueError):
            continue  # being removed, or not a run directory
        leases.append(Lease("bubblewrap", owner, sandboxes, silence_seconds, str(directory)))
    return leases


def remove_lease(lease: Lease) -> int:
    """Remove the directory, processes and control groups of a dead run; return its number of sandboxes."""
    directory = Path(lease.location)
    for group in _leftover_groups(directory):
        group.remove()
    remove_tree(directory)
    return len(lease.sandboxes)


def _leftover_groups(directory: Path) -> list[Cgroup]:
    """Return the control groups of a run; they are below its own parents, not below those of this process."""
    try:
        parents = CgroupParents.from_json((directory / _GROUPS).read_text())
    except FileNotFoundError:
        return []
    return parents.leftovers(f"agent-rl-{directory.name}-")
