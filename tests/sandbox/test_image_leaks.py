"""Images that name hidden tests: pytest's cache is removed before the agent starts, and the audit finds other files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.contexts import context_of

from envs.swe import SweRecord
from envs.swe.sandboxes import agent_sandbox, sandbox_spec
from envs.swe.task_audit import audit_record
from sandbox import ImagePolicy, SandboxSpec
from tests.envs.images import SYSTEM, directory_image
from tests.redteam.attack import report_stopped

pytestmark = [pytest.mark.bubblewrap, pytest.mark.redteam]
LEAKS = """
git init -q . && git add -A && GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a \
    git commit -qm base
mkdir -p .pytest_cache/v/cache sub/.pytest_cache r2e_tests
echo 'def test_secret(): assert f() == 2' > r2e_tests/test_1.py
echo '["r2e_tests/test_1.py::test_secret"]' | tee .pytest_cache/v/cache/nodeids > sub/.pytest_cache/nodeids
"""


def record_of(image: Path) -> SweRecord:
    return SweRecord(
        repo_name="leaky",
        docker_image=str(image),
        expected_output_json='{"test_secret": "PASSED", "test_shown": "PASSED"}',
        problem_statement="x",
    )


@pytest.mark.parametrize("left", ["", "echo 'PASSED r2e_tests/test_1.py::test_secret' > build.log"])
async def test_files_that_name_hidden_tests_are_removed_or_found(
    tmp_path: Path, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envs.swe.task_audit.reward_hacks", lambda *arguments: [])
    shown = {"code.py": "def f(): return 1\n", "doc.txt": "run t.py::test_shown\n"}
    image = directory_image(tmp_path / "images/leaky", shown, LEAKS + left)
    limits = SandboxSpec(ro_binds=SYSTEM)
    async with context_of("bubblewrap", limits, images=ImagePolicy(root=tmp_path / "images")) as context:
        record = record_of(image)
        async with agent_sandbox(context, record, sandbox_spec(context, record, None)) as (sandbox, _):
            found = await sandbox.exec("find . -name .pytest_cache; cat doc.txt", timeout=20)
            assert found.stdout == b"run t.py::test_shown\n"
        finding = (await audit_record(context, record))[1]
    assert finding.check == "hidden tests"
    assert finding.ok is (not left), finding
    assert ("/testbed/build.log names hidden tests" in finding.detail) is bool(left)
    report_stopped("reading the names of hidden tests in an image", finding.detail)
