"""Judges the logs of SWE-bench-like rows with swebench 5's log parsers and report, or by the rules of other data sets.

From the swebench harness (github.com/SWE-bench/SWE-bench) only ``make_test_spec``, ``get_eval_report`` and the log
parsers are used. Containers, limits, patch application and screening are ours, so the harness's weaknesses do not apply
(a conftest that forces passes, verdicts cached from another patch, privileged containers). swebench is an extra
(``pip install 'agent-rl[swebench]'``), imported when the first row is graded. SWE-smith's rows do not need it.
docs/reference/datasets.md describes the rules.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from envs.swe.datasets.spec import END, PASSED, START, SwebenchSpec
from envs.swe.datasets.swe_rebench import without_duration
from envs.swe.pytest_log import TestVerdict
from envs.swe.records import SweRecord
from envs.types import TaskRecordError

if TYPE_CHECKING:
    from swebench.types import TestSpec

_log = logging.getLogger(__name__)

_FAILED = "FAILED"
_STATUS = r"(?:PASSED|FAILED|ERROR|SKIPPED|XFAIL)(?!\S)"
# A status line of pytest. In the progress the status follows the test, in the summary it precedes it. pytest-xdist
# starts its lines with the name of a worker.
_STATUS_LINE = re.compile(
    rf"(?:\[gw\d+\]\s+(?:\[\s*\d+%\]\s+)?)?"
    rf"(?:(?P<test>\S+)\s+(?P<status>{_STATUS})|(?P<first>{_STATUS})\s+(?P<name>\S+))"
)


def check_gradable(source: str, records: Sequence[SweRecord]) -> None:
    """Raise ``TaskRecordError`` if SWE-bench rows lack grading fields or swebench is not installed."""
    specs = {record.id: record.swebench for record in records if record.swebench}
    if incomplete := {name: spec.missing for name, spec in specs.items() if spec.missing}:
        name, missing = next(iter(incomplete.items()))
        raise TaskRecordError(
            f"{source}: {len(incomplete)} of {len(records)} rows ({name}, ...) lack {', '.join(missing)}, "
            "without which swebench 5 cannot grade them; right would be rows that have these columns, "
            "as SWE-bench/SWE-bench_Verified's have (the option specs joins them by id)"
        )
    needs_swebench = any(spec.rules != "swe-smith" for spec in specs.values())
    if needs_swebench and importlib.util.find_spec("swebench") is None:
        raise TaskRecordError(f"{source}: grading SWE-bench's rows needs swebench: pip install 'agent-rl[swebench]'")


def eval_script(record: SweRecord) -> str:
    """The bash script that puts the hidden tests in place and runs them."""
    spec = _swebench_spec(record)
    return spec.eval_script if spec.rules == "swe-smith" else _test_spec(record).eval_script


def judge_swebench_log(record: SweRecord, log: str) -> TestVerdict | None:
    """The verdict on the eval script's output, or None if it has no test results or the log parser fails on it.

    The verdict names the tests of FAIL_TO_PASS and PASS_TO_PASS, each as PASSED or FAILED.
    """
    spec = _swebench_spec(record)
    with _logged_parser_errors(record):
        return _judge_by_report(record, log) if spec.rules == "swebench" else judge_by_dataset_rules(spec, log)
    return None


def _judge_by_report(record: SweRecord, log: str) -> TestVerdict | None:
    from swebench.harness.grading import get_eval_report

    # The patch was applied before the tests ran; swebench only checks that the prediction has a patch.
    prediction = {"instance_id": record.id, "model_patch": "applied", "model_name_or_path": "agent-rl"}
    with tempfile.TemporaryDirectory(prefix="agent-rl-") as directory:
        path = Path(directory) / "test_output.txt"
        path.write_text(log, encoding="utf-8", errors="replace")
        report = get_eval_report(_test_spec(record), prediction, str(path), include_tests_status=True)[record.id]
    if not report["patch_successfully_applied"]:
        return None
    groups = report["tests_status"].values()
    failed = {test: _FAILED for group in groups for test in group["failure"]}
    passed = {test: PASSED for group in groups for test in group["success"]}
    difference = next((_difference(test) for test in failed), "")
    return TestVerdict(bool(report["resolved"]), {**passed, **failed}, difference)


def judge_by_dataset_rules(spec: SwebenchSpec, log: str) -> TestVerdict | None:
    """The verdict by SWE-rebench-V2's or SWE-smith's rules, or None if the output has no test results.

    SWE-smith counts a test that is not in the log as not failed; the verdict then does not name it. The exception is a
    test whose file could not be collected: it failed. Raises ``LookupError`` for an unknown log parser.
    """
    statuses = _raw_statuses(spec, log)
    if not statuses:
        return None
    tests = (*spec.fail_to_pass, *spec.pass_to_pass)
    uncollected = {test for test in tests if statuses.get(test.partition("::")[0]) == "ERROR"}
    status_of = {test: statuses.get(test) or ("ERROR" if test in uncollected else None) for test in tests}
    is_smith = spec.rules == "swe-smith"
    passing = (PASSED, "XFAIL") if is_smith else (PASSED,)
    named = {test: status for test, status in status_of.items() if status or not is_smith}
    judged = {test: PASSED if status in passing else _FAILED for test, status in named.items()}
    failed = next((test for test, status in judged.items() if status == _FAILED), None)
    return TestVerdict(failed is None, judged, _difference(failed) if failed else "")


def swebench_statuses(record: SweRecord, log: str) -> Mapping[str, str] | None:
    """Status by test of all tests in the eval script's output, or None if it has none or the log parser fails on it."""
    with _logged_parser_errors(record):
        return _raw_statuses(_swebench_spec(record), log) or None
    return None


@contextmanager
def _logged_parser_errors(record: SweRecord) -> Iterator[None]:
    """Log the error of a log parser that fails on a log, instead of raising it."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("task %s: the log parser failed on the tests' log: %r", record.id, error)


def _raw_statuses(spec: SwebenchSpec, log: str) -> Mapping[str, str]:
    output = log.partition(START)[2].rpartition(END)[0]  # tests can print swebench's markers: the widest pair
    return _pytest_statuses(output) if spec.rules == "swe-smith" else _parse_statuses(spec.log_parser, output)


def _difference(test: str) -> str:
    return f"{test}: {_FAILED}, expected {PASSED}"


def _pytest_statuses(log: str) -> Mapping[str, str]:
    matches = (match for line in log.split("\n") if (match := _STATUS_LINE.match(line)))
    return {match["test"] or match["name"]: match["status"] or match["first"] for match in matches}


def _parse_statuses(parser: str, log: str) -> Mapping[str, str]:
    """Statuses as swebench's ``parser`` reads them, by test name without duration."""
    from swebench.harness.log_parsers import PARSER_REGISTRY

    return {without_duration(test): status for test, status in PARSER_REGISTRY[parser](log, None).items()}


def _test_spec(record: SweRecord) -> TestSpec:
    from swebench.harness.utils import make_test_spec

    return make_test_spec(_swebench_spec(record).instance(record.id, record.repo_name))


def _swebench_spec(record: SweRecord) -> SwebenchSpec:
    assert record.swebench is not None, f"{record.id} is not a SWE-bench-like row"
    return record.swebench
