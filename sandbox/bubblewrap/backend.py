"""The embedded backend: each command runs in namespaces of its own, made by bubblewrap in a few milliseconds.

A box is a folder on the host with three sub-folders, mounted writable as the working folder, /tmp and the home; the
rest of its file system is read-only (:mod:`.root`). Nothing runs between commands: every command is one
``bwrap``, and whatever it leaves behind dies with it. Limits hold through control groups where this process can make
them (:mod:`sandbox.cgroup`), otherwise through resource limits; ``BubblewrapBackend.limits`` says which.
"""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
from functools import partial
from pathlib import Path

from sandbox.bubblewrap.box import BubblewrapBox, on_disk
from sandbox.bubblewrap.launch import OWN_PROCESSES, Launcher, find_bwrap
from sandbox.bubblewrap.rootfs import HOST_IMAGE, RootFs, allowed_folder, folder_root, host_root
from sandbox.bubblewrap.run_dir import RunFolder, folder_leases, remove_lease
from sandbox.cgroup import CgroupParents, find_parents
from sandbox.disk import check_room
from sandbox.errors import SandboxError, SandboxLostError, SandboxStartError
from sandbox.lease import Heartbeat
from sandbox.owner import Owner
from sandbox.shielded import shielded
from sandbox.types import ImagePolicy, SandboxSpec


class BubblewrapBackend:
    """Boxes made with bubblewrap. Raises ``SandboxUnavailableError`` where it is absent or not allowed.

    ``images`` says which folders may be images; without it only the host's own folders (``HOST_IMAGE``) are one.
    """

    def __init__(
        self,
        *,
        run_id: str,
        images: ImagePolicy | None = None,
        base: Path | None = None,
        control_groups: bool = True,
    ) -> None:
        program, flags = find_bwrap()
        self._policy = images or ImagePolicy()
        self._base = base or default_base()
        self._parents: CgroupParents | None = find_parents() if control_groups else None
        self._folder = on_disk(
            partial(RunFolder.make, self._base, Owner.current(run_id), self._parents),
            f"{self._base}",
            SandboxStartError,
        )
        self._launcher = Launcher.make(program, flags, self._folder.path / "filter")
        self._heartbeat = Heartbeat(self._folder.beat)
        self._boxes: dict[str, BubblewrapBox] = {}
        self._roots: dict[str, RootFs] = {}
        self._rooting = asyncio.Lock()
        self._count = 0
        self._closed = False

    @property
    def name(self) -> str:
        return "bubblewrap"

    @property
    def limits(self) -> str:
        """What holds a box's limits on this machine."""
        return self._parents.description if self._parents else "resource limits (address space, processes)"

    @property
    def disk(self) -> Path:
        """The folder that boxes are in."""
        return self._base

    async def image_id(self, image: str) -> str:
        """The folder that ``image`` is; for the machine's own folders its system and Python. Raises
        ``ImageMissingError``."""
        if image == HOST_IMAGE:
            return await asyncio.to_thread(_system)
        return str((await self._root(image)).seed)

    async def fetch(self, image: str) -> None:
        """Nothing: images are folders. Raises ``ImageMissingError`` where ``image`` is none."""
        await self.image_id(image)

    async def start(self, spec: SandboxSpec) -> BubblewrapBox:
        """Start a box. Raises ``ImageMissingError`` or ``SandboxStartError``."""
        if self._closed:
            raise SandboxStartError("the backend is closed")
        root = await self._root(spec.image)
        self._count += 1
        id = f"{self._folder.path.name}-{self._count}"
        folder = self._folder.path / "boxes" / id
        box = BubblewrapBox(id, spec, root, folder, self._launcher, self._forget)
        self._boxes[box.id] = box
        try:
            await shielded(asyncio.to_thread(self._prepare, box))
            if root.seed is not None:
                await box.growth.start_from_here()
        except BaseException:
            await box.close()
            raise
        return box

    async def reap(self) -> int:
        """Remove the boxes of this user's dead runs; return how many."""
        return await asyncio.to_thread(on_disk, partial(reap_folders, self._base), f"{self._base}", SandboxError)

    async def close(self) -> None:
        """Close every box and remove the run's folder."""
        self._closed = True
        await shielded(self._close())

    async def _close(self) -> None:
        async with self._rooting, asyncio.TaskGroup() as group:
            for box in list(self._boxes.values()):
                group.create_task(box.close())
        await asyncio.to_thread(self._heartbeat.stop)
        await asyncio.to_thread(on_disk, self._folder.remove, f"{self._base}", SandboxLostError)

    async def _root(self, image: str) -> RootFs:
        async with self._rooting:
            if image not in self._roots:
                # Shielded, as a thread goes on when its waiter is cancelled, and would meet the folder's removal.
                self._roots[image] = await shielded(asyncio.to_thread(self._make_root, image))
            return self._roots[image]

    def _make_root(self, image: str) -> RootFs:
        if image != HOST_IMAGE:
            return folder_root(allowed_folder(image, self._policy))
        return on_disk(partial(host_root, self._base), "the boxes' root file system", SandboxStartError)

    def _prepare(self, box: BubblewrapBox) -> None:
        """Make the box's folders and group. Runs in a thread."""
        check_room(self._base)
        for source in box.spec.ro_binds:
            if not Path(source).exists():
                raise SandboxStartError(f"ro_binds: {source}: no such file or folder on the host")
        on_disk(box.make_folders, f"box {box.id}", SandboxStartError)
        if self._parents is not None:
            spec = box.spec
            try:
                box.cgroup = self._parents.make(
                    f"agent-rl-{box.id}", memory_mb=spec.memory_mb, pids=spec.pids + OWN_PROCESSES, cpus=spec.cpus
                )
            except OSError as error:
                raise SandboxStartError(f"box {box.id}: its control group could not be made: {error}") from None

    def _forget(self, box: BubblewrapBox) -> None:
        self._boxes.pop(box.id, None)


def _system() -> str:
    """The machine's distribution and Python, which a box of its own folders sees."""
    return f"{platform.freedesktop_os_release().get('PRETTY_NAME')}, Python {platform.python_version()}"


def default_base() -> Path:
    """Where this user's boxes are."""
    return Path(tempfile.gettempdir(), f"agent-rl-boxes-{os.getuid()}")


def reap_folders(base: Path) -> int:
    """Remove the boxes below ``base`` whose lease is dead; return how many."""
    return sum(remove_lease(lease) for lease in folder_leases(base) if lease.dead)
