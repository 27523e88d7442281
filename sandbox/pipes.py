"""Named pipes that sandboxes share, in a directory of the machine that the sandboxes are on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from sandbox.types import SandboxBackend, SandboxSpec


@runtime_checkable
class MakesPipes(Protocol):
    """A backend of sandboxes on other machines, which makes pipes there."""

    def pipes(self, names: Sequence[str], spec: SandboxSpec) -> AbstractAsyncContextManager[str]: ...


@asynccontextmanager
async def open_pipes(backend: SandboxBackend, names: Sequence[str], spec: SandboxSpec) -> AsyncIterator[str]:
    """The path of a directory with pipes called ``names``, removed at the end. All sandboxes of ``backend`` that
    bind it (``ro_binds``) are on its machine, one that sandboxes of ``spec`` may be on."""
    if isinstance(backend, MakesPipes):
        async with backend.pipes(names, spec) as directory:
            yield directory
    else:
        with local_pipes(names) as directory:
            yield directory


@contextmanager
def local_pipes(names: Sequence[str]) -> Iterator[str]:
    """The same on this machine."""
    with tempfile.TemporaryDirectory(prefix="agent-rl-pipes-") as directory:
        os.chmod(directory, 0o755)
        for name in names:
            os.mkfifo(Path(directory, name))
            os.chmod(Path(directory, name), 0o666)  # whoever the sandboxes' user is
        yield directory
