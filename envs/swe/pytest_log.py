"""From the log of a test run to a verdict.

The verdict is read from pytest's "short test summary info" section (``-rA``). Tests run in one process with the code
under test, so a log alone is no proof against code that sets out to forge it: where a log holds several summaries, a
test's worst status counts; what a patch does to the tests' surroundings is undone before they run (:mod:`.patches`);
a claim of success is checked against a report that never was on the screen (:mod:`.witness`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

KeyMode = Literal["node", "name"]
"""A test's key: pytest's full node id, or (R2E-Gym's rows) its name as :func:`name_of` makes it."""

_WORST_FIRST = ("FAILED", "ERROR", "XPASS", "XFAIL", "SKIPPED", "PASSED")
_READ_BY_R2E = ("FAILED", "ERROR", "PASSED")
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_HEADER = re.compile(r"^=+ short test summary info =+\s*$", re.MULTILINE)
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|SUBFAILED(?:\(.*?\)|\[.*?\])?) (\S.*)$")
_FOLDED_SKIP = re.compile(r"^\[\d+\] ")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the hidden tests say: whether the task is resolved, every test's status, and the first difference."""

    resolved: bool
    tests: Mapping[str, str]
    difference: str = ""


def parse_summary(log: str, expected: Collection[str] = ()) -> dict[str, str] | None:
    """Status by full node id from every summary section of a pytest log, or None where the log holds no section.

    A node id may hold spaces, brackets and " - "; ``expected`` ids settle where it ends. The worst status of a test
    that is named twice counts (a test that passes and whose teardown errs has both). Folded skips have no node id
    and are left out.
    """
    sections = _HEADER.split(_ANSI.sub("", log))[1:]
    if not sections:
        return None
    statuses: dict[str, str] = {}
    lengths = frozenset(map(len, expected))
    for section in sections:
        for line in section.split("\n"):
            _take_line(line.rstrip("\r"), statuses, expected, lengths)
    return statuses


def count_summaries(log: str) -> int:
    """How many summary sections a log holds; pytest prints one."""
    return len(_HEADER.findall(_ANSI.sub("", log)))


def _take_line(line: str, statuses: dict[str, str], expected: Collection[str], lengths: Collection[int]) -> None:
    match = _LINE.match(line)
    if match is None:
        return
    word, rest = match.groups()
    status = "FAILED" if word.startswith("SUBFAILED") else word
    if status == "SKIPPED" and _FOLDED_SKIP.match(rest):
        return
    node = rest if status == "PASSED" else _node_id(rest, expected, lengths)  # pytest gives a passed test no message
    node = node.rstrip(" ")  # old versions end an XPASS without a reason with a space
    statuses[node] = worst(status, statuses.get(node, status))


def _node_id(rest: str, expected: Collection[str], lengths: Collection[int]) -> str:
    """The node id at the start of ``rest``, which may go on with " - message". ``lengths``: those of ``expected``."""
    cuts = [match.start() for match in re.finditer(" - ", rest)] + [len(rest)]
    for cut in reversed(cuts):
        if cut in lengths and rest[:cut] in expected:
            return rest[:cut]
    bracket = rest.find("[")
    whole = (cut for cut in cuts if not 0 <= bracket < cut or rest[cut - 1] == "]")
    return rest[: next(whole, cuts[0])]


def worst(first: str, second: str) -> str:
    """The worse of two statuses."""
    return min(first, second, key=_WORST_FIRST.index)


def name_of(node: str) -> str:
    """R2E-Gym's key of a node id: ``tests/test_a.py::TestX::test_y`` is ``TestX.test_y``; a file's own key is empty."""
    return cut_name(".".join(node.split("::")[1:]))


def cut_name(key: str) -> str:
    """A key as R2E-Gym compares it: up to its first " - ", which may begin a message, or stand among parameters.

    Its ``_calculate_reward_r2e`` (src/r2egym/agenthub/runtime/docker.py) cuts what it expects and what it read alike.
    """
    return key.split(" - ")[0]


def fold_names(statuses: Iterable[tuple[str, str]]) -> dict[str, str]:
    """One status for each of R2E-Gym's keys, several tests of which may have the same name: in two files, or cut.

    R2E-Gym (``parse_log_pytest``, src/r2egym/repo_analysis/execution_log_parser.py) reads the lines PASSED, ERROR and
    FAILED, and the last one counts; pytest prints them in this order. So FAILED comes before ERROR before PASSED here
    too, in whatever order a log has them, and another status counts only for a name that has none of these. The empty
    name, of a line that names a file and no test, is left out.
    """
    found: dict[str, str] = {}
    for name, status in statuses:
        if name:
            found[name] = min(status, found.get(name, status), key=_r2e_order)
    return found


def _r2e_order(status: str) -> tuple[bool, int]:
    return status not in _READ_BY_R2E, _WORST_FIRST.index(status)


def judge(log: str, expected: Mapping[str, str], keys: KeyMode = "node") -> Verdict | None:
    """The verdict on a log: resolved iff every expected test has exactly its expected status.

    Tests that nobody expects are not looked at. None where the log holds no summary: such a run says nothing. In key
    mode "name", ``expected`` is folded already (:func:`fold_names`).
    """
    statuses = parse_summary(log, expected if keys == "node" else ())
    if statuses is None:
        return None
    if keys == "name":
        statuses = fold_names((name_of(node), status) for node, status in statuses.items())
    for test, status in expected.items():
        if (got := statuses.get(test, "absent")) != status:
            return Verdict(False, statuses, f"{test}: {got}, expected {status}")
    return Verdict(True, statuses)


def as_summary(lines: Sequence[str]) -> str:
    """Lines of statuses and node ids as a log that :func:`judge` reads."""
    return "\n".join([f"{'=' * 25} short test summary info {'=' * 25}", *lines, ""])
