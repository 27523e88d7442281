"""The worked examples of docs/ and the first environment of a new project as one, so that one run trains on all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from agent_rl.api import EnvContext, Episode, Task, load_environment

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/examples"))
EXAMPLES = ("sql_tools:SqlTools", "retrieval_tools:RetrievalTools", "letters:Letters")


class AllExamples:
    """The tasks of the examples by turns, ``count`` of each; an episode is the example's own."""

    name = "all_examples:AllExamples"

    def __init__(self, context: EnvContext, count: int) -> None:
        self._examples = {name: load_environment(name, context, {"count": count}) for name in EXAMPLES}

    async def prepare(self, *splits: str) -> None:
        for example in self._examples.values():
            await example.prepare(*splits)

    def tasks(self, split: str) -> Sequence[Task]:
        turns = zip(*(example.tasks(split) for example in self._examples.values()), strict=True)
        return [Task(task.id, self.name, {**task.record, "example": task.env}) for turn in turns for task in turn]

    def start(self, task: Task) -> AbstractAsyncContextManager[Episode]:
        return self._examples[task.record["example"]].start(task)

    def gold(self, task: Task) -> str:
        return ""
