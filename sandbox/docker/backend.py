"""The docker and podman backends: one container per sandbox, through the ``docker`` package.

The first processes of a container belong to the user nobody; commands run as root without capabilities. So a command
cannot kill the processes that keep the sandbox alive, and ``kill -9 -1`` inside the sandbox ends only commands.
Commands of one sandbox run one after another.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import docker.errors
from docker.types import LogConfig, Ulimit

from sandbox.base import ROOT
from sandbox.disk import check_free_space
from sandbox.docker.client import (
    THREADS,
    EngineClient,
    connect,
    is_quota_refusal,
    quota_options,
    supports_quota,
    translate_errors,
)
from sandbox.docker.images import ImageStore, base_images, build_image, image_index_path, image_name
from sandbox.docker.lease import OWNER_LABEL, RUN_LABEL, EngineLease, engine_leases, remove_lease
from sandbox.docker.sandbox import DockerSandbox
from sandbox.errors import (
    ImageBuildError,
    ImageMissingError,
    SandboxError,
    SandboxStartError,
    SandboxUnavailableError,
)
from sandbox.files import archive
from sandbox.lease import Heartbeat, Owner
from sandbox.shielded import shielded
from sandbox.temp_dir import TempDirectory
from sandbox.timeouts import uncharged
from sandbox.types import ImagePolicy, ImageSettings, SandboxSpec

T = TypeVar("T")

_log = logging.getLogger(__name__)

DEFAULT_IMAGE = "agent-rl-base"
"""The image of ``SandboxSpec.image == "host"``, built by ``python -m sandbox.base_image``."""
FILE_SIZE_LIMIT = 1 << 30
"""Maximum bytes of one file written in a sandbox."""
GVISOR = "runsc"
_SHARED = "--file-access=shared"
# Overhead of gVisor's kernel on top of the spec's limits: MiB, threads, and tasks per process in the sandbox (measured:
# 73 Python processes take 300 MiB, mostly gVisor's own, and a fork bomb of 76 processes up to 1,400 tasks).
_GVISOR_MB, _GVISOR_THREADS, _GVISOR_TASKS = 128, 256, 24
_REMOVE_SECONDS, _REMOVE_ATTEMPTS = 10.0, 10
_ETC = {
    "/etc/hostname": "sandbox\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/run/.containerenv": "",
}
_NOBODY = "65534:65534"
_OVERHEAD_PROCESSES = 12  # init, sleep, wrapper, head, timeout, and the threads of the engine's runtime
_PODMAN_ULIMIT = 16384


class DockerBackend:
    """Sandboxes in docker. ``runtime`` is the OCI runtime, for example ``runsc`` (gVisor); None: the engine's default.

    Raises ``SandboxUnavailableError`` if the engine does not respond or does not enforce limits.
    """

    def __init__(self, *, run_id: str, images: ImagePolicy | None = None, runtime: str | None = None) -> None:
        self._api = connect(self.name)
        info = self._api.engine_info
        check_limits(info)
        self._runtime = runtime
        if runtime is not None:
            self._check_runtime(runtime)
        self._disk = Path(info["DockerRootDir"])
        self._etc = _write_etc() if self._disk.is_dir() else None
        self._quota = supports_quota(info)
        self._owner = Owner.current(run_id)
        self._lease = EngineLease(self._api, self._owner)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._policy = images or ImagePolicy()
        self._images = ImageStore(self._api, self._policy, self.call, image_index_path(info))
        self._builds: dict[str, asyncio.Lock] = {}
        self._built: set[str] = set()
        self._sandboxes: dict[str, DockerSandbox] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._closed = False
        self._heartbeat = Heartbeat(self._lease.renew)

    @property
    def name(self) -> str:
        return "docker"

    @property
    def limits(self) -> str:
        """How limits are enforced, and the runtime of the processes; for people."""
        runtime = self._runtime or self._api.engine_info["DefaultRuntime"]
        return f"the container engine's control groups, runtime {runtime}"

    async def start(self, spec: SandboxSpec) -> DockerSandbox:
        """Start a sandbox. Raises ``ImageMissingError``, ``ImagePullError`` or ``SandboxStartError``."""
        if self._closed:
            raise SandboxStartError("the backend is closed")
        try:
            return await self._start_shielded(spec)
        except ImageMissingError:
            if not self._policy.pull or spec.image == "host":
                raise
            await self._images.fetch(spec.image)
            return await self._start_shielded(spec)

    async def reap(self) -> int:
        """Remove the containers of dead runs of every machine that uses the engine; return how many."""
        return await self.call(partial(reap_containers, self._api, self.name), SandboxError)

    async def close(self) -> None:
        """Close every sandbox."""
        self._closed = True
        await shielded(self._close())

    async def call(self, work: Callable[[], T], error: type[SandboxError]) -> T:
        """Run ``work`` in a thread of the backend, with :func:`translate_errors`."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, translate_errors, work, error)

    @property
    def disk(self) -> Path:
        """The engine's data directory, which contains the sandboxes."""
        return self._disk

    async def image_id(self, image: str) -> str:
        """Return the id of ``image`` in the engine. Raises ``ImageMissingError``."""
        return await self.call(partial(self._image_id, _image_name(image)), SandboxError)

    async def fetch(self, image: str) -> None:
        """Pull ``image``. Raises ``ImageMissingError`` or ``ImagePullError``."""
        await self._images.fetch(image)

    async def build(self, directory: Path, *, timeout: float) -> str:
        """Build the image of ``directory`` once; see :class:`sandbox.types.ImageBuilder`."""
        name = await asyncio.to_thread(image_name, directory)
        async with self._builds.setdefault(name, asyncio.Lock()):
            if name not in self._built:
                for base in base_images((directory / "Dockerfile").read_text(encoding="utf-8", errors="replace")):
                    await self.image_settings(base)
                with uncharged():
                    await self.call(partial(build_image, self._api, directory, name, timeout), ImageBuildError)
                self._built.add(name)
        return name

    async def image_settings(self, image: str) -> ImageSettings:
        """Return the settings of ``image``; see :class:`sandbox.types.ImageBuilder`."""
        try:
            await self.image_id(image)
        except ImageMissingError:
            if not self._policy.pull:
                raise
            await self._images.fetch(image)
        info = await self.call(partial(self._api.inspect_image, _image_name(image)), SandboxError)
        return ImageSettings(info["Config"].get("WorkingDir") or "/", info["Config"].get("User") or ROOT)

    def local_disk(self) -> Path | None:
        """Return the engine's data directory if it is on this machine."""
        return self._disk if self._disk.is_dir() else None

    def forget(self, sandbox: DockerSandbox) -> None:
        """Remove a closed sandbox from the open ones."""
        self._sandboxes.pop(sandbox.id, None)

    async def discard(self, sandbox: DockerSandbox) -> None:
        """Remove the container of a closed sandbox, after 10 seconds in the background of the run."""
        removal = asyncio.create_task(self._remove(sandbox), context=Context())
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        await asyncio.wait({removal}, timeout=_REMOVE_SECONDS)

    async def _remove(self, sandbox: DockerSandbox) -> None:
        """Remove a container. The engine continues after a call timed out, and the reaper removes what is left."""
        for _ in range(_REMOVE_ATTEMPTS):
            try:
                return await self.call(sandbox.remove, SandboxError)
            except SandboxError as error:
                _log.warning("sandbox %s could not be removed yet: %s", sandbox.id, error)
                await asyncio.sleep(1.0)

    async def _start_shielded(self, spec: SandboxSpec) -> DockerSandbox:
        starting = asyncio.ensure_future(self.call(partial(self._start, spec), SandboxStartError))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The engine does not cancel the start: wait for the container and remove it.
            await shielded(self._close_started(starting))
            raise

    async def _close_started(self, starting: asyncio.Future[DockerSandbox]) -> None:
        await asyncio.wait({starting})
        if starting.exception() is None:
            await starting.result().close()

    async def _close(self) -> None:
        await self._images.close()
        async with asyncio.TaskGroup() as group:
            for sandbox in list(self._sandboxes.values()):
                group.create_task(sandbox.close())
        if self._removals:
            await asyncio.wait(set(self._removals))
        await asyncio.to_thread(self._end_lease)
        self._threads.shutdown(wait=False)
        self._api.close()

    def _start(self, spec: SandboxSpec) -> DockerSandbox:
        if disk := self.local_disk():
            check_free_space(disk)
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
            self._images.mark_used(image)
        return sandbox

    def _check_runtime(self, runtime: str) -> None:
        """Raise ``SandboxUnavailableError`` if the engine cannot start sandboxes with ``runtime``."""
        runtimes = self._api.engine_info.get("Runtimes") or {}
        if runtime not in runtimes:
            raise SandboxUnavailableError(
                f"sandbox.runtime={runtime}: the container engine has {', '.join(sorted(runtimes))}; use one of these, "
                f"or install {runtime} and add it to the engine's daemon.json (docs/reference/sandboxes.md)"
            )
        if runtime == GVISOR and _SHARED not in (runtimes[runtime].get("runtimeArgs") or ()):
            raise SandboxUnavailableError(
                f"sandbox.runtime={runtime}: sandboxes would not see files written into them; add {_SHARED} to "
                "its runtimeArgs in the engine's daemon.json (docs/reference/sandboxes.md)"
            )

    def _create(self, image: str, spec: SandboxSpec) -> str:
        """Create the container and return its id. After the engine refuses a quota, go on without quotas."""
        try:
            return str(
                self._api.create_container(
                    image,
                    ["sleep", "infinity"],
                    user=_NOBODY,
                    working_dir=spec.workdir,
                    hostname="sandbox",
                    entrypoint=[],
                    # In addition to the network mode "none": docker 20.10 still locks that network, and the engine
                    # deadlocks when sandboxes start and end concurrently.
                    network_disabled=True,
                    environment=dict(spec.env),
                    use_config_proxy=False,  # proxy addresses of the user may contain a password
                    labels={**spec.labels, RUN_LABEL: self._owner.run_id, OWNER_LABEL: self._owner.to_json()},
                    host_config=self._host_config(image, spec),
                )["Id"]
            )
        except docker.errors.ImageNotFound:
            raise self._missing(image) from None
        except docker.errors.APIError as error:
            if not self._quota or not is_quota_refusal(str(error.explanation)):
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
        return ImageMissingError(f"image {image!r} is not on this machine; get it with: {get}")

    def _prepare(self, container: str, spec: SandboxSpec) -> None:
        """Prepare the file system before the container starts."""
        if self._runtime == GVISOR:
            # gVisor mounts a memory file system over an empty /tmp, which the engine cannot see.
            self._api.unpack(container, archive({"tmp/.agent-rl": b""}))

    def _ulimits(self, processes: int) -> dict[str, int]:
        """Return the resource limits by name; ``processes`` is the maximum number of processes in the sandbox."""
        limits = {"core": 0, "fsize": FILE_SIZE_LIMIT}
        # gVisor has no control groups inside; it counts the processes of the sandbox's root.
        return {**limits, "nproc": processes} if self._runtime == GVISOR else limits

    def _host_config(self, image: str, spec: SandboxSpec) -> Any:
        processes = tasks = spec.pids + _OVERHEAD_PROCESSES
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
            ulimits=[Ulimit(name=name, soft=limit, hard=limit) for name, limit in self._ulimits(processes).items()],
            log_config=LogConfig(type=LogConfig.types.NONE),
            binds=[f"{source}:{target}:ro" for source, target in {**self._etc_binds(), **spec.ro_binds}.items()],
            runtime=self._runtime,
            storage_opt=quota_options(self._api, image, spec.disk_mb) if self._quota else None,
        )

    def _etc_binds(self) -> dict[str, str]:
        """Return read-only files in the places of those that the engine would mount writable from its own disk, where
        neither the disk watch nor a quota counts them."""
        files = [file for file in _ETC if self.name == "podman" or file.startswith("/etc/")]
        return {} if self._etc is None else {str(self._etc.path / Path(file).name): file for file in files}

    def _end_lease(self) -> None:
        etc, self._etc = self._etc, None
        if etc is not None:
            etc.remove()
        self._heartbeat.stop()
        self._lease.end()


class PodmanBackend(DockerBackend):
    """Sandboxes in podman, through its docker-compatible socket; checked with podman 4.3.1 and runc.

    Raises ``SandboxUnavailableError`` unless its service runs (``podman system service``, ``.ci/start-podman``).
    """

    @property
    def name(self) -> str:
        return "podman"

    def _check_runtime(self, runtime: str) -> None:
        # Podman ignores the runtime of a container and uses the one of its service.
        default = PurePosixPath(self._api.engine_info["DefaultRuntime"]).name
        if runtime != default:
            raise SandboxUnavailableError(
                f"sandbox.runtime={runtime}: podman's service starts every sandbox with {default}; use {default}, or "
                f"start the service with podman --runtime {runtime} (docs/reference/sandboxes.md)"
            )

    def _prepare(self, container: str, spec: SandboxSpec) -> None:
        super()._prepare(container, spec)
        # Podman creates the top directory with mode 555, which root without capabilities cannot write to. It gives a
        # working directory that the image lacks to the container's user, who is not root.
        missing = [] if self._api.has_path(container, spec.workdir) else [spec.workdir]
        self._api.unpack(container, archive({}, directories=[".", *missing]))

    def _ulimits(self, processes: int) -> dict[str, int]:
        # By default, podman as root sets higher values than a machine without CAP_SYS_RESOURCE allows. The control
        # group limits a sandbox's processes; this nproc is shared by the nobody processes of all sandboxes.
        return {"nofile": _PODMAN_ULIMIT, "nproc": _PODMAN_ULIMIT, **super()._ulimits(processes)}


def _write_etc() -> TempDirectory:
    directory = TempDirectory("agent-rl-etc-")
    for file, text in _ETC.items():
        (directory.path / Path(file).name).write_text(text)
    return directory


def _image_name(image: str) -> str:
    return DEFAULT_IMAGE if image == "host" else image


def check_limits(engine_info: Mapping[str, Any]) -> None:
    """Raise ``SandboxUnavailableError`` if the engine does not enforce memory and process limits.

    A rootless engine enforces them only with control groups version 2; with version 1 it silently ignores them.
    """
    rootless = engine_info.get("Rootless") or "name=rootless" in (engine_info.get("SecurityOptions") or ())
    ignores_limits = rootless and engine_info.get("CgroupVersion") == "1"
    if ignores_limits or not (engine_info["MemoryLimit"] and engine_info["PidsLimit"]):
        raise SandboxUnavailableError(
            "the container engine does not enforce memory and process limits: run its service as root, or delegate "
            "control groups version 2 to its user"
        )


def reap_containers(api: EngineClient, backend: str) -> int:
    """Remove the containers of dead leases; return how many."""
    return sum(remove_lease(api, lease) for lease in engine_leases(api, backend) if lease.dead)
