"""The sandbox, result style and limits that the tools of an episode share."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox import ExecResult, Sandbox
from tools.text import MAX_CHARS, Style
from tools.types import ToolError

# Linux limits one argument of a command to 128 KiB. A longer one makes exec fail, which would look like a broken
# sandbox.
_MAX_ARGUMENT_BYTES = 120_000


@dataclass(frozen=True, slots=True)
class ToolRuntime:
    """A sandbox with the tools' limits: ``timeout`` in seconds for each command, ``max_chars`` for each result."""

    sandbox: Sandbox
    style: Style = "full"
    timeout: float = 90.0
    max_chars: int = MAX_CHARS

    @property
    def concise(self) -> bool:
        return self.style == "concise"

    def path(self, path: str) -> str:
        """``path`` as a normalized absolute path, relative to the sandbox's working directory."""
        if not path:
            raise ToolError("path is empty; give a file or a directory")
        if len(path.encode()) > 4000:
            raise ToolError("path is longer than 4000 bytes")
        return posixpath.normpath(posixpath.join(self.sandbox.spec.workdir, path))

    async def run(self, *command: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None) -> ExecResult:
        """Run ``command``, one string for each argument, in the working directory. ``env`` adds environment variables.

        Raises ``ToolError`` for an argument over 120,000 bytes.
        """
        longest = max(len(argument.encode()) for argument in command)
        if longest > _MAX_ARGUMENT_BYTES:
            raise ToolError(f"an argument of {longest} bytes is too long; {_MAX_ARGUMENT_BYTES} is the most")
        workdir = self.sandbox.spec.workdir
        return await self.sandbox.exec(list(command), timeout=self.timeout, cwd=workdir, env=env, stdin=stdin)
