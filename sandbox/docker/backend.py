"""The container backend: one container of a running engine for each sandbox, over the ``docker`` package.

A container's first processes belong to the user nobody; commands run as its root, without capabilities. So commands
can be ended by a ``kill -9 -1`` inside the sandbox that can't reach what keeps the sandbox alive, and neither can they.
Commands of one sandbox run one after another.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import docker.errors
from docker.types import LogConfig, Ulimit

from sandbox.disk import check_room
from sandbox.docker.disk import is_want_of_quota, may_have_quota, quota
from sandbox.docker.engine import THREADS, EngineClient, connect, converted
from sandbox.docker.images import ImageStore, ledger_of
from sandbox.docker.lease import OWNER_LABEL, RUN_LABEL, EngineLease, engine_leases, remove_lease
from sandbox.docker.sandbox import DockerSandbox
from sandbox.errors import (
    ImageMissingError,
    SandboxError,
    SandboxStartError,
    SandboxUnavailableError,
)
from sandbox.files import archive
from sandbox.lease import Heartbeat
from sandbox.owner import Owner
from sandbox.shielded import shielded
from sandbox.types import ImagePolicy, SandboxSpec

T = TypeVar("T")

DEFAULT_IMAGE = "agent-rl-base"
"""What ``SandboxSpec.image == "host"`` means here: the image that ``python -m sandbox.base_image`` builds."""
FILE_SIZE_LIMIT = 1 << 30
"""Bytes one file written in a sandbox may have."""
GVISOR = "runsc"
_SHARED = "--file-access=shared"
# What gVisor's kernel takes of the engine's limits for itself: MiB, threads, and tasks for each process in the sandbox
# (measured: 73 Pythons take 300 MiB, of which most is gVisor's doing, and a bomb of 76 processes up to 1,400 tasks).
_GVISOR_MB, _GVISOR_THREADS, _GVISOR_TASKS = 128, 256, 24
_KEEPER = "65534:65534"
_OWN_PROCESSES = 12  # init, keeper, wrapper, head, timeout; and the threads that the engine's runtime enters with


class DockerBackend:
    """Sandboxes in a container engine. Raises ``SandboxUnavailableError`` where none answers, or none that holds
    limits.

    ``runtime`` starts the sandboxes' processes, ``runsc`` (gVisor) say; None takes the engine's own default.
    """

    def __init__(self, *, run_id: str, images: ImagePolicy | None = None, runtime: str | None = None) -> None:
        self._api = connect(self.name)
        check_limits(self._api.about)
        self._runtime = runtime
        if runtime is not None:
            self._check_runtime(runtime)
        self._disk = Path(self._api.about["DockerRootDir"])
        self._quota = may_have_quota(self._api.about)
        self._owner = Owner.current(run_id)
        self._lease = EngineLease(self._api, self._owner)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._policy = images or ImagePolicy()
        self._images = ImageStore(self._api, self._policy, self.call, ledger_of(self._api.about))
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._closed = False
        self._heartbeat = Heartbeat(self._lease.renew)

    @property
    def name(self) -> str:
        return "docker"

    @property
    def limits(self) -> str:
        """What holds a sandbox's limits, and what starts its processes."""
        runtime = self._runtime or self._api.about["DefaultRuntime"]
        return f"the container engine's control groups, runtime {runtime}"

    async def start(self, spec: SandboxSpec) -> DockerSandbox:
        """Start a sandbox. Raises ``ImageMissingError``, ``ImagePullError`` or ``SandboxStartError``."""
        if self._closed:
            raise SandboxStartError("the backend is closed")
        try:
            return await self._started(spec)
        except ImageMissingError:
            if not self._policy.pull or spec.image == "host":
                raise
            await self._images.fetch(spec.image)
            return await self._started(spec)

    async def reap(self) -> int:
        """Remove the containers of dead runs, of this machine or another that shares the engine; return how many."""
        return await self.call(partial(reap_containers, self._api, self.name), SandboxError)

    async def close(self) -> None:
        """Close every sandbox."""
        self._closed = True
        await shielded(self._close())

    async def call(self, work: Callable[[], T], error: type[SandboxError]) -> T:
        """Run ``work`` in one of the backend's threads, the client's errors turned into this package's."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, converted, work, error)

    @property
    def disk(self) -> Path:
        """The engine's own directory, which sandboxes are on."""
        return self._disk

    async def image_id(self, image: str) -> str:
        """The id of ``image`` in the engine. Raises ``ImageMissingError``."""
        return await self.call(partial(self._image_id, _image_name(image)), SandboxError)

    async def fetch(self, image: str) -> None:
        """Pull ``image``. Raises ``ImageMissingError`` or ``ImagePullError``."""
        await self._images.fetch(image)

    def check_room(self) -> None:
        """Raise ``SandboxDiskFullError`` if the engine's disk, where it is this machine's, is full."""
        if self._disk.is_dir():
            check_room(self._disk)

    def forget(self, sandbox: DockerSandbox) -> None:
        self._sandboxes.pop(sandbox.id, None)

    async def _started(self, spec: SandboxSpec) -> DockerSandbox:
        starting = asyncio.ensure_future(self.call(partial(self._start, spec), SandboxStartError))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The engine goes on with what it was asked for, so wait for the container in order to remove it.
            await shielded(self._discard(starting))
            raise

    async def _discard(self, starting: asyncio.Future[DockerSandbox]) -> None:
        await asyncio.wait({starting})
        if starting.exception() is None:
            await starting.result().close()

    async def _close(self) -> None:
        await self._images.close()
        async with asyncio.TaskGroup() as group:
            for sandbox in list(self._sandboxes.values()):
                group.create_task(sandbox.close())
        await asyncio.to_thread(self._end_lease)
        self._threads.shutdown(wait=False)
        self._api.close()

    def _start(self, spec: SandboxSpec) -> DockerSandbox:
        self.check_room()
        for source in spec.ro_binds:
            if not Path(source).exists():
                raise SandboxStartError(f"ro_binds: {source}: no such file or directory on the host")
        image = _image_name(spec.image)
        container = self._create(image, spec)
        sandbox = DockerSandbox(container, spec, self._api, self)
        try:
            self._prepare(container, spec)
            self._api.start(container)
        except BaseException:
            sandbox.remove()
            raise
        self._sandboxes[sandbox.id] = sandbox
        if self._policy.pull:
            self._images.used(image)
        return sandbox

    def _check_runtime(self, runtime: str) -> None:
        """Raise ``SandboxUnavailableError`` where the engine would not start sandboxes with ``runtime``."""
        known = self._api.about.get("Runtimes") or {}
        if runtime not in known:
            raise SandboxUnavailableError(
                f"sandbox.runtime={runtime}: the container engine knows {', '.join(sorted(known))}; right would be one "
                f"of these, or to install {runtime} and add it to the engine's daemon.json (docs/sandboxes.md)"
            )
        if runtime == GVISOR and _SHARED not in (known[runtime].get("runtimeArgs") or ()):
            raise SandboxUnavailableError(
                f"sandbox.runtime={runtime}: sandboxes would not see files that are written into them; right would be "
                f"{_SHARED} among its runtimeArgs in the engine's daemon.json (docs/sandboxes.md)"
            )

    def _create(self, image: str, spec: SandboxSpec) -> str:
        """Make the container; its id. Without the quota from the time on when the engine turns out to have none."""
        try:
            return str(
                self._api.create_container(
                    image,
                    ["sleep", "infinity"],
                    user=_KEEPER,
                    working_dir=spec.workdir,
                    hostname="sandbox",
                    entrypoint=[],
                    # Not only a network mode of "none": docker 20.10 keeps accounts of that network, whose locks end in
                    # a deadlock of the whole engine when sandboxes start and go side by side.
                    network_disabled=True,
                    environment=dict(spec.env),
                    use_config_proxy=False,  # the user's proxies, whose addresses may hold a password
                    labels={**spec.labels, RUN_LABEL: self._owner.run_id, OWNER_LABEL: self._owner.to_json()},
                    host_config=self._host_config(image, spec),
                )["Id"]
            )
        except docker.errors.ImageNotFound:
            raise self._missing(image) from None
        except docker.errors.APIError as error:
            if not self._quota or not is_want_of_quota(str(error.explanation)):
                raise
            self._quota = False
            return self._create(image, spec)

    def _image_id(self, image: str) -> str:
        try:
            return str(self._api.inspect_image(image)["Id"])
        except docker.errors.ImageNotFound:
            raise self._missing(image) from None

    def _missing(self, image: str) -> ImageMissingError:
        build = f"python -m sandbox.base_image --engine {self.name}"
        get = build if image == DEFAULT_IMAGE else f"{self.name} pull {image}"
        return ImageMissingError(f"image {image!r} is not on this machine: get it with: {get}")

    def _prepare(self, container: str, spec: SandboxSpec) -> None:
        """Put in place what the engine would not, before the container starts."""
        if self._runtime == GVISOR:
            # Over an empty /tmp it puts a file system in memory, which the engine does not see.
            self._api.unpack(container, archive({"tmp/.agent-rl": b""}))

    def _ulimits(self, processes: int) -> dict[str, int]:
        """The sandbox's resource limits by name. ``processes`` is how many may be in it."""
        limits = {"core": 0, "fsize": FILE_SIZE_LIMIT}
        # gVisor has no control groups inside, but counts the processes of the sandbox's root itself.
        return {**limits, "nproc": processes} if self._runtime == GVISOR else limits

    def _host_config(self, image: str, spec: SandboxSpec) -> Any:
        processes = tasks = spec.pids + _OWN_PROCESSES
        memory = spec.memory_mb << 20
        if self._runtime == GVISOR:
            memory += _GVISOR_MB << 20
            tasks = tasks * _GVISOR_TASKS + _GVISOR_THREADS
        return self._api.create_host_config(
            network_mode="none",
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=tasks,
            nano_cpus=min(int(spec.cpus * 1e9), (os.cpu_count() or 1) * 10**9),
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            init=True,
            ulimits=[Ulimit(name=name, soft=most, hard=most) for name, most in self._ulimits(processes).items()],
            log_config=LogConfig(type=LogConfig.types.NONE),
            binds=[f"{source}:{target}:ro" for source, target in spec.ro_binds.items()],
            runtime=self._runtime,
            storage_opt=quota(self._api, image, spec.disk_mb) if self._quota else None,
        )

    def _end_lease(self) -> None:
        self._heartbeat.stop()
        self._lease.end()


def _image_name(image: str) -> str:
    return DEFAULT_IMAGE if image == "host" else image


def check_limits(about: Mapping[str, Any]) -> None:
    """Raise ``SandboxUnavailableError`` where the engine, by what it says of itself, would only pretend to limit a
    sandbox.

    Without root it has control groups to itself only in version 2; with version 1 it takes a limit and forgets it.
    """
    rootless = about.get("Rootless") or "name=rootless" in (about.get("SecurityOptions") or ())
    if (rootless and about.get("CgroupVersion") == "1") or not (about["MemoryLimit"] and about["PidsLimit"]):
        raise SandboxUnavailableError(
            "the container engine holds no sandbox to its memory and processes: run its service as root, or on control "
            "groups version 2 that are delegated to its user"
        )


def reap_containers(api: EngineClient, backend: str) -> int:
    """Remove the containers whose lease is dead; return how many."""
    return sum(remove_lease(api, lease) for lease in engine_leases(api, backend) if lease.dead)
