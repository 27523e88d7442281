"""Hidden tests as calls: their values come out of the sandbox and are compared here; what is expected never goes in.

The code under test may see every call beforehand, write answers of its own, print, exit, and kill what runs it. A call
passes only if the one answer to it is the right value, so a forger has to find the right values, as an honest fix does.
"""

from __future__ import annotations

import ast
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from envs.swe.pytest_log import as_summary

SECONDS = 20.0
"""Seconds that a run of calls may take; those of its processor time are fewer."""
_PROCESSOR_SECONDS = 5
_MAX_VALUE = 1 << 14
_SHOWN = 120


class Call(BaseModel):
    """One hidden test: ``call`` is an expression in the names of ``module``, ``result`` its value as a literal."""

    model_config = ConfigDict(frozen=True)

    module: str = Field(pattern=r"^\w+(\.\w+)*$")
    call: str = Field(pattern=r"^[^\r\n]+$")
    result: str

    @field_validator("result")
    @classmethod
    def _is_a_literal(cls, value: str) -> str:
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(f"{value!r}; right would be a literal of Python") from None
        return value


@dataclass(frozen=True, slots=True)
class CallRun:
    """One run of ``calls``, by test. ``nonce`` marks its answers: nothing that is printed by accident is one."""

    calls: Mapping[str, Call]
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def _directory(self) -> str:
        return f"/tmp/{self.nonce}"

    def files(self) -> Mapping[str, bytes]:
        """What has to lie in the sandbox before the run: absolute path -> content."""
        lines = [self.nonce, *(f"{call.module} {call.call}" for call in self.calls.values())]
        return {f"{self._directory}/run.py": _runner(), f"{self._directory}/order": "\n".join(lines).encode()}

    @property
    def command(self) -> str:
        """Bash that makes the calls in the working directory."""
        return f"ulimit -t {_PROCESSOR_SECONDS}; python3 -B -S -E {self._directory}/run.py"

    def summary(self, log: str) -> str:
        """pytest's short summary of the tests, made from the answers in ``log``; empty where it holds none."""
        answers: dict[str, list[str]] = defaultdict(list)
        for line in log.split("\n"):
            if line.startswith(f"{self.nonce} ") and line.isprintable():
                _, index, *text = line.split(" ", 2)
                answers[index] += text
        if not answers:
            return ""
        tests = enumerate(self.calls.items())
        return as_summary([_line(test, call, answers.get(str(index), [])) for index, (test, call) in tests])


@cache
def _runner() -> bytes:
    return (Path(__file__).parent / "call_runner.py").read_bytes()


def _line(test: str, call: Call, answers: Sequence[str]) -> str:
    if len(answers) == 1 and _is_right(answers[0], ast.literal_eval(call.result)):
        return f"PASSED {test}"
    given = "no answer" if not answers else answers[0][:_SHOWN] if len(answers) == 1 else f"{len(answers)} answers"
    return f"FAILED {test} - {call.call}: {given}, expected {call.result}"


def _is_right(text: str, expected: object) -> bool:
    """Whether ``text``, which the code under test may have written, is a literal of the expected type and value."""
    if len(text) > _MAX_VALUE:
        return False
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return type(value) is type(expected) and bool(value == expected)
