"""Hidden tests as calls: the sandbox returns their values, and the comparison with the expected ones happens here.

The expected values never enter the sandbox. The code under test may see every call, print, exit, kill the runner and
write results of its own. A call passes only if it has exactly one result with the right value, so a forger must compute
the right values, as an honest fix does.
"""

from __future__ import annotations

import ast
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator

from envs.swe.pytest_log import format_summary

TIMEOUT_S = 20.0
"""Wall-clock limit of a run of calls in seconds."""
_RUNNER = Path(__file__).with_name("call_runner.py").read_bytes()
_CPU_SECONDS = 5
_MAX_VALUE_CHARS = 1 << 14
_MAX_SHOWN_CHARS = 120


class Call(BaseModel):
    """One hidden test: ``call`` is an expression evaluated in ``module``, ``result`` the expected literal."""

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
            raise ValueError(f"{value!r}; right would be a Python literal") from None
        return value


@dataclass(frozen=True, slots=True)
class CallRun:
    """One run of ``calls`` (test -> call). ``nonce`` marks result lines, so that other output cannot look like one."""

    calls: Mapping[str, Call]
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def _directory(self) -> str:
        return f"/tmp/{self.nonce}"

    def files(self) -> Mapping[str, bytes]:
        """The files to write into the sandbox before the run: absolute path -> content."""
        lines = [self.nonce, *(f"{call.module} {call.call}" for call in self.calls.values())]
        return {f"{self._directory}/run.py": _RUNNER, f"{self._directory}/order": "\n".join(lines).encode()}

    @property
    def command(self) -> str:
        """Bash that makes the calls in the working directory."""
        return f"ulimit -t {_CPU_SECONDS}; python3 -B -S -E {self._directory}/run.py"

    def summary(self, log: str) -> str:
        """The results in ``log`` as pytest's short summary of the tests, or an empty string if there are none."""
        results: dict[str, list[str]] = defaultdict(list)
        for line in log.split("\n"):
            if line.startswith(f"{self.nonce} ") and line.isprintable():
                _, index, *text = line.split(" ", 2)
                results[index] += text
        if not results:
            return ""
        tests = enumerate(self.calls.items())
        return format_summary([_summary_line(test, call, results.get(str(index), [])) for index, (test, call) in tests])


def _summary_line(test: str, call: Call, results: Sequence[str]) -> str:
    if len(results) == 1 and _is_right(results[0], ast.literal_eval(call.result)):
        return f"PASSED {test}"
    if len(results) == 1:
        actual = results[0][:_MAX_SHOWN_CHARS]
    else:
        actual = f"{len(results)} results" if results else "no result"
    return f"FAILED {test} - {call.call}: {actual}, expected {call.result}"


def _is_right(text: str, expected: object) -> bool:
    """Whether ``text`` is a literal of the expected type and value. The code under test may have written any text."""
    if len(text) > _MAX_VALUE_CHARS:
        return False
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return type(value) is type(expected) and bool(value == expected)
