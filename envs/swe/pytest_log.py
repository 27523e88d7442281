"""Reads the verdict on a test run from its log.

The verdict comes from pytest's "short test summary info" section (``-rA``). The tests share a process with the code
under test, which can forge a log. Three measures protect against that: a log with several summaries counts each test's
worst status; changes of a patch to the test infrastructure are left out before the tests run
(:mod:`envs.swe.diff.git_diff`); and a success must pass a negative control (:mod:`envs.swe.mutants`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

KeyMode = Literal["node", "name"]
"""The key of a test: pytest's full node id, or for R2E-Gym's rows its :func:`r2e_test_name`."""

_WORST_FIRST = ("FAILED", "ERROR", "XPASS", "XFAIL", "SKIPPED", "PASSED")
_READ_BY_R2E = ("FAILED", "ERROR", "PASSED")
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_HEADER = re.compile(r"^=+ short test summary info =+\s*$", re.MULTILINE)
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|SUBFAILED(?:\(.*?\)|\[.*?\])?) (\S.*)$")
_FOLDED_SKIP = re.compile(r"^\[\d+\] ")


@dataclass(frozen=True, slots=True)
class TestVerdict:
    """The result of the hidden tests: whether the task is resolved, each test's status, and the first difference."""

    __test__ = False  # pytest collects classes named Test*

    resolved: bool
    tests: Mapping[str, str]
    difference: str = ""


def parse_summary(log: str, expected: Collection[str] = ()) -> dict[str, str] | None:
    """Status by full node id from all summary sections of a pytest log, or None if the log has no section.

    A node id may contain spaces, brackets and " - "; the ``expected`` ids decide where it ends. A test that appears
    twice gets its worst status (a test that passes and fails in teardown has two). Folded skips have no node id and
    are left out.
    """
    sections = _HEADER.split(strip_ansi(log))[1:]
    if not sections:
        return None
    statuses: dict[str, str] = {}
    lengths = frozenset(map(len, expected))
    for section in sections:
        for line in section.split("\n"):
            _add_line(line.rstrip("\r"), statuses, expected, lengths)
    return statuses


def strip_ansi(text: str) -> str:
    """The text without color codes."""
    return _ANSI.sub("", text)


def _add_line(line: str, statuses: dict[str, str], expected: Collection[str], lengths: Collection[int]) -> None:
    match = _LINE.match(line)
    if match is None:
        return
    word, rest = match.groups()
    status = "FAILED" if word.startswith("SUBFAILED") else word
    if status == "SKIPPED" and _FOLDED_SKIP.match(rest):
        return
    # pytest prints no message for a passed test. Old versions end an XPASS without a reason with a space.
    node = (rest if status == "PASSED" else _node_id(rest, expected, lengths)).rstrip(" ")
    statuses[node] = worst_status(status, statuses.get(node, status))


def _node_id(rest: str, expected: Collection[str], lengths: Collection[int]) -> str:
    """The node id at the start of ``rest``, which may continue with " - message".

    ``lengths`` are the lengths of the ``expected`` ids; they avoid hashing long prefixes.
    """
    ends = [match.start() for match in re.finditer(" - ", rest)] + [len(rest)]
    for end in reversed(ends):
        if end in lengths and rest[:end] in expected:
            return rest[:end]
    bracket = rest.find("[")
    balanced = (end for end in ends if not 0 <= bracket < end or rest[end - 1] == "]")
    return rest[: next(balanced, ends[0])]


def worst_status(first: str, second: str) -> str:
    """The worse of two statuses."""
    return min(first, second, key=_WORST_FIRST.index)


def r2e_test_name(node: str) -> str:
    """R2E-Gym's key of a node id: ``TestX.test_y`` for ``tests/test_a.py::TestX::test_y``, empty for a file."""
    return truncate_name(".".join(node.split("::")[1:]))


def truncate_name(key: str) -> str:
    """A key as R2E-Gym compares it: the part before the first " - ", even if that is inside the parameters.

    R2E-Gym's ``_calculate_reward_r2e`` (src/r2egym/agenthub/runtime/docker.py) truncates expected and read keys alike.
    """
    return key.split(" - ")[0]


def merge_by_name(statuses: Iterable[tuple[str, str]]) -> dict[str, str]:
    """One status per R2E-Gym key. Several tests can share a key: tests of two files, or truncated names.

    R2E-Gym (``parse_log_pytest``, src/r2egym/repo_analysis/execution_log_parser.py) reads the lines PASSED, ERROR and
    FAILED and keeps the last one; pytest prints them in this order. Here FAILED wins over ERROR and ERROR over PASSED
    in any order of the log; other statuses count only for a name without these. The empty name of a line that names
    only a file is left out.
    """
    merged: dict[str, str] = {}
    for name, status in statuses:
        if name:
            merged[name] = min(status, merged.get(name, status), key=_r2e_order)
    return merged


def _r2e_order(status: str) -> tuple[bool, int]:
    return status not in _READ_BY_R2E, _WORST_FIRST.index(status)


def judge_pytest_log(log: str, expected: Mapping[str, str], keys: KeyMode = "node") -> TestVerdict | None:
    """The verdict on a log, or None if it has no summary: resolved iff every expected test has its expected status.

    Other tests are ignored. In key mode "name", ``expected`` is merged already (:func:`merge_by_name`).
    """
    statuses = parse_summary(log, expected if keys == "node" else ())
    if statuses is None:
        return None
    if keys == "name":
        statuses = merge_by_name((r2e_test_name(node), status) for node, status in statuses.items())
    for test, status in expected.items():
        if (actual := statuses.get(test, "absent")) != status:
            return TestVerdict(False, statuses, f"{test}: {actual}, expected {status}")
    return TestVerdict(True, statuses)


def format_summary(lines: Sequence[str]) -> str:
    """A log with these status lines that :func:`judge_pytest_log` can read."""
    return "\n".join([f"{'=' * 25} short test summary info {'=' * 25}", *lines, ""])
