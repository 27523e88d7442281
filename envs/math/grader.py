"""Extracts the answer of a turn and compares it with the reference in worker processes.

math-verify limits its run time with signals, which work only on a main thread. It therefore runs in worker processes
(:mod:`envs.math.grading_process`), which start with the first graded answer and end with this process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envs.types import EnvsError, GradingError
from sandbox import printable
from tools import THINK, split_reasoning

TAIL = 4096
"""The answer is searched in the last 4096 characters of a turn."""

_PROGRAM = Path(__file__).with_name("grading_process.py")
_WORKERS = min(4, os.cpu_count() or 1)
_LATE = "late"
_CHUNK_SIZE = 256
_MAX_SHOWN_CHARS = 200
_BOXED = r"\boxed"
_MARKED = re.compile(r"(?:####|answer\s*:)(.*)", re.IGNORECASE)


class MathUnavailableError(EnvsError):
    """math-verify is not installed: one line with the command that installs it."""


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """Whether an answer is correct, and the reason in one sentence."""

    correct: bool
    reason: str


def extract_answer(text: str) -> str | None:
    r"""The answer of a turn: the content of its last ``\boxed{}``; without one, the rest of the last line with ``####``
    or ``Answer:``; else None. A ``<think>`` block is ignored."""
    reasoning = replace(THINK, prompt_opens=THINK.close in text)  # the environment does not see the prompt's end
    end = split_reasoning(text, reasoning)[1][-TAIL:]
    if _BOXED in end:
        return _braces_content(end.rpartition(_BOXED)[2])
    if matches := _MARKED.findall(end):
        return str(matches[-1]).strip(" \t*").rstrip(".") or None
    return None


def _braces_content(text: str) -> str | None:
    """The content of the braces at the start of ``text``; None if they are not balanced."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:index] if index else None
    return None


class Grader:
    """Grades answers in up to ``workers`` processes. Raises MathUnavailableError."""

    def __init__(self, workers: int = _WORKERS) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MathUnavailableError("environment math needs math-verify: pip install 'agent-rl[math]'")
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="math-grader")
        self._idle: deque[_Worker] = deque()

    async def check(self, truth: str, turn: str | None) -> AnswerCheck:
        """Compare the answer of ``turn`` with ``truth``. Raises GradingError if a worker process fails."""
        answer = extract_answer(turn or "")
        if not answer:
            return AnswerCheck(False, r"no answer was given; expected \boxed{...}")
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._threads, self._run_task, "compare", truth, answer)
        shown, expected = _one_line(answer), _one_line(truth)
        if result is None:
            return AnswerCheck(False, f"the answer {shown} was not compared within the limits, expected {expected}")
        correct, parsed = result
        if not parsed:
            return AnswerCheck(False, f"the answer {shown} could not be parsed, expected {expected}")
        return AnswerCheck(correct, f"the answer {shown} is {'correct' if correct else 'wrong'}, expected {expected}")

    def unparsable(self, truths: Sequence[str]) -> list[str]:
        """The ``truths`` that math-verify cannot parse, so that no answer can equal them. Raises GradingError."""
        chunks = [truths[start : start + _CHUNK_SIZE] for start in range(0, len(truths), _CHUNK_SIZE)]
        return [truth for unparsable in self._threads.map(self._unparsable, chunks) for truth in unparsable]

    def _unparsable(self, truths: Sequence[str]) -> list[str]:
        parsable = self._run_task("can_parse", *truths)
        if parsable is not None:
            return [truth for truth, fine in zip(truths, parsable, strict=True) if not fine]
        if len(truths) == 1:
            return list(truths)
        half = len(truths) // 2  # one truth exceeded the limits and stopped the whole chunk
        return [*self._unparsable(truths[:half]), *self._unparsable(truths[half:])]

    def _run_task(self, *task: str) -> Any:
        try:
            worker = self._idle.pop()
        except IndexError:  # not a check beforehand: another thread may take the last worker
            worker = _Worker()
        result = worker.request(task)
        self._idle.append(worker)
        if result == _LATE:
            raise GradingError("this machine is too busy to compare answers: one got too little CPU time")
        return result


class _Worker:
    """A worker process. It ends when this object is collected or this process ends."""

    def __init__(self) -> None:
        # An empty environment: the process parses model text, and this process's environment may hold secrets.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        weakref.finalize(self, _kill, self._process)

    def request(self, task: Sequence[str]) -> Any:
        """The result of ``task``. Raises GradingError if the process has ended."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        if not line:
            raise GradingError(f"the grading process ended with exit code {process.wait()}")
        return json.loads(line)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split())[:_MAX_SHOWN_CHARS])


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
