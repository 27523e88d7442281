"""No sandboxes: what an environment that starts none is given for a backend."""

from __future__ import annotations

from sandbox.errors import SandboxUnavailableError
from sandbox.types import Sandbox, SandboxSpec


class NullBackend:
    """Implements :class:`sandbox.types.SandboxBackend` where a run needs none: nothing is looked for or opened."""

    name = "none"

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Raises ``SandboxUnavailableError``: the environment promised to start no sandbox."""
        raise SandboxUnavailableError(
            "the environment says sandboxes = False and starts a sandbox: one of the two is wrong"
        )

    async def reap(self) -> int:
        """No run leaves anything behind here."""
        return 0

    async def close(self) -> None:
        """There is nothing to close."""
