"""SWE-bench's rows, made of real package releases and graded by swebench 5. In containers: test_swe_images.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from envs import EnvContext, GradingError
from envs.swe import SweEnvironment, SweRecord, grade_patch, read_jsonl
from envs.swe.adjudication import MUTANTS_PASS
from envs.swe.swebench import judge_swebench_log
from tests.envs.dataset_rows import swebench_log
from tests.envs.images import BUILT, GIT_WITH_A_FUTURE, directory_image, limits_with_pytest, swebench_row
from tests.envs.test_swe_sources import GRADABLE

pytest.importorskip("swebench")
TASKS = ("pathspec-0.12.1", "voluptuous-0.14.2")

PREAMBLE = """cd /testbed
git config --global --add safe.directory /testbed
git status"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows' file."""
    if not BUILT.is_file():
        pytest.skip("the real tasks are not built (make real-tasks)")
    records = {record.id: record for record in read_jsonl(BUILT)}
    directory = tmp_path_factory.mktemp("rows")
    with (directory / "test.jsonl").open("w") as out:
        for name in TASKS:
            image = str(directory_image(directory / name, records[name].files, GIT_WITH_A_FUTURE))
            row = swebench_row(records[name], image, base="HEAD", preamble=PREAMBLE, pytest="python3 -m pytest")
            out.write(json.dumps(row) + "\n")
    return directory / "test.jsonl"


@pytest.fixture
def sandboxes(context: EnvContext) -> EnvContext:
    """A context whose sandboxes are lent the real tasks' pytest."""
    return dataclasses.replace(context, limits=limits_with_pytest(1024), grade_timeout=120.0)


@pytest.mark.bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TASKS)))
async def test_the_true_fix_resolves_and_no_fix_does_not(sandboxes: EnvContext, rows: Path, number: int) -> None:
    record = (read_jsonl(rows))[number]
    gold = await grade_patch(sandboxes, record, record.gold)
    assert (gold.reward, gold.suspected_hack) == (1.0, ())
    assert set(gold.tests) == set(record.expected)
    nothing = await grade_patch(sandboxes, record, "")
    assert (nothing.reward, nothing.suspected_hack) == (0.0, ())
    assert record.swebench is not None
    assert {test for test, status in nothing.tests.items() if status != "PASSED"} == set(record.swebench.fail_to_pass)


@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_an_episode_shows_no_future_and_is_graded_in_another_sandbox(sandboxes: EnvContext, rows: Path) -> None:
    environment = SweEnvironment(sandboxes, rows)
    task = environment.tasks("test")[0]
    record = read_jsonl(rows)[0]
    async with environment.start(task) as episode:
        seen = await episode.sandbox.exec("git log --all --format=%s; grep -rl unmatch.bin tests", timeout=30)
        assert seen.text == "Start of the task\n"
        applied = await episode.sandbox.exec("git apply -", timeout=30, stdin=record.gold.encode())
        assert applied.ok, applied.text
        assert (await episode.grade()).resolved


@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_an_audit_shows_that_what_swebench_would_believe_is_screened_or_seen(
    sandboxes: EnvContext, rows: Path
) -> None:
    environment = SweEnvironment(sandboxes, rows)
    findings = {finding.check: finding for finding in await environment.audit(environment.tasks("test")[0])}
    assert all(finding.ok for finding in findings.values()), findings
    assert findings["hack: conftest"].detail == "no reward; conftest.py: test infrastructure, undone"
    assert MUTANTS_PASS in findings["hack: patched pytest"].detail
    assert MUTANTS_PASS in findings["hack: forged summary"].detail


@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_a_script_whose_output_cannot_be_read_is_no_verdict_even_for_the_true_fix(
    sandboxes: EnvContext, rows: Path
) -> None:
    record = read_jsonl(rows)[1]
    assert record.swebench is not None
    mute = record.swebench.model_copy(update={"eval_script": "#!/bin/bash\npython3 --version\n"})
    with pytest.raises(GradingError, match=r"no verdict \(exit code 0: .*\) in the run with the gold patch"):
        await grade_patch(sandboxes, record.model_copy(update={"swebench": mute}), record.gold)


LINES = ("PASSED test_r.py::test_a", "PASSED test_r.py::test_b", "SKIPPED test_r.py::test_c")


@pytest.fixture
def record() -> SweRecord:
    return SweRecord.model_validate(GRADABLE)


def test_a_log_is_read_by_swebenchs_rules(record: SweRecord) -> None:
    verdict = judge_swebench_log(record, swebench_log(LINES))
    assert verdict is not None
    assert verdict.resolved  # a skipped test of PASS_TO_PASS counts as kept there
    failed = judge_swebench_log(record, swebench_log(["FAILED test_r.py::test_a - boom", *LINES[1:]]))
    assert failed is not None
    assert (failed.resolved, failed.difference) == (False, "test_r.py::test_a: FAILED, expected PASSED")
    absent = judge_swebench_log(record, swebench_log(LINES[1:]))
    assert absent is not None
    assert not absent.resolved


@pytest.mark.parametrize("log", ["", "\n".join(LINES), swebench_log(()), swebench_log([">>>>> Tests Errored", *LINES])])
def test_a_log_that_says_nothing_is_no_verdict(record: SweRecord, log: str) -> None:
    assert judge_swebench_log(record, log) is None


def test_a_log_of_another_runner_is_read_by_the_parser_that_its_row_names() -> None:
    """Django's, say. No plugin watches such a run: it is believed by its log alone."""
    django = {
        **GRADABLE,
        "eval_script": "#!/bin/bash\n./tests/runtests.py --verbosity 2 forms\n",
        "log_parser": "parse_log_django",
        "FAIL_TO_PASS": ["test_clean (forms.tests.FormTests)"],
        "PASS_TO_PASS": ["test_render (forms.tests.FormTests)"],
    }
    record = SweRecord.model_validate(django)
    ends = {"ok": True, "FAIL": False, "ERROR": False}
    for end, resolved in ends.items():
        lines = [f"test_clean (forms.tests.FormTests) ... {end}", "test_render (forms.tests.FormTests) ... ok"]
        verdict = judge_swebench_log(record, swebench_log(lines))
        assert verdict is not None
        assert verdict.resolved is resolved, end
    broken = swebench_log([*lines, "FAIL:"])  # swebench's parser raises an IndexError
    assert judge_swebench_log(record, broken) is None
