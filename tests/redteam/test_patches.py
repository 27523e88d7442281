"""Forged patches: diffs that an agent writes itself, and files whose git state differs from their content."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.contexts import context_of

from envs import EnvContext
from envs.swe import SweRecord, diff_files, grade_patch, start_episode
from envs.swe.diff.git_diff import patched_paths, screen, split_patch
from envs.swe.pytest_log import judge_pytest_log
from envs.swe.sandboxes import run_tests, sandbox_spec
from sandbox import SandboxFileError, SandboxSpec
from sandbox.docker.backend import DEFAULT_IMAGE
from tests.envs.conftest import BROKEN, FIXED, TESTS
from tests.redteam.attack import report_stopped

pytestmark = pytest.mark.redteam

HIDDEN = "hidden/test_calc.py"
CONFTEST = "import os\nos._exit(0)\n"
HONEST = diff_files(BROKEN, FIXED)
NEW = diff_files({}, {"conftest.py": CONFTEST})
HUNK = "@@ -0,0 +1,2 @@\n+import os\n+os._exit(0)\n"
FROM = "diff --git a/README.md b/"
IN_README = "diff --git a/README.md b/README.md\n--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-calc\n+calculator\n"

FORGED = {
    "digits of another script hide a file behind a hunk": IN_README.replace("@@ -1 +1 @@", "@@ -１,1 +1,1 @@")
    + f"--- /dev/null\n+++ b/conftest.py\n{HUNK}",
    "a hunk of unread lines": IN_README.replace("@@ -1 +1 @@", "@@ -1,١ +1,١ @@") + NEW.partition("\n")[2],
    "git's old words for a rename": f"{FROM}README.md\nrename old README.md\nrename new conftest.py\n",
    "a rename": f"{FROM}conftest.py\nsimilarity index 100%\nrename from README.md\nrename to conftest.py\n",
    "a copy": f"{FROM}conftest.py\ncopy from README.md\ncopy to conftest.py\n",
    "a rename with one header": f"{FROM}README.md\nrename from README.md\nrename to conftest.py\n",
    "names that are not the header's": f"diff --git a/x.py b/x.py\n--- /dev/null\n+++ b/conftest.py\n{HUNK}",
    "names twice": f"diff --git a/x.py b/x.py\n--- /dev/null\n+++ b/x.py\n--- /dev/null\n+++ b/conftest.py\n{HUNK}",
    "a patch behind the hunks": f"{IN_README}--- /dev/null\n+++ b/conftest.py\n{HUNK}",
    "another tool's patch behind the hunks": f"{IN_README}Index: conftest.py\n--- /dev/null\n+++ conftest.py\n{HUNK}",
    "a quoted name": 'diff --git "a/conf\\164est.py" "b/conf\\164est.py"\nnew file mode 100644\n'
    + f'--- /dev/null\n+++ "b/conf\\164est.py"\n{HUNK}',
    "a new file under the head of an old one": f"diff --git a/json.py b/json.py\n--- /dev/null\n+++ b/json.py\n{HUNK}",
    "an unknown line in the head": NEW.replace("conftest", "x").replace("new file", "rename to conftest.py\nnew file"),
    "a roundabout path": NEW.replace("conftest.py", "pkg/../conftest.py"),
    "a path with a step that is none": NEW.replace("conftest.py", "./conftest.py"),
    "a hidden test": diff_files(TESTS, {**TESTS, HIDDEN: "def test_add(): pass\n"}),
    "a count of a million digits": IN_README.replace("-1 +1", f"-1 +{'1' * 100_000}"),
    "a file of git's own": NEW.replace("conftest.py", ".git/hooks/post-applypatch"),
    "a nested repository": NEW.replace("conftest.py", "pkg").replace("100644", "160000"),
    "a link in the place of the tests": diff_files({}, {"hidden": "pkg"}).replace("100644", "120000"),
}  # fmt: skip


@pytest.fixture
def record() -> SweRecord:
    expected = {f"{HIDDEN}::test_add": "PASSED", f"{HIDDEN}::test_double": "PASSED"}
    return SweRecord(
        repo_name="calc",
        expected_output_json=json.dumps(expected),
        problem_statement="add(2, 3) gives -1.",
        files=BROKEN,
        tests=TESTS,
        test_command=f"python3 hidden/runner.py {HIDDEN}",
        gold_patch=HONEST,
    )


@pytest.fixture
async def context() -> AsyncIterator[EnvContext]:
    async with context_of("bubblewrap", SandboxSpec(memory_mb=256), grade_timeout=30.0) as context:
        yield context


@pytest.mark.parametrize("attack", FORGED)
def test_a_forged_patch_is_listed_and_has_no_effect(attack: str, tmp_path: Path) -> None:
    for path, content in {**BROKEN, **TESTS}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    screened = screen(split_patch(HONEST + FORGED[attack]), hidden=list(TESTS), gold=HONEST)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=screened.text.encode(), check=True, timeout=30)
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {**FIXED, **TESTS}
    assert len(screened.rejected) == 1
    report_stopped(attack, screened.rejected[0][:200])


@pytest.mark.bubblewrap
async def test_a_forged_patch_has_no_reward(context: EnvContext, record: SweRecord) -> None:
    grade = await grade_patch(context, record, FORGED["digits of another script hide a file behind a hunk"])
    assert (grade.reward, len(grade.suspected_hack)) == (0.0, 1)
    report_stopped("a hidden conftest.py alone", grade.suspected_hack)


@pytest.mark.bubblewrap
async def test_a_path_missed_by_the_screening_ends_the_run_before_the_tests(
    context: EnvContext, record: SweRecord
) -> None:
    """The changes that git makes are compared with the paths that the parser understood."""
    smuggled = f"{IN_README}--- /dev/null\n+++ c/conftest.py\n{HUNK}"
    run = await run_tests(context, record, sandbox_spec(context, record, None), HONEST + smuggled)
    assert not run.started
    assert "conftest.py" in run.outcome
    report_stopped("a change that the screening does not see", run.outcome)


# Changes in the sandbox after which its git reports something else than its files.
IN_THE_SANDBOX = {
    "a hook of git's writes the diff": f"""cat > /tmp/hook <<'END'
#!/bin/sh
for out in 1 2 3 4 5; do cat /tmp/forged >&$out 2>/dev/null; done
END
chmod +x /tmp/hook; git config core.fsmonitor /tmp/hook; printf %s {shlex.quote(NEW)} > /tmp/forged""",
    "a conftest.py that git is told to ignore": "echo '*' > .git/info/exclude; echo 'import os' > conftest.py",
    "an attribute that hides text": "echo '*.py -diff' > .gitattributes; echo 'import os' > conftest.py",
    "a filter that cleans the files": "git config filter.x.clean 'cat /tmp/x'; echo '*.py filter=x' > .gitattributes",
    "another base commit": "echo x > pytest.ini; git add -Af; git commit -qam y; git replace HEAD~ HEAD",
    "no git directory": "rm -rf .git; echo 'import os' > conftest.py",
    "a git directory elsewhere": "rm -rf .git; echo 'gitdir: /tmp/x' > .git; mkdir hidden; ln -s /tmp "
    "hidden/test_calc.py",
    "a FIFO in a place of a file": "rm README.md; mkfifo README.md conftest.py",
    "a link to a file of the host's": "ln -sf /etc/passwd README.md; ln -s /proc/self/environ conftest.py",
    "names with line breaks": r"touch $'x\ndiff --git a/a b/conftest.py\nnew file mode 100644' $'a\tb'",
    "bytecode beside the code": "mkdir __pycache__; echo x > __pycache__/calc.cpython-311.pyc; git add -f .",
    "files without an end": "head -c 5000000 /dev/zero > zeros; truncate -s 100M sparse",
    "a directory that nobody may read": "mkdir -p dark; echo x > dark/conftest.py; chmod 000 dark",
}  # fmt: skip


@pytest.mark.bubblewrap
@pytest.mark.parametrize("attack", IN_THE_SANDBOX)
async def test_git_attacks_do_not_change_the_patch(context: EnvContext, record: SweRecord, attack: str) -> None:
    async with start_episode(context, record) as episode:
        await episode.sandbox.exec(IN_THE_SANDBOX[attack], timeout=10)
        screened = screen(split_patch(await episode.patch()), hidden=record.hidden, gold=record.gold)
        grade = await episode.grade()
    assert patched_paths(screened.text) <= {"README.md", ".gitattributes"}
    assert (grade.reward, grade.resolved) == (0.0, False)
    report_stopped(attack, grade.suspected_hack or "nothing of it is in the patch")


@pytest.mark.bubblewrap
async def test_writing_to_a_pipe_fails_at_once(context: EnvContext, record: SweRecord) -> None:
    async with start_episode(context, record) as episode:
        await episode.sandbox.exec("mkdir real; mkfifo real/pipe; ln -s real linked", timeout=10)
        with pytest.raises(SandboxFileError, match="not a regular file") as error:
            await asyncio.wait_for(episode.sandbox.write_files({"linked/pipe": b"x"}), 20)
        assert (await episode.grade()).reward == 0.0
    report_stopped("a pipe behind a linked directory, which a tool writes to", error.value)


@pytest.fixture
async def containers() -> AsyncIterator[EnvContext]:
    async with context_of("docker", SandboxSpec(memory_mb=256), grade_timeout=60.0) as context:
        yield context


@pytest.mark.docker
async def test_a_removed_shell_is_charged_to_the_agent(containers: EnvContext, record: SweRecord) -> None:
    async with start_episode(containers, record) as episode:
        await episode.sandbox.exec("rm -f /bin/sh", timeout=20)
        broken = await episode.sandbox.exec("true", timeout=20)
        assert broken.exit_code == 127
        grade = await episode.grade()
    assert (grade.reward, grade.resolved) == (0.0, False)
    report_stopped("rm /bin/sh", broken.text)


IMAGE = SweRecord(
    repo_name="evil",
    docker_image=DEFAULT_IMAGE,
    expected_output_json='{"test_a": "PASSED"}',
    problem_statement="x",
    test_command="echo = short test summary info =; echo FAILED r2e_tests/test_1.py::test_a; cat printed",
)


@pytest.mark.docker
async def test_a_broken_shell_or_git_in_an_image_ends_with_a_grade(containers: EnvContext) -> None:
    for attack in ("rm -f /bin/sh", "rm -rf .git", "cp /bin/true /usr/bin/git", "cp /bin/false /bin/bash"):
        async with start_episode(containers, IMAGE) as episode:
            await episode.sandbox.exec(attack, timeout=20)
            grade = await episode.grade()
        assert (grade.reward, grade.resolved) == (0.0, False)
        report_stopped(attack, grade.suspected_hack)


@pytest.mark.docker
async def test_a_printed_test_with_an_expected_name_fails(containers: EnvContext) -> None:
    printed = diff_files({}, {"printed": "PASSED evil.py::test_a\n"})
    grade = await grade_patch(containers, IMAGE, printed)
    assert grade.reward == 0.0
    report_stopped("a printed test of an expected name", grade.suspected_hack)


async def test_a_long_forged_patch_and_log_are_read_in_linear_time() -> None:
    many = "".join(f"diff --git a/{i} b/{i}\n@@ -1 +1 @@\n" + "-\n" * 40 for i in range(4900))
    log = "= short test summary info =\nFAILED a" + " - [" * 250_000
    began = time.perf_counter()
    assert len(screen(split_patch(many), hidden=[f"tests/test_{i}.py" for i in range(300)]).rejected) == 4900
    verdict = judge_pytest_log(log, {"a": "PASSED"})
    assert verdict is not None
    assert not verdict.resolved
    assert time.perf_counter() - began < 5.0
    print(f"tried: {len(many)} bytes of patch, {len(log)} of log; read in {time.perf_counter() - began:.2f} s")
