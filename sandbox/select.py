"""Opens the sandbox backend that a run asked for, or the best one this machine has."""

from __future__ import annotations

from sandbox.errors import SandboxUnavailableError
from sandbox.types import ImagePolicy, SandboxBackend


def open_backend(name: str = "auto", *, run_id: str, images: ImagePolicy | None = None) -> SandboxBackend:
    """The backend ``name``; ``auto`` takes docker where an engine answers, otherwise bubblewrap.

    ``run_id`` marks the boxes of this run; ``images`` says what becomes of container images. It starts as many boxes at
    once as it is asked to: many episodes at once go through a :class:`sandbox.pool.SandboxPool`. Raises
    ``SandboxUnavailableError``, in one line that says what to install or start.
    """
    if name != "auto":
        if name not in _OPENERS:
            raise SandboxUnavailableError(f"no sandbox backend {name!r}: choose one of {', '.join(BACKENDS)}")
        return _OPENERS[name](run_id, images)
    reasons = []
    for opener in (_docker, _bubblewrap):
        try:
            return opener(run_id, images)
        except SandboxUnavailableError as error:
            reasons.append(str(error))
    raise SandboxUnavailableError(f"no sandbox on this machine: {'; and '.join(reasons)}")


def _docker(run_id: str, images: ImagePolicy | None) -> SandboxBackend:
    from sandbox.docker.backend import DockerBackend

    return DockerBackend(run_id=run_id, images=images)


def _podman(run_id: str, images: ImagePolicy | None) -> SandboxBackend:
    from sandbox.docker.podman import PodmanBackend

    return PodmanBackend(run_id=run_id, images=images)


def _bubblewrap(run_id: str, _images: ImagePolicy | None) -> SandboxBackend:
    from sandbox.bubblewrap.backend import BubblewrapBackend

    return BubblewrapBackend(run_id=run_id)


_OPENERS = {"docker": _docker, "podman": _podman, "bubblewrap": _bubblewrap}
BACKENDS = ("auto", *_OPENERS)
