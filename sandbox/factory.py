"""Opens the configured sandbox backend, or the best one of this machine."""

from __future__ import annotations

import inspect

from sandbox.errors import SandboxUnavailableError
from sandbox.registry import Registry
from sandbox.types import ImagePolicy, Sandbox, SandboxBackend, SandboxSpec

BACKENDS = Registry(
    "sandbox backend",
    "agent_rl.sandboxes",
    {
        "auto": "sandbox.factory:best_backend",
        "bubblewrap": "sandbox.bubblewrap.backend:BubblewrapBackend",
        "docker": "sandbox.docker.backend:DockerBackend",
        "modal": "sandbox.remote.modal:open_modal",
        "podman": "sandbox.docker.backend:PodmanBackend",
    },
    SandboxUnavailableError,
)
"""Factories of :class:`sandbox.types.SandboxBackend`, called as ``make(run_id=..., images=...)``. A factory that has a
parameter ``runtime`` also receives ``sandbox.runtime`` if it is set."""


class NullBackend:
    """The :class:`sandbox.types.SandboxBackend` of an environment that starts no sandbox."""

    name = "none"

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Raise ``SandboxUnavailableError``."""
        raise SandboxUnavailableError("the environment starts a sandbox although it sets needs_sandbox = False")

    async def reap(self) -> int:
        """Return 0: there are no sandboxes."""
        return 0

    async def close(self) -> None:
        """Do nothing."""


def open_backend(
    name: str = "auto", *, run_id: str, images: ImagePolicy | None = None, runtime: str | None = None
) -> SandboxBackend:
    """Open the backend registered as ``name``, or the class at the path ``package.module:Class``.

    ``run_id`` labels the sandboxes of this run. ``images`` is the policy for pulling and accepting images. ``runtime``
    is the OCI runtime of a container engine, for example ``runsc`` for gVisor. The backend does not limit concurrent
    starts; use a :class:`sandbox.pool.SandboxPool` for that. Raises ``SandboxUnavailableError`` with one line that
    names the program to install or start, or the registered backends.
    """
    make = BACKENDS.load(name)
    options = {} if runtime is None else {"runtime": runtime}
    if not options.keys() <= inspect.signature(make).parameters.keys():
        raise SandboxUnavailableError(
            f"sandbox.runtime={runtime}: the backend {name!r} has no runtimes; set sandbox.backend=docker or remove "
            "sandbox.runtime"
        )
    backend: SandboxBackend = make(run_id=run_id, images=images, **options)
    return backend


def best_backend(*, run_id: str, images: ImagePolicy | None = None, runtime: str | None = None) -> SandboxBackend:
    """Open docker if its engine responds, otherwise bubblewrap. Raises ``SandboxUnavailableError`` if neither works.

    With a ``runtime`` only docker is tried, because bubblewrap would give a different isolation.
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
