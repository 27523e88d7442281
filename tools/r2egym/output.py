"""What a tool of R2E-Gym printed, and how its agent is shown that.

``src/r2egym/agenthub/runtime/docker.py`` (``run``) and ``src/r2egym/agenthub/observation/observation.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TIMED_OUT = 124  # the exit code of ``timeout``, under which R2E-Gym runs the tools
_CONTROL = re.compile(r"\x1b\[[0-9;]*m|\r")
_KEPT_LINES = 40
_RULE = "-" * 50


@dataclass(frozen=True, slots=True)
class Output:
    """What a tool printed, and its exit code."""

    text: str
    code: int = 0
    timed_out: bool = False

    def observation(self, tool: str, timeout: float) -> str:
        """What the agent reads after a call of ``tool``, which might take ``timeout`` seconds."""
        text, code = self._collected(timeout)
        if tool != "execute_bash":
            return f"Execution output of [{tool}]:\n{text}"
        return f"Exit code: {code}\nExecution output of [{tool}]:\n{_shortened(text)}"

    def _collected(self, timeout: float) -> tuple[str, str]:
        if self.timed_out or self.code == _TIMED_OUT:
            return f"The command took too long to execute (>{timeout:g}s)", "-1"
        if self.code:
            return self.text, f"Error: Exit code {self.code}"
        return _CONTROL.sub("", self.text), "0"


def crash(error: Exception) -> str:
    """What a script prints that ends with ``error``, without the lines of its source."""
    return f"Traceback (most recent call last):\n{type(error).__name__}: {error}\n"


def _shortened(text: str) -> str:
    """The first and the last forty lines of more than eighty."""
    lines = text.splitlines()
    if len(lines) <= 2 * _KEPT_LINES:
        return text
    note = "<Observation truncated in middle for saving context>"
    return "\n".join([*lines[:_KEPT_LINES], _RULE, note, _RULE, *lines[-_KEPT_LINES:]])
