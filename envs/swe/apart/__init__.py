"""Hidden tests in one sandbox, the code that they test in another: what a record with ``isolated`` asks for.

Two named pipes of a directory that both sandboxes see, read-only, are all that they share. In the tests' sandbox
proxies stand for what the tests import of the repository (:mod:`.tests_side`), in the other sandbox a program does
what these ask for (:mod:`.code_side`). So the code under test can't see, change, signal or end what runs the tests
and says how they ended. It says what its own objects are and do: ``==`` between two of them, ``isinstance``, ``in``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sandbox import SandboxBackend, SandboxSpec, open_pipes

PIPES = "/opt/agent-rl/pipes"
UNANSWERED = 75
"""Exit code of a test run whose other sandbox did not answer before anything of the repository's ran."""
_PREFIX = "agent_rl_"


@dataclass(frozen=True, slots=True)
class Link:
    """One run's two ends. ``directory`` is the sandboxes' host's, with the pipes in it; ``hidden`` are the hidden
    tests' paths."""

    directory: str
    hidden: Sequence[str]
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    @asynccontextmanager
    async def open(cls, backend: SandboxBackend, spec: SandboxSpec, hidden: Sequence[str]) -> AsyncIterator[Link]:
        """The pipes for two sandboxes of ``spec``, in a directory that is removed at the end."""
        async with open_pipes(backend, ("asked", "answered"), spec) as directory:
            yield cls(directory, hidden)

    @property
    def binds(self) -> Mapping[str, str]:
        return {self.directory: PIPES}

    @property
    def _inside(self) -> str:
        return f"/tmp/{self.token}"

    def _files(self, *modules: str) -> dict[str, bytes]:
        return {f"{self._inside}/{_PREFIX}{name}.py": _source(name) for name in modules}

    def code_files(self) -> Mapping[str, bytes]:
        """What has to lie in the sandbox of the code under test: absolute path -> content."""
        return self._files("wire", "code_side")

    def tests_files(self) -> Mapping[str, bytes]:
        """What has to lie in the tests' sandbox."""
        order = json.dumps({"pipes": PIPES, "hidden": list(self.hidden)}).encode()
        return {**self._files("wire", "tests_side"), f"{self._inside}/order.json": order}

    def serve(self, workdir: str) -> str:
        """Bash that serves the code in ``workdir`` until it is ended."""
        return f"python3 -B {self._inside}/{_PREFIX}code_side.py {PIPES} {workdir}"

    @property
    def exports(self) -> str:
        """Bash that makes pytest load the plugin, whatever script starts it."""
        return (
            f'export PYTHONPATH="{self._inside}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTEST_ADDOPTS="-p {_PREFIX}tests_side --continue-on-collection-errors $PYTEST_ADDOPTS"\n'
        )


@cache
def _source(name: str) -> bytes:
    return (Path(__file__).parent / f"{name}.py").read_bytes()
