"""Named pipes that boxes share, in a folder of the machine that the boxes are on."""

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
    """A backend of boxes on other machines, which makes pipes there."""

    def pipes(self, names: Sequence[str], spec: SandboxSpec) -> AbstractAsyncContextManager[str]: ...


@asynccontextmanager
async def open_pipes(backend: SandboxBackend, names: Sequence[str], spec: SandboxSpec) -> AsyncIterator[str]:
    """The path of a folder with pipes called ``names``, removed at the end. All boxes of ``backend`` that bind it
    (``ro_binds``) are on its machine, one that boxes of ``spec`` may be on."""
    if isinstance(backend, MakesPipes):
        async with backend.pipes(names, spec) as folder:
            yield folder
    else:
        with local_pipes(names) as folder:
            yield folder


@contextmanager
def local_pipes(names: Sequence[str]) -> Iterator[str]:
    """The same on this machine."""
    with tempfile.TemporaryDirectory(prefix="agent-rl-pipes-") as folder:
        os.chmod(folder, 0o755)
        for name in names:
            os.mkfifo(Path(folder, name))
            os.chmod(Path(folder, name), 0o666)  # whoever the boxes' user is
        yield folder
