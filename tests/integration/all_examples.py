"""The worked examples of docs/, the printed dialogue and the first environment of a new project as one, so that one run
trains on all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from agent_rl.api import Dialogue, EnvContext, Episode, Task, load_environment

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/examples"))
EXAMPLES = ("sql_tools:SqlTools", "retrieval_tools:RetrievalTools", "letters:Letters", "sentences:Sentences")


class AllExamples:
    """The tasks of the examples by turns, ``count`` of each; an episode is the example's own."""

    name = "all_examples:AllExamples"

    def __init__(self, context: EnvContext, count: int) -> None:
        examples = (load_environment(name, context, {"count": count}) for name in EXAMPLES)
        self._examples = {example.name.partition(":")[0]: example for example in examples}

    async def prepare(self, *splits: str) -> None:
        for example in self._examples.values():
            await example.prepare(*splits)

    def tasks(self, split: str) -> Sequence[Task]:
        turns = zip(*(example.tasks(split) for example in self._examples.values()), strict=True)
        return [
            Task(f"{name}-{task.id}", self.name, {**task.record, "example": name})
            for turn in turns
            for name, task in zip(self._examples, turn, strict=True)
        ]

    def start(self, task: Task) -> AbstractAsyncContextManager[Episode | Dialogue]:
        return self._examples[task.record["example"]].start(task)

    def gold(self, task: Task) -> str:
        return ""
