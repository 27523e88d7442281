"""Episodes in containers: a local task, and a row whose repository, tests and history are in an image, as R2E-Gym's."""

from __future__ import annotations

import io
import json
import tarfile
import uuid
from collections.abc import AsyncIterator, Iterator

import docker
import pytest

from envs import EnvContext
from envs.swe import SweRecord, commit_content, grade_patch, start_episode, verify_record
from envs.swe.patches import diff_files
from sandbox import SandboxSpec, SandboxUnavailableError
from sandbox.docker import DEFAULT_IMAGE
from sandbox.select import open_backend

pytestmark = [pytest.mark.docker, pytest.mark.slow]

IMAGE = "agent-rl-test-r2e:1"
OLD = {"pkg/__init__.py": "", "pkg/m.py": "def half(a):\n    return a // 2\n"}
NEW = {**OLD, "pkg/m.py": "def half(a):\n    return a / 2\n"}
BUILD = """
set -e
mkdir -p /testbed/pkg /testbed/.venv/bin /r2e_tests /root
ln -s "$(command -v python3)" /testbed/.venv/bin/python
cd /testbed
touch pkg/__init__.py
printf 'def half(a):\\n    return a // 2\\n' > pkg/m.py
mv /t /r2e_tests/test_1.py
echo '.venv/bin/python -W ignore -m pytest -rA -p no:cacheprovider r2e_tests' > run_tests.sh
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a
git init -q . && git add pkg && git commit -qm old
sed -i 's:a // 2:a / 2:' pkg/m.py && git commit -qam 'the future fix' && git branch future && git reset -q --hard HEAD~1
"""
TESTS = """
import sys
sys.path.insert(0, "/testbed")
from pkg.m import half

def test_half(): assert half(3) == 1.5

class TestEven:
    def test_even(self): assert half(4) == 2
"""


@pytest.fixture
async def containers() -> AsyncIterator[EnvContext]:
    try:
        backend = open_backend("docker", run_id=f"test-{uuid.uuid4().hex[:8]}")
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    try:
        yield EnvContext(backend, limits=SandboxSpec(memory_mb=256), grade_timeout=60.0)
    finally:
        await backend.close()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An image laid out as R2E-Gym's: /testbed with its history, /r2e_tests, run_tests.sh."""
    try:
        client = docker.from_env(timeout=120)
        client.images.get(DEFAULT_IMAGE)
    except docker.errors.DockerException as error:
        pytest.skip(f"no container engine with the image {DEFAULT_IMAGE}: {error}")
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        recipe = f"FROM {DEFAULT_IMAGE}\nCOPY b t /\nRUN bash /b\n"
        for name, text in {"Dockerfile": recipe, "b": BUILD, "t": TESTS}.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    context.seek(0)
    client.images.build(fileobj=context, custom_context=True, tag=IMAGE, network_mode="none", rm=True)
    yield IMAGE
    client.images.remove(IMAGE, force=True)
    client.close()


@pytest.fixture
def row(image: str) -> SweRecord:
    return SweRecord(
        repo_name="pkg",
        docker_image=image,
        commit_hash="abc",
        parsed_commit_content=commit_content(OLD, NEW),
        expected_output_json=json.dumps({"test_half": "PASSED", "TestEven.test_even": "PASSED"}),
        problem_statement="[ISSUE]\nhalf(3) gives 1\n[/ISSUE]",
    )


async def test_a_local_task_in_containers(containers: EnvContext, record: SweRecord, image: str) -> None:
    assert (await verify_record(containers, record)).verified
    async with start_episode(containers, record) as episode:
        assert (await episode.sandbox.exec("sed -i 's/a - b/a + b/' calc.py", timeout=20)).ok
        assert (await episode.grade()).resolved


async def test_an_image_row_is_verified(containers: EnvContext, row: SweRecord) -> None:
    assert (await verify_record(containers, row)).verified


async def test_the_agent_of_an_image_row_sees_neither_tests_nor_future(containers: EnvContext, row: SweRecord) -> None:
    async with start_episode(containers, row) as episode:
        seen = await episode.sandbox.exec("ls -A / /root . ; git log --all --format=%s; which python", timeout=30)
        assert "r2e_tests" not in seen.text
        assert "run_tests.sh" not in seen.text
        assert "future" not in seen.text
        assert seen.text.endswith("Start of the task\n/testbed/.venv/bin/python\n")
        assert (await episode.sandbox.exec("sed -i 's:a // 2:a / 2:' pkg/m.py", timeout=20)).ok
        grade = await episode.grade()
    assert grade.resolved
    assert grade.tests == {"test_half": "PASSED", "TestEven.test_even": "PASSED"}


async def test_rewriting_the_tests_of_an_image_row_is_undone(containers: EnvContext, row: SweRecord) -> None:
    forged = {"r2e_tests/test_1.py": "def test_half(): pass\n", "run_tests.sh": "echo\n", "conftest.py": "\n"}
    grade = await grade_patch(containers, row, diff_files({}, forged))
    assert not grade.resolved
    assert len(grade.suspected_hack) == 3
