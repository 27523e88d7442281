"""The container engine: connecting to it, and its errors turned into this package's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import docker
import docker.errors
import requests

from sandbox.errors import (
    SandboxDiskFullError,
    SandboxError,
    SandboxFileError,
    SandboxLostError,
    SandboxUnavailableError,
)

T = TypeVar("T")

THREADS = 64
"""Calls to the engine at once; a running command is one."""
_START = {
    "docker": "apt-get install docker.io; dockerd",
    "podman": "apt-get install podman catatonit; podman system service --time 0",
}
_TIMED_OUT = "timed out"
_PROBE_SECONDS = 10
_CALL_SECONDS = 120


class EngineClient(docker.APIClient):
    """The ``docker`` package's client, with what its calls for archives leave out.

    ``about`` is what the engine reported about itself when it was connected to.
    """

    about: Mapping[str, Any]

    def unpack(self, container: str, data: bytes) -> None:
        """Unpack a tar at the container's root. A file in the place of a directory is refused, not put over it."""
        url = self._url("/containers/{0}/archive", container)
        response = self._put(url, params={"path": "/", "noOverwriteDirNonDir": "1"}, data=data)
        self._raise_for_status(response)

    def has_path(self, container: str, path: str) -> bool:
        """Whether ``path`` exists in the container, which need not run."""
        url = self._url("/containers/{0}/archive", container)
        response = self.head(url, params={"path": path}, timeout=self.timeout)
        if response.status_code == requests.codes.not_found:
            return False
        self._raise_for_status(response)
        return True

    def layer_bytes(self, container: str) -> int:
        """Bytes of the files that the container has made or changed. The engine walks them all to know."""
        response = self._get(self._url("/containers/{0}/json", container), params={"size": 1})
        return int(self._result(response, True).get("SizeRw") or 0)


def connect(engine: str = "docker") -> EngineClient:
    """A client of ``engine``. Raises ``SandboxUnavailableError`` where none answers within seconds."""
    where = address(engine)
    try:
        api = EngineClient(
            **{**docker.utils.kwargs_from_env(), "base_url": where},
            version="auto",
            timeout=_PROBE_SECONDS,
            max_pool_size=THREADS,
        )
        # Asked for now, as an engine that has run into a deadlock still tells its version, but nothing more.
        api.about = api.info()
    except (docker.errors.DockerException, requests.RequestException) as error:
        reason = _short(error)
        advice = "it hangs; restart it" if reason == _TIMED_OUT else f"install and start one ({_START[engine]})"
        raise SandboxUnavailableError(f"no container engine answers at {where} ({reason}): {advice}") from None
    api.timeout = _CALL_SECONDS
    return api


def address(engine: str) -> str:
    """Where ``engine`` listens: as its own clients are told by the environment, or else at its usual socket."""
    if engine == "docker":
        return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    runtime = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    return os.environ.get("CONTAINER_HOST") or f"unix://{runtime}/podman/podman.sock"


def _short(error: BaseException) -> str:
    text = str(error)
    for reason in ("No such file or directory", "Connection refused", "Permission denied", _TIMED_OUT):
        if reason in text:
            return reason.lower()
    return text.splitlines()[0][:200] if text else type(error).__name__


def remove_container(api: EngineClient, container: str) -> bool:
    """Remove a container by force; False where another is at it, or was."""
    try:
        api.remove_container(container, force=True, v=True)
    except docker.errors.NotFound:
        return False
    except docker.errors.APIError as error:
        if error.status_code == 409:
            return False
        raise
    return True


def converted(work: Callable[[], T], error: type[SandboxError]) -> T:
    """The result of ``work``. What the engine refuses is an ``error``; an engine or container that is gone is not."""
    gone = SandboxLostError if error is SandboxFileError else error
    try:
        return work()
    except docker.errors.APIError as problem:
        text = str(problem.explanation or problem).strip()
        if "no space left on device" in text:
            raise SandboxDiskFullError(f"the container engine: {text}") from None
        raise (gone if "o such container" in text else error)(f"the container engine: {text}") from None
    except (docker.errors.DockerException, requests.RequestException) as problem:
        raise gone(f"the container engine: {_short(problem)}") from None
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            raise SandboxDiskFullError(f"no room left: {problem}") from None
        raise gone(f"the container engine's connection: {problem}") from None
