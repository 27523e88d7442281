"""The view of one user on a sandbox, and the backends that build images, whose users are not only root."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandbox.base import ForwardingSandbox
from sandbox.errors import SandboxUnavailableError
from sandbox.files import read_by_command, write_by_command
from sandbox.pool import SandboxPool
from sandbox.types import ImageBuilder, Sandbox, SandboxBackend


class UserSandbox(ForwardingSandbox):
    """A sandbox in which ``user`` runs commands, and reads and writes only the files that this user may."""

    def __init__(self, sandbox: Sandbox, user: str) -> None:
        super().__init__(sandbox.id, sandbox.spec)
        self._sandbox, self._user = sandbox, user

    async def _forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        who = {"user": self._user} if method == "exec" else {}
        return await getattr(self._sandbox, method)(*args, **kwargs | who)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Return the content of a file that the user may read."""
        return await read_by_command(self, path, max_bytes)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write files as the user."""
        await write_by_command(self, files)

    async def close(self) -> None:
        """Remove the sandbox."""
        await self._sandbox.close()


def image_builder(backend: SandboxBackend) -> ImageBuilder:
    """Return the backend, or the one below its pool, if it builds images. Raises ``SandboxUnavailableError``."""
    backend = backend.backend if isinstance(backend, SandboxPool) else backend
    if isinstance(backend, ImageBuilder):
        return backend
    raise SandboxUnavailableError(
        f"the sandboxes of {backend.name} have no images with users and cannot build them: set sandbox.backend to "
        "docker or podman, and sandbox.placement to local"
    )
