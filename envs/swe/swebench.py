"""Rows of SWE-bench's kind, graded by swebench 5's specification, log parsers and report, or by their own rules.

Of its harness (github.com/SWE-bench/SWE-bench) we use what decides: ``make_test_spec`` and ``get_eval_report``.
Containers, limits, patch and screening are ours, so a conftest that forces passes, a verdict kept from another patch,
and a container with privileges are no concern here. swebench is an extra (``pip install 'agent-rl[swebench]'``),
imported when the first row is graded. SWE-smith's rows do without it.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envs.swe.dataset_rules import FAILED, judge_log
from envs.swe.datasets.scripts import END, START
from envs.swe.datasets.spec import PASSED, SwebenchSpec
from envs.swe.pytest_log import Verdict
from envs.swe.records import SweRecord
from envs.types import TaskRecordError

if TYPE_CHECKING:
    from swebench.types import TestSpec

_log = logging.getLogger(__name__)


def check_gradable(source: str, records: Sequence[SweRecord]) -> None:
    """Raise ``TaskRecordError`` where rows of SWE-bench lack what grades them, or swebench is not installed."""
    rows = [record for record in records if record.swebench]
    if classic := [record for record in rows if record.swebench and record.swebench.missing]:
        assert classic[0].swebench
        raise TaskRecordError(
            f"{source}: {len(classic)} of {len(records)} rows ({classic[0].id}, ...) lack "
            f"{', '.join(classic[0].swebench.missing)}, without which swebench 5 cannot grade them; right would be "
            "rows that have these columns, as SWE-bench/SWE-bench_Verified's have (the option specs joins them by id)"
        )
    if any(needs_swebench(record) for record in rows) and importlib.util.find_spec("swebench") is None:
        raise TaskRecordError(f"{source}: grading SWE-bench's rows needs swebench: pip install 'agent-rl[swebench]'")


def needs_swebench(record: SweRecord) -> bool:
    """Whether the package swebench takes part in grading the record."""
    return record.swebench is not None and record.swebench.rules != "swe-smith"


def eval_script(record: SweRecord) -> str:
    """The bash script that puts the hidden tests in place and runs them."""
    spec = _own(record)
    return spec.eval_script if spec.rules == "swe-smith" else _spec(record).eval_script


def read_log(record: SweRecord, log: str) -> Verdict | None:
    """The verdict on the eval script's output, or None where no test results are found there, or the parser of logs
    breaks on what the tests printed.

    The verdict's tests are those of FAIL_TO_PASS and PASS_TO_PASS, PASSED where they count as such.
    """
    try:
        return _report(record, log) if _own(record).rules == "swebench" else judge_log(_own(record), log)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("task %s: the parser of logs broke on the tests' log: %r", record.id, error)
        return None


def _report(record: SweRecord, log: str) -> Verdict | None:
    from swebench.harness.grading import get_eval_report

    # The patch was applied before the tests ran; swebench asks only whether there is one.
    prediction = {"instance_id": record.id, "model_patch": "applied", "model_name_or_path": "agent-rl"}
    with tempfile.TemporaryDirectory(prefix="agent-rl-") as directory:
        path = Path(directory) / "test_output.txt"
        path.write_text(log, encoding="utf-8", errors="replace")
        report = get_eval_report(_spec(record), prediction, str(path), include_tests_status=True)[record.id]
    if not report["patch_successfully_applied"]:
        return None
    groups = report["tests_status"].values()
    failed = {test: FAILED for group in groups for test in group["failure"]}
    passed = {test: PASSED for group in groups for test in group["success"]}
    difference = next((f"{test}: {FAILED}, expected {PASSED}" for test in failed), "")
    return Verdict(bool(report["resolved"]), {**passed, **failed}, difference)


def as_log(lines: Sequence[str]) -> str:
    """Lines of a summary as the part of a log that swebench reads."""
    return "\n".join([START, *lines, END])


def _spec(record: SweRecord) -> TestSpec:
    from swebench.harness.utils import make_test_spec

    return make_test_spec(_own(record).instance(record.id, record.repo_name))


def _own(record: SweRecord) -> SwebenchSpec:
    assert record.swebench is not None, f"{record.id} is no row of SWE-bench's kind"
    return record.swebench
