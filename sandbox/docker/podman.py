"""Podman beside docker, through the socket on which it speaks docker's language, and where the two differ.

Checked with podman 4.3.1 and runc. Its service must be running (``podman system service``, ``.ci/start-podman``).
"""

from __future__ import annotations

from pathlib import PurePosixPath

from sandbox.docker.backend import DockerBackend
from sandbox.errors import SandboxUnavailableError
from sandbox.files import archive
from sandbox.types import SandboxSpec

_AMPLE = 16384


class PodmanBackend(DockerBackend):
    """Sandboxes in podman. Raises ``SandboxUnavailableError`` where its service does not answer."""

    @property
    def name(self) -> str:
        return "podman"

    def _check_runtime(self, runtime: str) -> None:
        # Podman takes no runtime with a container: it would start the sandbox with its service's own, and not tell.
        own = PurePosixPath(self._api.about["DefaultRuntime"]).name
        if runtime != own:
            raise SandboxUnavailableError(
                f"sandbox.runtime={runtime}: podman's service starts every sandbox with {own}; right would be "
                f"{own}, or a "
                f"service started with podman --runtime {runtime} (docs/sandboxes.md)"
            )

    def _prepare(self, container: str, spec: SandboxSpec) -> None:
        super()._prepare(container, spec)
        # Podman makes the container's top directory read-only (mode 555, and a sandbox's root has no capability to
        # write there all the same), and gives a working directory that the image lacks to the container's user, who
        # is not root.
        lacks = [] if self._api.has_path(container, spec.workdir) else [spec.workdir]
        self._api.unpack(container, archive({}, directories=[".", *lacks]))

    def _ulimits(self, processes: int) -> dict[str, int]:
        # Unless told, podman as root asks for more of these two than a machine without CAP_SYS_RESOURCE gives. A
        # sandbox's processes are bounded by its control group; this is one limit for the keepers of all sandboxes
        # together.
        return {"nofile": _AMPLE, "nproc": _AMPLE, **super()._ulimits(processes)}
