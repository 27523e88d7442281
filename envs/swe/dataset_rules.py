"""Verdicts by rules that swebench's report does not have: SWE-rebench-V2's and SWE-smith's (docs/datasets.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from envs.swe.datasets.rebench import without_duration
from envs.swe.datasets.scripts import END, START
from envs.swe.datasets.spec import PASSED, SwebenchSpec
from envs.swe.pytest_log import Verdict

FAILED = "FAILED"

_STATUS = r"(?:PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?!\S)"
# A line of pytest's: in its progress a test's status follows the test, in its summary it precedes it. pytest-xdist puts
# a worker's name first.
_LINE = re.compile(
    rf"(?:\[gw\d+\]\s+(?:\[\s*\d+%\]\s+)?)?"
    rf"(?:(?P<test>\S+)\s+(?P<status>{_STATUS})|(?P<first>{_STATUS})\s+(?P<name>\S+))"
)


def judge_log(spec: SwebenchSpec, log: str) -> Verdict | None:
    """The verdict on the eval script's output; None where it has no results. ``LookupError`` for an unknown parser.

    A test counts as PASSED or FAILED. By SWE-smith's rules one that is not in the log has not failed, and the verdict
    does not name it; but here it has where its file could not be collected.
    """
    output = _output(log)
    statuses = _pytest_statuses(output) if spec.rules == "swe-smith" else _parsed(spec.log_parser, output)
    if not statuses:
        return None
    tests = (*spec.fail_to_pass, *spec.pass_to_pass)
    lost = {test for test in tests if statuses.get(test.partition("::")[0]) == "ERROR"}
    seen = {test: statuses.get(test) or ("ERROR" if test in lost else None) for test in tests}
    if spec.rules == "swe-smith":
        found = {test: PASSED if status in (PASSED, "XFAIL") else FAILED for test, status in seen.items() if status}
    else:
        found = {test: PASSED if status == PASSED else FAILED for test, status in seen.items()}
    failed = next((test for test, status in found.items() if status == FAILED), None)
    return Verdict(failed is None, found, f"{failed}: {FAILED}, expected {PASSED}" if failed else "")


def _output(log: str) -> str:
    """What stands between the markers; nothing where one is missing. Tests can print markers, too: the widest."""
    return log.partition(START)[2].rpartition(END)[0]


def _pytest_statuses(log: str) -> Mapping[str, str]:
    found = (match for line in log.split("\n") if (match := _LINE.match(line)))
    return {match["test"] or match["name"]: match["status"] or match["first"] for match in found}


def _parsed(parser: str, log: str) -> Mapping[str, str]:
    """Statuses as swebench's ``parser`` reads them, under names without durations."""
    from swebench.harness.log_parsers import PARSER_REGISTRY

    return {without_duration(test): status for test, status in PARSER_REGISTRY[parser](log, None).items()}
