"""The embedded backend: each command runs in namespaces of its own, made by bubblewrap in a few milliseconds.

A sandbox is a directory on the host with three subdirectories, mounted writable as the working directory, /tmp and the
home; the rest of its file system is read-only (:mod:`.root`). Nothing runs between commands: every command is one
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

from sandbox.bubblewrap.launch import OWN_PROCESSES, Launcher, find_bwrap
from sandbox.bubblewrap.rootfs import HOST_IMAGE, RootFs, allowed_dir, dir_root, host_root
from sandbox.bubblewrap.run_dir import RunDirectory, dir_leases, remove_lease
from sandbox.bubblewrap.sandbox import BubblewrapSandbox, on_disk
from sandbox.cgroup import CgroupParents, find_parents
from sandbox.disk import check_room
from sandbox.errors import SandboxError, SandboxLostError, SandboxStartError
from sandbox.lease import Heartbeat
from sandbox.owner import Owner
from sandbox.shielded import shielded
from sandbox.types import ImagePolicy, SandboxSpec


class BubblewrapBackend:
    """Sandboxes made with bubblewrap. Raises ``SandboxUnavailableError`` where it is absent or not allowed.

    ``images`` says which directories may be images; without it only the host's own directories (``HOST_IMAGE``) are
    one.
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
        self._directory = on_disk(
            partial(RunDirectory.make, self._base, Owner.current(run_id), self._parents),
            f"{self._base}",
            SandboxStartError,
        )
        self._launcher = Launcher.make(program, flags, self._directory.path / "filter")
        self._heartbeat = Heartbeat(self._directory.beat)
        self._sandboxes: dict[str, BubblewrapSandbox] = {}
        self._roots: dict[str, RootFs] = {}
        self._rooting = asyncio.Lock()
        self._count = 0
        self._closed = False

    @property
    def name(self) -> str:
        return "bubblewrap"

    @property
    def limits(self) -> str:
        """What holds a sandbox's limits on this machine."""
        return self._parents.description if self._parents else "resource limits (address space, processes)"

    @property
    def disk(self) -> Path:
        """The directory that sandboxes are in."""
        return self._base

    async def image_id(self, image: str) -> str:
        """The directory that ``image`` is; for the machine's own directories its system and Python. Raises
        ``ImageMissingError``."""
        if image == HOST_IMAGE:
            return await asyncio.to_thread(_system)
        return str((await self._root(image)).seed)

    async def fetch(self, image: str) -> None:
        """Nothing: images are directories. Raises ``ImageMissingError`` where ``image`` is none."""
        await self.image_id(image)

    async def start(self, spec: SandboxSpec) -> BubblewrapSandbox:
        """Start a sandbox. Raises ``ImageMissingError`` or ``SandboxStartError``."""
        if self._closed:
            raise SandboxStartError("the backend is closed")
        root = await self._root(spec.image)
        self._count += 1
        id = f"{self._directory.path.name}-{self._count}"
        directory = self._directory.path / "sandboxes" / id
        sandbox = BubblewrapSandbox(id, spec, root, directory, self._launcher, self._forget)
        self._sandboxes[sandbox.id] = sandbox
        try:
            await shielded(asyncio.to_thread(self._prepare, sandbox))
            if root.seed is not None:
                await sandbox.growth.start_from_here()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def reap(self) -> int:
        """Remove the sandboxes of this user's dead runs; return how many."""
        return await asyncio.to_thread(on_disk, partial(reap_dirs, self._base), f"{self._base}", SandboxError)

    async def close(self) -> None:
        """Close every sandbox and remove the run's directory."""
        self._closed = True
        await shielded(self._close())

    async def _close(self) -> None:
        async with self._rooting, asyncio.TaskGroup() as group:
            for sandbox in list(self._sandboxes.values()):
                group.create_task(sandbox.close())
        await asyncio.to_thread(self._heartbeat.stop)
        await asyncio.to_thread(on_disk, self._directory.remove, f"{self._base}", SandboxLostError)

    async def _root(self, image: str) -> RootFs:
        async with self._rooting:
            if image not in self._roots:
                # Shielded, as a thread goes on when its waiter is cancelled, and would meet the directory's removal.
                self._roots[image] = await shielded(asyncio.to_thread(self._make_root, image))
            return self._roots[image]

    def _make_root(self, image: str) -> RootFs:
        if image != HOST_IMAGE:
            return dir_root(allowed_dir(image, self._policy))
        return on_disk(partial(host_root, self._base), "the sandboxes' root file system", SandboxStartError)

    def _prepare(self, sandbox: BubblewrapSandbox) -> None:
        """Make the sandbox's directories and group. Runs in a thread."""
        check_room(self._base)
        for source in sandbox.spec.ro_binds:
            if not Path(source).exists():
                raise SandboxStartError(f"ro_binds: {source}: no such file or directory on the host")
        on_disk(sandbox.make_dirs, f"sandbox {sandbox.id}", SandboxStartError)
        if self._parents is not None:
            spec = sandbox.spec
            try:
                sandbox.cgroup = self._parents.make(
                    f"agent-rl-{sandbox.id}", memory_mb=spec.memory_mb, pids=spec.pids + OWN_PROCESSES, cpus=spec.cpus
                )
            except OSError as error:
                raise SandboxStartError(f"sandbox {sandbox.id}: its control group could not be made: {error}") from None

    def _forget(self, sandbox: BubblewrapSandbox) -> None:
        self._sandboxes.pop(sandbox.id, None)


def _system() -> str:
    """The machine's distribution and Python, which a sandbox of its own directories sees."""
    return f"{platform.freedesktop_os_release().get('PRETTY_NAME')}, Python {platform.python_version()}"


def default_base() -> Path:
    """Where this user's sandboxes are."""
    return Path(tempfile.gettempdir(), f"agent-rl-sandboxes-{os.getuid()}")


def reap_dirs(base: Path) -> int:
    """Remove the sandboxes below ``base`` whose lease is dead; return how many."""
    return sum(remove_lease(lease) for lease in dir_leases(base) if lease.dead)
