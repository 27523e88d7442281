"""The environment ``math``: one question, one turn, one answer that is correct or not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.context import EnvContext
from envs.math.families import LEVELS, SPLITS, generate
from envs.math.grader import Grader
from envs.math.records import Problem, ProblemSet, read_problems
from envs.rows import is_data_set_directory, select_split
from envs.types import Grade, Message, Task, TaskRecordError
from tools import ToolResult

INSTRUCTION = r"Reason step by step. Write the final answer as \boxed{...} at the end."

_log = logging.getLogger(__name__)


@dataclass
class MathEpisode:
    """One question. Implements :class:`envs.types.Dialogue`."""

    problem: Problem
    grader: Grader
    turn: str | None = None

    @property
    def messages(self) -> Sequence[Message]:
        """The row's messages, or the question with the answer instruction."""
        question = {"role": "user", "content": f"{self.problem.question}\n\n{INSTRUCTION}"}
        return self.problem.messages or (question,)

    async def respond(self, text: str) -> ToolResult:
        """Take the turn and end the episode."""
        self.turn = text
        return ToolResult("", submitted=True)

    async def grade(self) -> Grade:
        """Reward 1 for the correct answer, else 0. The log has the reason."""
        check = await self.grader.check(self.problem.answer, self.turn)
        status = "PASSED" if check.correct else "FAILED"
        return Grade(float(check.correct), check.correct, tests={"answer": status}, log=check.reason)


class MathEnvironment:
    """Problems with one correct answer and one turn, without tools or sandboxes.

    Without ``path`` the problems are generated from ``seed``: ``train_tasks`` and ``heldout_tasks`` problems of the
    ``levels`` 1 (easy) to 5. ``path`` is a file of rows (JSONL, JSON, Parquet), a directory with a file for each split,
    or a data set's directory or name on the Hugging Face hub. ``data_split``, ``heldout``, ``limit`` and
    ``skip_broken`` are as in the environment swe. ``where`` selects the rows whose fields have these values. Rows with
    the same question and answer are one problem.

    Raises MathUnavailableError if math-verify is not installed.
    """

    needs_sandbox = False

    def __init__(
        self,
        context: EnvContext,
        path: str | Path | None = None,
        *,
        data_split: str | None = None,
        heldout: int | None = None,
        limit: int | None = None,
        skip_broken: bool = False,
        where: Mapping[str, Any] | None = None,
        train_tasks: int = 640,
        heldout_tasks: int = 256,
        seed: int = 0,
        levels: Sequence[int] = tuple(LEVELS),
    ) -> None:
        if not isinstance(levels, Sequence) or not levels or not all(level in LEVELS for level in levels):
            raise TaskRecordError(f"environment math: levels is {levels!r}; expected a list of values from {[*LEVELS]}")
        self._path = None if path is None else Path(path)
        self._data_split, self._heldout, self._limit, self._skip_broken = data_split, heldout, limit, skip_broken
        self._counts = {"train": train_tasks, "heldout": heldout_tasks}
        self._seed, self._levels, self._where = seed, tuple(levels), where or {}
        self._grader = Grader()
        self._read: dict[str, ProblemSet] = {}
        self._tasks: dict[str, list[Task]] = {}

    @property
    def name(self) -> str:
        return "math"

    async def prepare(self, *splits: str) -> None:
        """Generate or read the problems of ``splits``, by default both. Raises as :meth:`tasks`."""
        for split in splits or SPLITS:
            await asyncio.to_thread(self.tasks, split)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of ``split``. Raises ``TaskRecordError`` for a broken row, and an unknown split or level."""
        if split not in self._tasks:
            problems = self._generated(split) if self._path is None else self._from_rows(self._path, split)
            self._tasks[split] = [Task(problem.id, self.name, problem.model_dump()) for problem in problems]
        return self._tasks[split]

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[MathEpisode]:
        """Yield the episode. It has no resources to open."""
        yield MathEpisode(Problem.model_validate(task.record), self._grader)

    def gold(self, task: Task) -> str:
        """Empty: :meth:`solution` has the answer."""
        return ""

    def solution(self, task: Task) -> Sequence[str]:
        """The answer, boxed."""
        return [rf"\boxed{{{task.record['answer']}}}"]

    def _generated(self, split: str) -> Sequence[Problem]:
        if split not in SPLITS:
            raise TaskRecordError(f"environment math has no split {split!r}; it has {', '.join(SPLITS)}")
        try:
            return generate(split, self._counts[split], self._seed, self._levels)
        except ValueError as error:
            raise TaskRecordError(f"environment math: {error}") from None

    def _from_rows(self, path: Path, split: str) -> Sequence[Problem]:
        problems = select_split(path, split, self._heldout, self._problems, is_data_set=is_data_set_directory(path))
        return problems[: self._limit]

    def _problems(self, source: str) -> Sequence[Problem]:
        if source not in self._read:
            problems = read_problems(
                source, self._grader, split=self._data_split, skip_broken=self._skip_broken, where=self._where
            )
            if problems.broken or problems.repeated:
                counts = len(problems.problems), problems.repeated, len(problems.broken)
                _log.warning("%s: %d problems; skipped %d duplicate rows and %d broken rows", source, *counts)
            self._read[source] = problems
        return self._read[source].problems
