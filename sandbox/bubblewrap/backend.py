"""The bubblewrap backend: each command runs in new namespaces, which bubblewrap creates in a few milliseconds.

A sandbox is a host directory with three subdirectories, mounted writable as the working directory, /tmp and home; the
rest of its file system is read-only (:mod:`.rootfs`). Nothing runs between commands: every command is one ``bwrap``
process, and its background processes end with it. Limits are enforced by control groups if this process can create
them (:mod:`sandbox.cgroup`), otherwise by resource limits; ``BubblewrapBackend.limits`` reports which.
"""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
from functools import partial
from pathlib import Path

from sandbox.bubblewrap.launch import OVERHEAD_PROCESSES, Launcher, find_bwrap
from sandbox.bubblewrap.private import private_paths
from sandbox.bubblewrap.rootfs import HOST_IMAGE, RootFs, dir_root, host_root, resolve_image_directory
from sandbox.bubblewrap.run_dir import RunDirectory, dir_leases, remove_lease
from sandbox.bubblewrap.sandbox import BubblewrapSandbox, on_disk
from sandbox.cgroup import CgroupParents, find_parents
from sandbox.disk import check_free_space
from sandbox.errors import SandboxError, SandboxLostError, SandboxStartError
from sandbox.lease import Heartbeat, Owner
from sandbox.removal import Remover
from sandbox.shielded import shielded
from sandbox.types import ImagePolicy, SandboxSpec


class BubblewrapBackend:
    """Sandboxes of bubblewrap. Raises ``SandboxUnavailableError`` if it is not installed or not permitted.

    ``images`` is the policy for image directories; without it, only ``HOST_IMAGE`` (the host's system directories) is
    allowed. ``base`` is the directory of the sandboxes.
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
        self._private = private_paths(self._policy.private)
        self._parents: CgroupParents | None = find_parents() if control_groups else None
        self._directory = on_disk(
            partial(RunDirectory.make, self._base, Owner.current(run_id), self._parents),
            f"{self._base}",
            SandboxStartError,
        )
        self._launcher = Launcher.make(program, flags, self._directory.path / "filter")
        self._remover = Remover(self._directory.trash)
        self._heartbeat = Heartbeat(self._directory.beat)
        self._sandboxes: dict[str, BubblewrapSandbox] = {}
        self._roots: dict[str, RootFs] = {}
        self._roots_lock = asyncio.Lock()
        self._count = 0
        self._closed = False

    @property
    def name(self) -> str:
        return "bubblewrap"

    @property
    def limits(self) -> str:
        """How limits are enforced; for people."""
        return self._parents.description if self._parents else "resource limits (address space, processes)"

    @property
    def disk(self) -> Path:
        """The directory of the sandboxes."""
        return self._base

    async def image_id(self, image: str) -> str:
        """Return the directory of ``image``, or distribution and Python version for ``HOST_IMAGE``.

        Raises ``ImageMissingError``.
        """
        if image == HOST_IMAGE:
            return await asyncio.to_thread(_describe_system)
        return str((await self._root(image)).seed)

    async def fetch(self, image: str) -> None:
        """Check that the directory ``image`` exists. Raises ``ImageMissingError``."""
        await self.image_id(image)

    async def start(self, spec: SandboxSpec) -> BubblewrapSandbox:
        """Start a sandbox. Raises ``ImageMissingError`` or ``SandboxStartError``."""
        if self._closed:
            raise SandboxStartError("the backend is closed")
        root = await self._root(spec.image)
        self._count += 1
        id = f"{self._directory.path.name}-{self._count}"
        directory = self._directory.path / "sandboxes" / id
        sandbox = BubblewrapSandbox(
            id, spec, root, directory, self._launcher, self._remover, self._private, self._forget
        )
        self._sandboxes[sandbox.id] = sandbox
        try:
            await shielded(asyncio.to_thread(self._prepare, sandbox))
            if root.seed is not None:
                await sandbox.disk_watch.set_baseline()
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
        async with self._roots_lock, asyncio.TaskGroup() as group:
            for sandbox in list(self._sandboxes.values()):
                group.create_task(sandbox.close())
        await asyncio.to_thread(self._remover.close)
        await asyncio.to_thread(self._heartbeat.stop)
        await asyncio.to_thread(on_disk, self._directory.remove, f"{self._base}", SandboxLostError)

    async def _root(self, image: str) -> RootFs:
        async with self._roots_lock:
            if image not in self._roots:
                # Shielded: the thread ignores cancellation and must not run while ``close`` removes the directory.
                self._roots[image] = await shielded(asyncio.to_thread(self._make_root, image))
            return self._roots[image]

    def _make_root(self, image: str) -> RootFs:
        if image != HOST_IMAGE:
            return dir_root(resolve_image_directory(image, self._policy), self._private)
        return on_disk(
            partial(host_root, self._base, self._private), "the sandboxes' root file system", SandboxStartError
        )

    def _prepare(self, sandbox: BubblewrapSandbox) -> None:
        """Create the directories and the control group of ``sandbox``. Blocking."""
        self._remover.wait_for_space()
        check_free_space(self._base)
        for source in sandbox.spec.ro_binds:
            if not Path(source).exists():
                raise SandboxStartError(f"ro_binds: {source}: no such file or directory on the host")
        on_disk(sandbox.make_dirs, f"sandbox {sandbox.id}", SandboxStartError)
        if self._parents is not None:
            spec = sandbox.spec
            try:
                sandbox.cgroup = self._parents.make(
                    f"agent-rl-{sandbox.id}",
                    memory_mb=spec.memory_mb,
                    pids=spec.pids + OVERHEAD_PROCESSES,
                    cpus=spec.cpus,
                )
            except OSError as error:
                raise SandboxStartError(f"sandbox {sandbox.id}: cannot create its control group: {error}") from None

    def _forget(self, sandbox: BubblewrapSandbox) -> None:
        self._sandboxes.pop(sandbox.id, None)


def _describe_system() -> str:
    return f"{platform.freedesktop_os_release().get('PRETTY_NAME')}, Python {platform.python_version()}"


def default_base() -> Path:
    """Return the directory of this user's sandboxes."""
    return Path(tempfile.gettempdir(), f"agent-rl-sandboxes-{os.getuid()}")


def reap_dirs(base: Path) -> int:
    """Remove the sandboxes of dead leases below ``base``; return how many."""
    return sum(remove_lease(lease) for lease in dir_leases(base) if lease.dead)
