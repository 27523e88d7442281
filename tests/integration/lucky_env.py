"""An environment whose every second episode is rewarded, whatever the agent does: any model has something to learn."""

from __future__ import annotations

import itertools
from typing import Any, Literal

from agent_rl.api import Task, ToolResult

TURN = itertools.count()


class Lucky:
    """Submit, or do not."""

    @classmethod
    def tasks(cls, split: str, options: object) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(8)]

    async def setup(self, task: Task) -> str:
        return f"Task {task.record['number']}."

    async def finish(self, command: Literal["submit"] = "submit") -> ToolResult:
        """Say that you are done.

        Args:
            command: Always submit.
        """
        return ToolResult("submitted", submitted=True)

    async def grade(self) -> float:
        return float(next(TURN) % 2)
