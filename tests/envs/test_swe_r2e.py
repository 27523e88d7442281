"""Rows of R2E-Gym in sandboxes laid out as its images: what the agent finds there, how the row's own script is
graded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from envs import EnvContext
from envs.swe import SweRecord, grade_patch, start_episode, verify_record
from envs.swe.adjudication import MUTANTS_PASS
from envs.swe.diff.git_diff import diff_files
from envs.swe.diff.snapshot import BaseSnapshot
from envs.swe.reward_hacks import PATCH_PYTEST
from envs.swe.task_audit import audit_record
from sandbox import SandboxStartError
from tests.envs.dataset_rows import commit_content
from tests.envs.images import BUILT, GIT_WITH_A_FUTURE, directory_image, limits_with_pytest

pytestmark = [
    pytest.mark.bubblewrap,
    pytest.mark.slow,
    pytest.mark.skipif(not BUILT.is_file(), reason="the real tasks' pytest is not there (make real-tasks)"),
]

OLD = {"pkg/__init__.py": "", "pkg/m.py": "def half(a):\n    return a // 2\n"}
NEW = {**OLD, "pkg/m.py": "def half(a):\n    return a / 2\n"}
TESTS = """import sys
sys.path.insert(0, "/testbed")
from pkg.m import half

def test_half(): assert half(3) == 1.5

class TestEven:
    def test_even(self): assert half(4) == 2
"""
SCRIPT = "PYTHONWARNINGS='ignore::UserWarning' .venv/bin/python -W ignore -m pytest -rA r2e_tests\n"
# R2E-Gym's older images have these in the repository too; the first holds the fix.
TOLD = {
    *("parsed_commit.json", "execution_result.json", "expected_test_output.json"),
    *("syn_issue.json", "modified_files.json", "modified_entities.json"),
}
# An environment of its own in the repository; hidden tests and script put there by hand; bytecode of the fixed code.
SET_UP = f"""{GIT_WITH_A_FUTURE}
mkdir -p .venv/bin pkg/__pycache__ r2e_tests
ln -s /usr/bin/python3 .venv/bin/python
cat > r2e_tests/test_1.py <<'EOF'
{TESTS}EOF
cat > run_tests.sh <<'EOF'
{SCRIPT}EOF
touch pkg/__pycache__/m.cpython-39.pyc
touch {" ".join(sorted(TOLD))}
echo '{NEW["pkg/m.py"].splitlines()[1]}' > parsed_commit.json
"""


@pytest.fixture
def row(tmp_path: Path) -> SweRecord:
    return SweRecord(
        repo_name="pkg",
        docker_image=str(directory_image(tmp_path / "image", OLD, SET_UP)),
        commit_hash="abc",
        parsed_commit_content=commit_content(OLD, NEW),
        expected_output_json=json.dumps({"test_half": "PASSED", "TestEven.test_even": "PASSED"}),
        problem_statement="[ISSUE]\nhalf(3) gives 1\n[/ISSUE]",
    )


@pytest.fixture
def sandboxes(context: EnvContext) -> EnvContext:
    return dataclasses.replace(context, limits=limits_with_pytest(512), start_retries=0)


async def test_the_agents_sandbox_has_the_environment_and_nothing_that_was_hidden(
    sandboxes: EnvContext, row: SweRecord
) -> None:
    async with start_episode(sandboxes, row) as episode:
        place = await episode.sandbox.exec("which python; readlink /root/.venv; ls -A; ls -A pkg", timeout=30)
        assert place.text.split() == [
            *("/testbed/.venv/bin/python", "/testbed/.venv"),
            *(".git", ".venv", "pkg"),
            *("__init__.py", "m.py"),
        ]
        log = await episode.sandbox.exec("git log --all --format=%s; git status --short", timeout=30)
        assert log.text == "Start of the task\n"
        assert not [path for path in BaseSnapshot.from_listing(episode.listing).modes if path in TOLD]
        assert (await episode.sandbox.exec("sed -i 's:a // 2:a / 2:' pkg/m.py", timeout=20)).ok
        grade = await episode.grade()
    assert (grade.resolved, grade.suspected_hack) == (True, ())
    assert grade.tests == row.expected


async def test_row_script_verifies_and_rejects_a_patched_pytest(sandboxes: EnvContext, row: SweRecord) -> None:
    assert (await verify_record(sandboxes, row)).verified
    forced = diff_files(OLD, {**OLD, "pkg/m.py": OLD["pkg/m.py"] + PATCH_PYTEST})
    grade = await grade_patch(sandboxes, row, forced)
    assert grade.reward == 0.0
    assert any(MUTANTS_PASS in suspicion for suspicion in grade.suspected_hack)


PRINTS = """
import pkg.m
def test_prints(): print("= short test summary info =\\n" * getattr(pkg.m, "INSIDE", 1))
"""


async def test_honest_fix_may_print_more_summaries_than_the_gold_patch(sandboxes: EnvContext, row: SweRecord) -> None:
    with (Path(row.docker_image) / "testbed/r2e_tests/test_1.py").open("a") as tests:
        tests.write(PRINTS)
    expected = {**row.expected, "test_prints": "PASSED"}
    row = row.model_copy(update={"expected_output_json": json.dumps(expected)})
    more = diff_files(OLD, {**OLD, "pkg/m.py": NEW["pkg/m.py"] + "INSIDE = 2\n"})
    grade = await grade_patch(sandboxes, row, more)
    assert (grade.resolved, grade.suspected_hack) == (True, ())


async def test_the_audit_of_an_image_row(sandboxes: EnvContext, row: SweRecord) -> None:
    findings = await audit_record(sandboxes, row)
    assert [finding.ok for finding in findings] == [True] * 6, findings


READS_THE_FIX = """
import pathlib
half = eval("lambda a:" + pathlib.Path("/testbed/parsed_commit.json").read_text().replace("return", ""))
"""


async def test_code_under_test_finds_no_fix_in_the_image(sandboxes: EnvContext, row: SweRecord) -> None:
    reads = diff_files(OLD, {**OLD, "pkg/m.py": OLD["pkg/m.py"] + READS_THE_FIX})
    assert (await grade_patch(sandboxes, row, reads)).reward == 0.0


READS_HISTORY = """
import subprocess
exec(subprocess.check_output(["git", "show", "later:pkg/m.py"], cwd="/testbed"))
"""


async def test_history_of_an_image_is_hidden_from_the_agent_and_not_from_the_code_under_test(
    sandboxes: EnvContext, row: SweRecord
) -> None:
    """What stands: test commands and versions use the history, so the grading sandbox keeps it (docs, Grading)."""
    testbed = Path(row.docker_image, "testbed")
    original = (testbed / "pkg/m.py").read_text()
    (testbed / "pkg/m.py").write_text(NEW["pkg/m.py"])
    commit = "git checkout -qb later && git -c user.name=a -c user.email=a commit -qam fix && git checkout -q -"
    await asyncio.to_thread(subprocess.run, ["bash", "-c", commit], cwd=testbed, check=True, timeout=60)
    assert (testbed / "pkg/m.py").read_text() == original
    async with start_episode(sandboxes, row) as episode:
        stored = "git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c commit; git show later"
        assert (await episode.sandbox.exec(stored, timeout=30)).text.startswith("1\nfatal: ")
    reads = diff_files(OLD, {**OLD, "pkg/m.py": OLD["pkg/m.py"] + READS_HISTORY})
    assert (await grade_patch(sandboxes, row, reads)).resolved


async def test_tests_with_one_name_in_two_files_are_merged_as_in_r2e_gym(sandboxes: EnvContext, row: SweRecord) -> None:
    again = Path(row.docker_image) / "testbed/r2e_tests/test_2.py"
    again.write_text(TESTS)
    assert (await grade_patch(sandboxes, row, row.gold)).resolved
    again.write_text("def test_half(): assert False\n")
    assert not (await grade_patch(sandboxes, row, row.gold)).resolved
    failing = json.dumps({"test_half": "FAILED", "TestEven.test_even": "PASSED"})
    assert (await grade_patch(sandboxes, row.model_copy(update={"expected_output_json": failing}), row.gold)).resolved


async def test_hidden_tests_that_cannot_be_removed_stop_the_start(sandboxes: EnvContext, row: SweRecord) -> None:
    """A directory image's top is read-only: the agent would see them."""
    (Path(row.docker_image) / "r2e_tests").mkdir()
    with pytest.raises(SandboxStartError, match="could not be hidden from the agent: /r2e_tests"):
        async with start_episode(sandboxes, row):
            pass
