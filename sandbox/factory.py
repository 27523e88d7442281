"""Opens the sandbox backend that a run asked for, or the best one this machine has."""

from __future__ import annotations

import inspect

from sandbox.errors import SandboxUnavailableError
from sandbox.registry import Registry
from sandbox.types import ImagePolicy, SandboxBackend

BACKENDS = Registry(
    "sandbox backend",
    "agent_rl.sandboxes",
    {
        "auto": "sandbox.factory:best_backend",
        "bubblewrap": "sandbox.bubblewrap.backend:BubblewrapBackend",
        "docker": "sandbox.docker.backend:DockerBackend",
        "podman": "sandbox.docker.podman:PodmanBackend",
    },
    SandboxUnavailableError,
)
"""What makes a :class:`sandbox.types.SandboxBackend`, called as ``make(run_id=..., images=...)``, and with ``runtime``
where one is chosen and it takes that."""


def open_backend(
    name: str = "auto", *, run_id: str, images: ImagePolicy | None = None, runtime: str | None = None
) -> SandboxBackend:
    """The backend registered as ``name``, or the one that the path ``package.module:Class`` names.

    ``run_id`` marks the sandboxes of this run; ``images`` says what becomes of container images; ``runtime`` is what a
    container engine starts sandboxes with, ``runsc`` for gVisor. It starts as many sandboxes at once as it is asked
    to: many episodes at once go through a :class:`sandbox.pool.SandboxPool`. Raises ``SandboxUnavailableError``, in
    one line that says what to install or start, or which names there are.
    """
    make = BACKENDS.load(name)
    options = {} if runtime is None else {"runtime": runtime}
    if not options.keys() <= inspect.signature(make).parameters.keys():
        raise SandboxUnavailableError(
            f"sandbox.runtime={runtime}: only container engines have runtimes, and {name!r} is none; right would be "
            "sandbox.backend=docker, or no sandbox.runtime"
        )
    backend: SandboxBackend = make(run_id=run_id, images=images, **options)
    return backend


def best_backend(*, run_id: str, images: ImagePolicy | None = None, runtime: str | None = None) -> SandboxBackend:
    """Docker where an engine answers, otherwise bubblewrap. Raises ``SandboxUnavailableError`` where neither is.

    With a ``runtime`` only docker will do: bubblewrap would be another isolation than the one that was asked for.
    """
    if runtime is not None:
        return open_backend("docker", run_id=run_id, images=images, runtime=runtime)
    reasons = []
    for name in ("docker", "bubblewrap"):
        try:
            return open_backend(name, run_id=run_id, images=images)
        except SandboxUnavailableError as error:
            reasons.append(str(error))
    raise SandboxUnavailableError(f"no sandbox on this machine: {'; and '.join(reasons)}")
