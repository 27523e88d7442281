"""Which part of a turn is its answer, and whether it equals the truth, asked of processes that can be ended.

math-verify bounds its work by signals, which reach Python code on a main thread alone. Here it works in processes of
its own (:mod:`envs.math.grading_process`) that are started when the first answer is graded and end with this one.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.types import EnvsError, GradingError
from sandbox import printable
from tools.turns import split_thoughts

TAIL = 4096
"""Characters at the end of a turn in which its answer is looked for."""

_PROGRAM = Path(__file__).with_name("grading_process.py")
_WORKERS = min(4, os.cpu_count() or 1)
_LATE = "late"
_READ_AT_ONCE = 256
_SHOWN = 200
_SANDBOXED = r"\boxed"
_MARKED = re.compile(r"(?:####|answer\s*:)(.*)", re.IGNORECASE)


class MathUnavailableError(EnvsError):
    """math-verify is not installed: one line that says how to get it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is right, and in a sentence why."""

    right: bool
    reason: str


def answer_of(text: str) -> str | None:
    r"""The answer that a turn gives: what its last ``\boxed{}`` holds; without one, the rest of the last line that has
    ``####`` or ``Answer:``. None where it gives none. Thoughts (``<think>``) are no answer."""
    end = split_thoughts(text)[1][-TAIL:]
    if _SANDBOXED in end:
        return _braced(end.rpartition(_SANDBOXED)[2])
    if marked := _MARKED.findall(end):
        return str(marked[-1]).strip(" \t*").rstrip(".") or None
    return None


def _braced(text: str) -> str | None:
    """What the braces at the start of ``text`` hold."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[1:place] if place else None
    return None


class Grader:
    """Asks up to ``workers`` processes, one question each at a time. Raises MathUnavailableError."""

    def __init__(self, workers: int = _WORKERS) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise MathUnavailableError("environment math needs math-verify: pip install 'agent-rl[math]'")
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="math-grader")
        self._idle: deque[_Worker] = deque()

    async def verdict(self, truth: str, turn: str | None) -> Verdict:
        """Whether ``turn``, all that the agent said, gives ``truth``. Raises GradingError where no process answers."""
        answer = answer_of(turn or "")
        if not answer:
            return Verdict(False, r"no answer was given: right would be \boxed{...}")
        asked = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, "compare", truth, answer)
        found = await asked
        shown, wanted = _in_a_line(answer), _in_a_line(truth)
        if found is None:
            return Verdict(False, f"the answer {shown} could not be compared within the limits, expected {wanted}")
        right, read = found
        if not read:
            return Verdict(False, f"the answer {shown} could not be read, expected {wanted}")
        return Verdict(right, f"the answer {shown} is {'right' if right else 'wrong'}, expected {wanted}")

    def unreadable(self, truths: Sequence[str]) -> list[str]:
        """Those of ``truths`` that no answer could ever equal, since they can't be read. Raises GradingError."""
        parts = [truths[at : at + _READ_AT_ONCE] for at in range(0, len(truths), _READ_AT_ONCE)]
        return [truth for found in self._threads.map(self._unreadable, parts) for truth in found]

    def _unreadable(self, truths: Sequence[str]) -> list[str]:
        readable = self._ask("can_read", *truths)
        if readable is not None:
            return [truth for truth, fine in zip(truths, readable, strict=True) if not fine]
        if len(truths) == 1:
            return list(truths)
        half = len(truths) // 2  # one of them passes the limits, and takes the others with it
        return [*self._unreadable(truths[:half]), *self._unreadable(truths[half:])]

    def _ask(self, *task: str) -> Any:
        try:
            worker = self._idle.pop()
        except IndexError:  # asked like this, since another thread may take the last one after any look
            worker = _Worker()
        answer = worker.ask(task)
        self._idle.append(worker)
        if answer == _LATE:
            raise GradingError("this machine is too busy to compare answers: one had not the time to pass its limits")
        return answer


class _Worker:
    """One process. It ends when it is dropped, and when this process does."""

    def __init__(self) -> None:
        # Without this process' environment, which may hold secrets: what it reads was written by a model.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process)

    def ask(self, task: Sequence[str]) -> Any:
        """What the program answers. Raises GradingError where it is gone."""
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
            raise GradingError(f"the process that reads answers ended with exit code {process.wait()}")
        return json.loads(line)


def _in_a_line(text: str) -> str:
    return printable(" ".join(text.split())[:_SHOWN])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
