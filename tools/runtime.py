"""What the sandboxed tools share: their sandbox, their style of answer, their time limit."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox import ExecResult, Sandbox
from tools.errors import ToolError
from tools.text import MAX_CHARS, Style

# Linux takes at most 128 KiB in one argument of a command; past that exec fails, which would look like a broken
# sandbox.
_ARGUMENT_BYTES = 120_000


@dataclass(frozen=True, slots=True)
class ToolRuntime:
    """A sandbox as the tools use it. ``timeout`` is in seconds, for each command; ``max_chars`` caps each answer."""

    sandbox: Sandbox
    style: Style = "full"
    timeout: float = 90.0
    max_chars: int = MAX_CHARS

    @property
    def concise(self) -> bool:
        return self.style == "concise"

    def path(self, path: str) -> str:
        """``path`` made absolute (against the sandbox's working directory) and normal."""
        if not path:
            raise ToolError("path is empty; give a file or a directory")
        if len(path.encode()) > 4000:
            raise ToolError("path is longer than 4000 bytes")
        return posixpath.normpath(posixpath.join(self.sandbox.spec.workdir, path))

    async def run(self, *command: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None) -> ExecResult:
        """Run ``command``, an argument a string, in the working directory, with ``env`` beside the sandbox's
        variables."""
        longest = max(len(argument.encode()) for argument in command)
        if longest > _ARGUMENT_BYTES:
            raise ToolError(f"an argument of {longest} bytes is too long; {_ARGUMENT_BYTES} is the most")
        workdir = self.sandbox.spec.workdir
        return await self.sandbox.exec(list(command), timeout=self.timeout, cwd=workdir, env=env, stdin=stdin)
