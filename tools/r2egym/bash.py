"""R2E-Gym's ``execute_bash``: ``src/r2egym/agenthub/tools/execute_bash.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.r2egym.arguments import parse
from tools.r2egym.output import Output, crash
from tools.runtime import ToolRuntime

_BLOCKED = ("cd", "ipython", "jupyter", "pip", "nohup")


class Bash:
    """One round trip a call; every call is a new ``/bin/sh`` in the working directory."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime

    async def run(self, arguments: Mapping[str, Any]) -> Output:
        command: str = parse("execute_bash", arguments).cmd
        if not command.strip():
            return Output(crash(IndexError("list index out of range")), 1)
        first = command.split()[0]
        if first in _BLOCKED:
            return Output(f"Bash command '{first}' is not allowed. Please use a different command or tool.\n", 1)
        result = await self._runtime.run("/bin/sh", "-c", command)
        failed = "" if result.exit_code == 0 else "Error executing command:\n\n"
        stdout, stderr = _text(result.stdout), _text(result.stderr)
        text = f"{failed}[STDOUT]\n\n{stdout} \n\n[STDERR]\n\n{stderr}\n"
        return Output(text, _exit_code(result.exit_code), timed_out=result.timed_out)


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n").strip()


def _exit_code(code: int) -> int:
    """Where a signal ended the shell, a Python that exits with ``-signal``, as R2E-Gym's script does, exits with this
    (the sandbox says 128 + signal)."""
    return 384 - code if 128 < code <= 192 else code
