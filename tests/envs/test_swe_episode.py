"""Episodes and grading in real sandboxes: who is to blame for what."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from envs import EnvContext, GradingError, UndecidableError
from envs.swe import (
    PatchError,
    SweEnvironment,
    SweRecord,
    diff_files,
    grade_patch,
    start_episode,
    verify_record,
    write_jsonl,
)
from envs.swe.diff.git_diff import split_patch
from envs.swe.grading import grade_changes
from envs.swe.repositories import RepositoryCache, read_archive
from envs.swe.sandboxes import agent_sandbox, sandbox_spec
from sandbox import ExecResult, Sandbox, SandboxError, SandboxSpec, SandboxStartError
from sandbox.bubblewrap.backend import BubblewrapBackend
from sandbox.bubblewrap.sandbox import BubblewrapSandbox
from tools import ToolCall

pytestmark = pytest.mark.bubblewrap


def edit(record: SweRecord, **files: str) -> str:
    """The patch that gives files new contents; ``a__b`` stands for the path ``a.b``."""
    return diff_files(record.files, {**record.files, **{path.replace("__", "."): text for path, text in files.items()}})


async def test_the_gold_patch_resolves(context: EnvContext, record: SweRecord) -> None:
    grade = await grade_patch(context, record, record.gold)
    assert (grade.reward, grade.resolved, grade.suspected_hack) == (1.0, True, ())
    assert grade.tests == record.expected
    assert grade.seconds > 0


async def test_no_change_and_a_wrong_change_fail(context: EnvContext, record: SweRecord) -> None:
    nothing = await grade_patch(context, record, "")
    assert (nothing.reward, nothing.tests["hidden/test_calc.py::test_add"]) == (0.0, "FAILED")
    wrong = await grade_patch(context, record, edit(record, calc__py="def add(a, b):\n    return 5\n"))
    assert wrong.reward == 0.0
    assert wrong.tests == {"hidden/test_calc.py::test_add": "PASSED", "hidden/test_calc.py::test_double": "FAILED"}


async def test_no_change_to_a_verified_task_is_graded_without_a_sandbox(record: SweRecord) -> None:
    without_backend = EnvContext(None)  # type: ignore[arg-type]
    grade = await grade_patch(without_backend, record.model_copy(update={"verified": True}), "")
    assert (grade.reward, grade.resolved) == (0.0, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "def add(a, b:\n",
        "import os\nos._exit(0)\n",
        "while True: pass\n",
        "x = ' ' * (1 << 33)\n",
        "raise SystemExit\n",
    ],
    ids=["syntax", "exit", "hang", "memory", "system-exit"],
)
async def test_code_that_breaks_the_tests_gets_no_reward(context: EnvContext, record: SweRecord, code: str) -> None:
    grade = await grade_patch(dataclasses.replace(context, grade_timeout=4.0), record, edit(record, calc__py=code))
    assert (grade.reward, grade.resolved) == (0.0, False)


class Counting(BubblewrapBackend):
    """Counts the sandboxes that it starts."""

    started = 0

    async def start(self, spec: SandboxSpec) -> BubblewrapSandbox:
        self.started += 1
        return await super().start(spec)


async def test_a_grading_runs_the_tests_in_two_sandboxes_at_most(record: SweRecord, tmp_path: Path) -> None:
    """What ``env.grading_timeout`` of the config allows for."""
    backend = Counting(run_id="counting", base=tmp_path)
    try:
        await grade_patch(EnvContext(backend), record, edit(record, calc__py="import os\nos._exit(0)\n"))
    finally:
        await backend.close()
    assert backend.started == 2


async def test_a_success_costs_one_run_of_its_tests_more(record: SweRecord, tmp_path: Path) -> None:
    honest = list(split_patch(edit(record, calc__py="def add(a, b): return b + a\ndef double(a): return 2 * a\n")))
    backend, controls = Counting(run_id="once", base=tmp_path), {}
    try:
        grade = await grade_changes(EnvContext(backend), record, honest, controls=controls)
    finally:
        await backend.close()
    assert (backend.started, grade.reward, grade.suspected_hack) == (2, 1.0, ())
    assert 0.0 < grade.mutant_seconds < grade.seconds


async def test_success_of_a_task_that_cannot_be_verified_starts_no_further_sandbox(
    record: SweRecord, tmp_path: Path
) -> None:
    honest = list(split_patch(edit(record, calc__py="def add(a, b): return b + a\ndef double(a): return 2 * a\n")))
    backend = Counting(run_id="once", base=tmp_path)
    try:
        grade = await grade_changes(EnvContext(backend), record.model_copy(update={"verifiable": "no"}), honest)
    finally:
        await backend.close()
    assert (backend.started, grade.reward) == (1, 1.0)


async def test_failing_control_run_raises_a_grading_error(context: EnvContext, record: SweRecord) -> None:
    hanging = record.model_copy(update={"test_command": "sleep 60"})
    short = dataclasses.replace(context, grade_timeout=1.0)
    with pytest.raises(
        GradingError, match=r"calc-add: no verdict \(the tests did not end within \d s\); the control run with"
    ) as slow:
        await grade_patch(short, hanging, edit(record, calc__py="x = 1\n"))
    assert not isinstance(slow.value, UndecidableError)
    silent = record.model_copy(update={"test_command": "echo no summary"})
    with pytest.raises(UndecidableError, match=r"exit code 0: no summary\) in the run with the gold patch"):
        await grade_patch(context, silent, record.gold)


@pytest.mark.parametrize(
    "script",
    ["echo write: No space left on device", "kill -9 $$", "ulimit -v 90000; python3 -c 'b\" \" * (1 << 30)'"],
)
async def test_lack_of_resources_is_not_undecidable(context: EnvContext, record: SweRecord, script: str) -> None:
    with pytest.raises(GradingError) as error:
        await grade_patch(context, record.model_copy(update={"test_command": script}), record.gold)
    assert not isinstance(error.value, UndecidableError)


async def test_without_gold_patch_the_unchanged_code_is_the_control_run(context: EnvContext, record: SweRecord) -> None:
    without_gold = record.model_copy(update={"gold_patch": ""})
    exits = edit(record, calc__py="import os\nos._exit(0)\n")
    grade = await grade_patch(context, without_gold, exits)
    assert (grade.reward, grade.suspected_hack) == (0.0, ("the test run ended with exit code 0 and no results",))
    silent = without_gold.model_copy(update={"test_command": "echo no summary"})
    with pytest.raises(
        UndecidableError, match=r"no verdict .*control run without a change failed \(exit code 0: no summary\)"
    ):
        await grade_patch(context, silent, exits)


async def test_patch_that_does_not_apply_gets_no_reward(context: EnvContext, record: SweRecord) -> None:
    other = diff_files({"calc.py": "something else\n"}, {"calc.py": "changed\n"})
    assert (await grade_patch(context, record, other)).reward == 0.0


async def test_a_sandbox_that_cannot_start_is_an_exception(context: EnvContext, record: SweRecord) -> None:
    nowhere = dataclasses.replace(context, limits=SandboxSpec(image="/no/such/root"), start_retries=0)
    with pytest.raises(SandboxError):
        await grade_patch(nowhere, record, record.gold)


async def test_output_beyond_the_cap_does_not_hide_the_summary(context: EnvContext, record: SweRecord) -> None:
    loud = record.files["calc.py"].replace("a - b", "a + b") + "print('x' * 3_000_000)\n"
    assert (await grade_patch(context, record, edit(record, calc__py=loud))).resolved


async def test_tampering_is_rejected_and_recorded(context: EnvContext, record: SweRecord) -> None:
    forged = "def pytest_runtest_makereport(item, call): pass\n"
    runner = "print('= short test summary info =')\nprint('PASSED hidden/test_calc.py::test_add')\n"
    files = {"conftest.py": forged, "sitecustomize.py": runner, "hidden/runner.py": runner, "hidden": runner}
    grade = await grade_patch(context, record, diff_files({}, files))
    assert grade.reward == 0.0
    assert [suspicion.split(":")[0] for suspicion in grade.suspected_hack] == sorted(files)
    honest_too = await grade_patch(context, record, diff_files({}, files) + record.gold)
    assert honest_too.resolved
    assert len(honest_too.suspected_hack) == 4


async def test_an_episode_from_its_initial_prompt_to_its_grade(context: EnvContext, record: SweRecord) -> None:
    async with start_episode(context, record) as episode:
        assert [message["role"] for message in episode.messages] == ["system", "user"]
        assert "add(2, 3) gives -1." in episode.messages[1]["content"]
        assert await episode.patch() == ""
        names = {schema["function"]["name"] for schema in episode.tools.schemas()}
        assert {"execute_bash", "file_editor", "search", "finish"} <= names
        arguments = {"command": "str_replace", "path": "/testbed/calc.py", "old_str": "a - b", "new_str": "a + b"}
        result = await episode.tools.call(ToolCall("file_editor", arguments))
        assert not result.failed, result.text
        grade = await episode.grade()
    assert grade.resolved
    assert "+    return a + b" in grade.patch


async def test_the_agent_sees_neither_hidden_tests_nor_history(context: EnvContext, record: SweRecord) -> None:
    async with start_episode(context, record) as episode:
        found = await episode.sandbox.exec("find / -xdev -name '*test_calc*' 2>/dev/null; ls -A", timeout=10)
        assert found.text.split() == [".git", "README.md", "calc.py"]
        log = await episode.sandbox.exec("git log --all --format='%an %ad %s'; git status --short", timeout=10)
        assert log.text.strip() == "agent-rl Sat Jan 1 00:00:00 2000 +0000 Start of the task"


async def test_the_base_commit_is_the_same_in_every_sandbox(context: EnvContext, record: SweRecord) -> None:
    spec = sandbox_spec(context, record, None)
    async with agent_sandbox(context, record, spec) as (first, _), agent_sandbox(context, record, spec) as (second, _):
        hashes = [(await sandbox.exec("git rev-parse HEAD", timeout=10)).text.strip() for sandbox in (first, second)]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 40


@dataclass
class CountingSandbox:
    """A sandbox that counts the commands run in it."""

    sandbox: Sandbox
    commands: int = 0

    async def exec(self, *arguments: Any, **options: Any) -> ExecResult:
        self.commands += 1
        return await self.sandbox.exec(*arguments, **options)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        await self.sandbox.write_files(files)


STATE = "git rev-parse HEAD; git log --format='%an %ae %ad %s'; git status --short; git fsck --strict; git ls-files -s"


@pytest.mark.parametrize("limit", [1 << 20, 4096], ids=["kept", "too large to keep"])
async def test_a_repository_is_committed_once_and_is_the_same_in_every_sandbox(
    context: EnvContext, record: SweRecord, limit: int
) -> None:
    spec = replace(sandbox_spec(context, record, None), output_limit_bytes=limit)
    repositories = RepositoryCache()
    async with context.sandbox(spec) as first, context.sandbox(spec) as second, context.sandbox(spec) as alone:
        counted = [CountingSandbox(first), CountingSandbox(second)]
        await asyncio.gather(*(repositories.populate(sandbox, record.files) for sandbox in counted))  # type: ignore[arg-type]
        await RepositoryCache().populate(alone, record.files)
        seen = [(await sandbox.exec(STATE, timeout=10, cwd="/testbed")).text for sandbox in (first, second, alone)]
        assert seen[0] == seen[1] == seen[2]
        assert len(seen[0].split("\n")[0]) == 40, seen[0]
        assert sorted(sandbox.commands for sandbox in counted) == ([0, 2] if limit > 4096 else [1, 2])


async def test_other_files_get_another_repository(context: EnvContext, record: SweRecord) -> None:
    repositories = RepositoryCache(capacity=1)
    for files in (record.files, {**record.files, "more.py": "pass\n"}, record.files):
        async with context.sandbox(sandbox_spec(context, record, None)) as sandbox:
            await repositories.populate(sandbox, files)
            listed = await sandbox.exec("git ls-files; git status --short", timeout=10, cwd="/testbed")
            assert listed.text.split() == sorted(files)


async def test_files_that_take_too_long_to_read_are_an_error(
    context: EnvContext, record: SweRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them, a success would have no negative control."""
    monkeypatch.setattr("envs.swe.repositories.SETUP_TIMEOUT", 0.5)
    async with context.sandbox(sandbox_spec(context, record, None)) as sandbox:
        with pytest.raises(SandboxStartError, match="could not be read within"):
            await read_archive(sandbox, "sleep 9; tar -cf - .git")


async def test_patch_has_commits_new_files_and_deletions_but_no_build_artifacts(
    context: EnvContext, record: SweRecord
) -> None:
    script = """sed -i 's/a - b/a + b/' calc.py; git commit -qam 'mine'; mkdir -p 'new dir'; echo hi > 'new dir/é.txt'
    rm README.md; mkdir -p pkg/__pycache__ .pytest_cache; echo x > pkg/__pycache__/a.pyc; echo x > .pytest_cache/x
    head -c 300 /dev/urandom > data.bin; printf 'caf\\351\\n' > latin.txt; touch .git/index.lock"""
    async with start_episode(context, record) as episode:
        assert (await episode.sandbox.exec(script, timeout=10)).ok
        patch = await episode.patch()
        grade = await episode.grade()
    paths = {line.split(" b/")[1] for line in patch.splitlines() if line.startswith("diff --git")}
    assert paths == {"calc.py", "new dir/é.txt", "README.md", "data.bin", "latin.txt"}
    assert grade.resolved
    assert grade.suspected_hack == ("data.bin: binary change, undone", "latin.txt: binary change, undone")


async def test_fix_counts_without_its_git_directory(context: EnvContext, record: SweRecord) -> None:
    async with start_episode(context, record) as episode:
        assert (await episode.sandbox.exec("rm -rf .git; sed -i 's/a - b/a + b/' calc.py", timeout=10)).ok
        assert await episode.patch() == record.gold
        assert (await episode.grade()).resolved


async def test_working_directory_beyond_the_limits_gets_no_reward(context: EnvContext, record: SweRecord) -> None:
    async with start_episode(context, record) as episode:
        script = "for i in $(seq 80); do mkdir d; cd d; done"
        assert (await episode.sandbox.exec(script, timeout=10)).ok
        with pytest.raises(PatchError, match=r"no patch can be taken: .* more than 64 directories deep"):
            await episode.patch()
        grade = await episode.grade()
    assert grade.reward == 0.0
    assert "no patch can be taken" in grade.suspected_hack[0]


async def test_patch_beyond_the_size_limit_gets_no_reward(context: EnvContext, record: SweRecord) -> None:
    async with start_episode(context, record) as episode:
        await episode.sandbox.exec("seq 400000 > big.txt", timeout=10)
        assert (await episode.grade()).reward == 0.0


async def test_verification_marks_good_tasks_and_names_bad_ones(context: EnvContext, record: SweRecord) -> None:
    assert (await verify_record(context, record)).verified
    wrong_gold = record.model_copy(update={"gold_patch": edit(record, calc__py="def add(a, b): 0\n")})
    with pytest.raises(
        GradingError, match=r"its gold patch does not resolve it: hidden/test_calc\.py::test_add: FAILED"
    ):
        await verify_record(context, wrong_gold)
    too_easy = record.model_copy(update={"expected_output_json": '{"hidden/test_calc.py::test_double": "PASSED"}'})
    with pytest.raises(GradingError, match="resolved without a change"):
        await verify_record(context, too_easy)


async def test_site_packages_are_found_beside_the_tasks(context: EnvContext, record: SweRecord, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "helper.py").write_text("def check(value): assert value == 5\n")
    tests = {
        **record.tests,
        "hidden/test_calc.py": "import calc, helper\ndef test_add(): helper.check(calc.add(2, 3))\n",
    }
    with_packages = record.model_copy(
        update={
            "tests": tests,
            "site_packages": "site",
            "expected_output_json": '{"hidden/test_calc.py::test_add": "PASSED"}',
        }
    )
    write_jsonl(tmp_path / "tasks.jsonl", [with_packages])
    environment = SweEnvironment(context, tmp_path / "tasks.jsonl")
    (task,) = environment.tasks("heldout")
    async with environment.start(task) as episode:
        assert (await episode.sandbox.exec("python3 -c 'import helper'", timeout=10)).ok
        assert (await episode.grade()).reward == 0.0
    assert (await grade_patch(context, with_packages, environment.gold(task), site_root=tmp_path)).resolved
