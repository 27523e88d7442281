"""The tool that ends the episode."""

from __future__ import annotations

from typing import Literal

from tools.text import Style
from tools.types import ToolResult


class Submit:
    """``finish``: nothing is run; the environment grades what is in the sandbox."""

    def __init__(self, style: Style) -> None:
        self._style = style

    async def finish(self, command: Literal["submit"] = "submit", result: str = "") -> ToolResult:
        """Submit the work and end the task.

        Args:
            command: Always `submit`.
            result: A short account of what was done.
        """
        return ToolResult("" if self._style == "concise" else "Submitted.", submitted=True)
