"""The container engine: its client, the disk usage and quotas of containers, and the translation of its errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
import requests

from sandbox.disk import Usage
from sandbox.errors import (
    SandboxDiskFullError,
    SandboxError,
    SandboxFileError,
    SandboxLostError,
    SandboxUnavailableError,
)

T = TypeVar("T")

THREADS = 64
"""Concurrent calls to the engine; each running command is one."""
_INSTALL_COMMANDS = {
    "docker": "apt-get install docker.io; dockerd",
    "podman": "apt-get install podman catatonit; podman system service --time 0",
}
_TIMED_OUT = "timed out"
_PROBE_SECONDS = 10
_CALL_SECONDS = 120
_QUOTA_FILE_SYSTEMS = ("xfs", "btrfs", "zfs")
_QUOTA_MARGIN_MB = 256


class EngineClient(docker.APIClient):
    """The client of the ``docker`` package with additional archive calls.

    ``engine_info`` is the engine's ``/info`` response at the time of the connection.
    """

    engine_info: Mapping[str, Any]

    def unpack(self, container: str, data: bytes) -> None:
        """Unpack a tar at the container's root; raises instead of replacing a directory by a file."""
        url = self._url("/containers/{0}/archive", container)
        response = self._put(url, params={"path": "/", "noOverwriteDirNonDir": "1"}, data=data)
        self._raise_for_status(response)

    def has_path(self, container: str, path: str) -> bool:
        """Whether ``path`` exists in the container, running or not."""
        url = self._url("/containers/{0}/archive", container)
        response = self.head(url, params={"path": path}, timeout=self.timeout)
        if response.status_code == requests.codes.not_found:
            return False
        self._raise_for_status(response)
        return True

    def layer_bytes(self, container: str) -> int:
        """Return the bytes of files that the container created or changed. Slow: the engine walks all of them."""
        response = self._get(self._url("/containers/{0}/json", container), params={"size": 1})
        return int(self._result(response, True).get("SizeRw") or 0)


def connect(engine: str = "docker") -> EngineClient:
    """Return a client of ``engine``. Raises ``SandboxUnavailableError`` without a response within 10 seconds."""
    url = address(engine)
    try:
        api = EngineClient(
            **{**docker.utils.kwargs_from_env(), "base_url": url},
            version="auto",
            timeout=_PROBE_SECONDS,
            max_pool_size=THREADS,
        )
        # A deadlocked engine still reports its version, but not its info.
        api.engine_info = api.info()
    except (docker.errors.DockerException, requests.RequestException) as error:
        reason = _short_reason(error)
        hangs = reason == _TIMED_OUT
        advice = "it hangs; restart it" if hangs else f"install and start one ({_INSTALL_COMMANDS[engine]})"
        raise SandboxUnavailableError(f"no container engine responds at {url} ({reason}): {advice}") from None
    api.timeout = _CALL_SECONDS
    return api


def address(engine: str) -> str:
    """Return the URL of ``engine``: from its environment variable, or its default socket."""
    if engine == "docker":
        return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    runtime = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    return os.environ.get("CONTAINER_HOST") or f"unix://{runtime}/podman/podman.sock"


@dataclass(frozen=True, slots=True)
class WritableDirectories:
    """The host directories that contain the files of a container.

    ``directories`` are readable by this process. ``layer_missing``: the container's layer is not among them, so its
    size must come from the engine.
    """

    directories: tuple[Path, ...]
    layer_missing: bool


def find_writable_directories(api: EngineClient, container: str) -> WritableDirectories:
    """Return the directories of the container's layer and volumes. Blocking."""
    info = api.inspect_container(container)
    layer = (info["GraphDriver"].get("Data") or {}).get("UpperDir")
    volumes = [mount["Source"] for mount in info.get("Mounts") or () if mount["Type"] == "volume"]
    directories = tuple(Path(each) for each in (layer, *volumes) if each and os.access(each, os.R_OK | os.X_OK))
    return WritableDirectories(directories, layer_missing=layer is None or Path(layer) not in directories)


def layer_files(api: EngineClient, container: str) -> list[str]:
    """Return the paths of the files and links in the container's layer; none if this process cannot read it. Blocking.

    They include files that the container opened for writing without a change.
    """
    layer = (api.inspect_container(container)["GraphDriver"].get("Data") or {}).get("UpperDir") or ""
    return [
        f"/{os.path.relpath(os.path.join(directory, name), layer)}"
        for directory, directories, files in os.walk(layer)
        for name in [*files, *(name for name in directories if os.path.islink(os.path.join(directory, name)))]
    ]


def layer_size(api: EngineClient, container: str) -> Usage:
    """Return the size of the container's layer as the engine reports it, without inodes. Blocking."""
    return Usage(api.layer_bytes(container))


def supports_quota(engine_info: Mapping[str, Any]) -> bool:
    """Whether the engine stores containers on a file system with quotas."""
    status = dict(engine_info.get("DriverStatus") or ())
    return not {engine_info.get("Driver"), status.get("Backing Filesystem")}.isdisjoint(_QUOTA_FILE_SYSTEMS)


def is_quota_refusal(message: str) -> bool:
    """Whether the engine refused a container because its file system is not mounted with quotas."""
    return any(words in message.lower() for words in ("storage-opt", "storage opt", "project quota"))


def quota_options(api: EngineClient, image: str, disk_mb: int) -> dict[str, str]:
    """Return the storage options of a quota of ``disk_mb`` MiB plus a margin. Blocking.

    The disk watch ends a sandbox at ``disk_mb`` and names it; the quota limits growth between two measurements. Btrfs
    also counts the data that the container shares with its image.
    """
    shared = int(api.inspect_image(image)["Size"]) >> 20 if api.engine_info["Driver"] == "btrfs" else 0
    return {"size": f"{disk_mb + shared + _QUOTA_MARGIN_MB}m"}


def _short_reason(error: BaseException) -> str:
    text = str(error)
    for reason in ("No such file or directory", "Connection refused", "Permission denied", _TIMED_OUT):
        if reason in text:
            return reason.lower()
    return text.splitlines()[0][:200] if text else type(error).__name__


def remove_container(api: EngineClient, container: str) -> bool:
    """Remove a container by force; return False if another process has removed it or is removing it."""
    try:
        api.remove_container(container, force=True, v=True)
    except docker.errors.NotFound:
        return False
    except docker.errors.APIError as error:
        if error.status_code == 409:
            return False
        raise
    return True


def is_missing_container(error: docker.errors.APIError) -> bool:
    """Whether the engine has no such container. The start of the message decides: the rest may quote a file's name."""
    text = str(error.explanation or error).lstrip()
    return error.status_code == requests.codes.not_found and text.startswith(("No such container", "no container with"))


def translate_errors(work: Callable[[], T], error: type[SandboxError]) -> T:
    """Return ``work()``; raise the client's errors as ``error``, ``SandboxDiskFullError`` or ``SandboxLostError``.

    If ``error`` is ``SandboxFileError``, a missing engine or container raises ``SandboxLostError`` instead.
    """
    gone = SandboxLostError if error is SandboxFileError else error
    try:
        return work()
    except docker.errors.APIError as problem:
        text = str(problem.explanation or problem).strip()
        if "no space left on device" in text:
            raise SandboxDiskFullError(f"the container engine: {text}") from None
        raise (gone if is_missing_container(problem) else error)(f"the container engine: {text}") from None
    except (docker.errors.DockerException, requests.RequestException) as problem:
        raise gone(f"the container engine: {_short_reason(problem)}") from None
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            raise SandboxDiskFullError(f"the disk is full: {problem}") from None
        raise gone(f"the container engine's connection: {problem}") from None
