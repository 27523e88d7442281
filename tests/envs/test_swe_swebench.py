"""SWE-bench's rows, made of real package releases and graded by swebench 5 in containers."""

from __future__ import annotations

import io
import json
import tarfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import docker
import pytest

from envs import EnvContext, GradingError
from envs.swe import SweEnvironment, SweRecord, diff_files, grade_patch, read_jsonl
from envs.swe.swebench import as_log, read_log
from envs.swe.witness import NO_REPORT
from sandbox import SandboxSpec, SandboxUnavailableError
from sandbox.docker import DEFAULT_IMAGE
from sandbox.select import open_backend
from tests.envs.images import BUILT, GIT_WITH_A_FUTURE, folder_image, limits_with_pytest
from tests.envs.test_swe_sources import GRADABLE

pytest.importorskip("swebench")
TASKS = ("pathspec-0.12.1", "voluptuous-0.14.2")

EVAL = """#!/bin/bash
set -uxo pipefail
cd /testbed
git config --global --add safe.directory /testbed
git status
git checkout HEAD {tests}
git apply -v - <<'EOF_114329324912'
{test_patch}EOF_114329324912
: '>>>>> Start Test Output'
python3 -m pytest -rA -p no:cacheprovider {folder}
: '>>>>> End Test Output'
git checkout HEAD {tests}
"""


def row_of(record: SweRecord, image: str) -> dict[str, object]:
    """A real task as a row of SWE-bench's data set."""
    test_patch = diff_files({path: record.files.get(path, "") for path in record.tests}, dict(record.tests))
    before = json.loads(record.execution_result_content)["old_commit_statuses"]
    names = [test for test in record.expected if " " not in test]  # swebench cuts a test's name at its first space
    old_tests = " ".join(path for path in record.tests if path in record.files)
    folder = sorted(record.tests)[0].rpartition("/")[0]
    return {
        "repo": f"{record.repo_name}/{record.repo_name}",
        "instance_id": f"{record.repo_name}__{record.id}",
        "base_commit": "HEAD",
        "patch": record.gold,
        "test_patch": test_patch,
        "problem_statement": record.problem_statement,
        "hints_text": "",
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1",
        "FAIL_TO_PASS": json.dumps([test for test in names if before.get(test) != "PASSED"]),
        "PASS_TO_PASS": json.dumps([test for test in names if before.get(test) == "PASSED"]),
        "image": image,
        "eval_script": EVAL.format(tests=old_tests, test_patch=test_patch, folder=folder),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow]),
    ],
)
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rows(backend_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The rows' file; their images are there for as long as the tests run."""
    if not BUILT.is_file():
        pytest.skip("the real tasks are not built (make real-tasks)")
    records = {record.id: record for record in read_jsonl(BUILT)}
    folder = tmp_path_factory.mktemp("rows")
    with ExitStack() as images, (folder / "test.jsonl").open("w") as out:
        for name in TASKS:
            if backend_name == "docker":
                image = images.enter_context(container_image(records[name]))
            else:
                image = str(folder_image(folder / name, records[name].files, GIT_WITH_A_FUTURE))
            out.write(json.dumps(row_of(records[name], image)) + "\n")
        out.flush()
        yield folder / "test.jsonl"


@contextmanager
def container_image(record: SweRecord) -> Iterator[str]:
    """An image for docker."""
    try:
        client = docker.from_env(timeout=120)
        client.images.get(DEFAULT_IMAGE)
    except docker.errors.DockerException as error:
        pytest.skip(f"no container engine with the image {DEFAULT_IMAGE}: {error}")
    image = f"agent-rl-test-swebench-{record.id}:1"
    context = io.BytesIO()
    recipe = f"FROM {DEFAULT_IMAGE}\nCOPY testbed /testbed\nCOPY set-up /set-up\nRUN cd /testbed && bash /set-up\n"
    files = {
        "Dockerfile": recipe,
        "set-up": GIT_WITH_A_FUTURE,
        **{f"testbed/{path}": text for path, text in record.files.items()},
    }
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    context.seek(0)
    client.images.build(fileobj=context, custom_context=True, tag=image, network_mode="none", rm=True)
    yield image
    client.images.remove(image, force=True)
    client.close()


@pytest.fixture
async def boxes(backend_name: str) -> AsyncIterator[EnvContext]:
    """A context whose boxes have pytest: the container image brings it, a folder is lent that of the real tasks."""
    try:
        backend = open_backend(backend_name, run_id=f"test-{uuid.uuid4().hex[:8]}")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    limits = limits_with_pytest(1024) if backend_name == "bubblewrap" else SandboxSpec(memory_mb=1024)
    try:
        yield EnvContext(backend, limits=limits, grade_timeout=120.0)
    finally:
        await backend.close()


@pytest.mark.parametrize("number", range(len(TASKS)))
async def test_the_true_fix_resolves_and_no_fix_does_not(boxes: EnvContext, rows: Path, number: int) -> None:
    record = (read_jsonl(rows))[number]
    gold = await grade_patch(boxes, record, record.gold)
    assert (gold.reward, gold.suspected_hack) == (1.0, ())
    assert set(gold.tests) == set(record.expected)
    nothing = await grade_patch(boxes, record, "")
    assert (nothing.reward, nothing.suspected_hack) == (0.0, ())
    assert record.swebench is not None
    assert {test for test, status in nothing.tests.items() if status != "PASSED"} == set(record.swebench.fail_to_pass)


async def test_an_episode_shows_no_future_and_is_graded_in_another_box(boxes: EnvContext, rows: Path) -> None:
    environment = SweEnvironment(boxes, rows)
    task = environment.tasks("test")[0]
    record = read_jsonl(rows)[0]
    async with environment.start(task) as episode:
        seen = await episode.sandbox.exec("git log --all --format=%s; grep -rl unmatch.bin tests", timeout=30)
        assert seen.text == "Start of the task\n"
        applied = await episode.sandbox.exec("git apply -", timeout=30, stdin=record.gold.encode())
        assert applied.ok, applied.text
        assert (await episode.grade()).resolved


async def test_an_audit_shows_that_what_swebench_would_believe_is_screened_or_seen(
    boxes: EnvContext, rows: Path
) -> None:
    environment = SweEnvironment(boxes, rows)
    findings = {finding.check: finding for finding in await environment.audit(environment.tasks("test")[0])}
    assert all(finding.ok for finding in findings.values()), findings
    assert findings["hack: conftest"].detail == "no reward; conftest.py: test infrastructure, undone"
    assert "from_item_and_call: replaced" in findings["hack: patched pytest"].detail
    assert findings["hack: forged summary"].detail == NO_REPORT


async def test_a_script_whose_output_cannot_be_read_is_no_verdict_even_for_the_true_fix(
    boxes: EnvContext, rows: Path
) -> None:
    record = read_jsonl(rows)[1]
    assert record.swebench is not None
    mute = record.swebench.model_copy(update={"eval_script": "#!/bin/bash\npython3 --version\n"})
    with pytest.raises(GradingError, match=r"no verdict \(exit code 0: .*\), and it is the gold patch"):
        await grade_patch(boxes, record.model_copy(update={"swebench": mute}), record.gold)


LINES = ("PASSED test_r.py::test_a", "PASSED test_r.py::test_b", "SKIPPED test_r.py::test_c")


@pytest.fixture
def record() -> SweRecord:
    return SweRecord.model_validate(GRADABLE)


def test_a_log_is_read_by_swebenchs_rules(record: SweRecord) -> None:
    verdict = read_log(record, as_log(LINES))
    assert verdict is not None
    assert verdict.resolved  # a skipped test of PASS_TO_PASS counts as kept there
    failed = read_log(record, as_log(["FAILED test_r.py::test_a - boom", *LINES[1:]]))
    assert failed is not None
    assert (failed.resolved, failed.difference) == (False, "test_r.py::test_a: FAILED, expected PASSED")
    absent = read_log(record, as_log(LINES[1:]))
    assert absent is not None
    assert not absent.resolved


@pytest.mark.parametrize("log", ["", "\n".join(LINES), as_log(()), as_log([">>>>> Tests Errored", *LINES])])
def test_a_log_that_says_nothing_is_no_verdict(record: SweRecord, log: str) -> None:
    assert read_log(record, log) is None
