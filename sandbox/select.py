"""Opens the sandbox backend that a run asked for, or the best one this machine has."""

from __future__ import annotations

from sandbox.errors import SandboxUnavailableError
from sandbox.types import SandboxBackend

BACKENDS = ("auto", "docker", "bubblewrap")


def open_backend(name: str = "auto", *, run_id: str, max_starts: int = 8) -> SandboxBackend:
    """The backend ``name``; ``auto`` takes docker where an engine answers, otherwise bubblewrap.

    ``run_id`` marks the boxes of this run and ``max_starts`` bounds how many are being started at once. Raises
    ``SandboxUnavailableError``, in one line that says what to install or start.
    """
    if name == "docker":
        return _docker(run_id, max_starts)
    if name == "bubblewrap":
        return _bubblewrap(run_id, max_starts)
    if name != "auto":
        raise SandboxUnavailableError(f"no sandbox backend {name!r}: choose one of {', '.join(BACKENDS)}")
    reasons = []
    for opener in (_docker, _bubblewrap):
        try:
            return opener(run_id, max_starts)
        except SandboxUnavailableError as error:
            reasons.append(str(error))
    raise SandboxUnavailableError(f"no sandbox on this machine: {'; and '.join(reasons)}")


def _docker(run_id: str, max_starts: int) -> SandboxBackend:
    from sandbox.docker import DockerBackend

    return DockerBackend(run_id=run_id, max_starts=max_starts)


def _bubblewrap(run_id: str, max_starts: int) -> SandboxBackend:
    from sandbox.bubblewrap import BubblewrapBackend

    return BubblewrapBackend(run_id=run_id, max_starts=max_starts)
