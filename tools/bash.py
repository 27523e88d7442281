"""The tool that runs a shell command."""

from __future__ import annotations

from sandbox import ExecResult
from tools.runtime import ToolRuntime
from tools.types import ToolResult


class Bash:
    """``execute_bash``: one round trip a call."""

    def __init__(self, runtime: ToolRuntime) -> None:
        self._runtime = runtime

    async def execute_bash(self, cmd: str) -> ToolResult:
        """Run a bash command and show what it prints.

        Every call is a new shell in the working directory: `cd` and variables last for one call only, files stay.

        Args:
            cmd: The command, e.g. `python -m pytest -x tests`.
        """
        result = await self._runtime.run("bash", "-c", cmd)
        notes = self._notes(result)
        output = result.text.rstrip("\n")
        if not output and not notes and not self._runtime.concise:
            output = "(no output)"
        return ToolResult("\n".join(filter(None, [output, *notes])), failed=not result.ok)

    def _notes(self, result: ExecResult) -> list[str]:
        """What the output alone does not tell."""
        notes = []
        if result.truncated:
            notes.append("[output cut: it is over the limit]")
        if result.oom_killed:
            notes.append(f"[killed: more than {self._runtime.sandbox.spec.memory_mb} MB of memory]")
        if result.timed_out:
            notes.append(f"[killed: no end after {self._runtime.timeout:g} seconds]")
        elif result.exit_code != 0:
            notes.append(f"[exit code {result.exit_code}]")
        return notes
