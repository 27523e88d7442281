"""The audit finds what a cheating agent would: the future in git, the hidden tests, a grader that falls for a hack."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs import Auditable, EnvContext
from envs.mini import MiniEnvironment
from envs.swe import SweEnvironment, SweRecord, write_jsonl
from envs.swe.task_audit import audit_record

pytestmark = pytest.mark.bubblewrap


async def test_valid_task_has_only_good_findings(context: EnvContext, record: SweRecord, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "tasks.jsonl", [record])
    environment = SweEnvironment(context, tmp_path / "tasks.jsonl")
    assert isinstance(environment, Auditable)
    (task,) = environment.tasks("train")
    findings = await environment.audit(task)
    assert [finding.check for finding in findings] == [
        "history",
        "hidden tests",
        "mutants",
        "hack: conftest",
        "hack: patched pytest",
        "hack: forged summary",
    ]
    assert all(finding.ok for finding in findings), findings


async def test_a_generated_task_is_audited_too(context: EnvContext, tmp_path: Path) -> None:
    environment = MiniEnvironment(context, train_tasks=1, heldout_tasks=1, cache_dir=tmp_path)
    await environment.prepare("train")
    (task,) = environment.tasks("train")
    findings = await environment.audit(task)
    assert isinstance(environment, Auditable)
    assert len(findings) == 6
    assert all(finding.ok for finding in findings), findings


async def test_a_hidden_test_left_in_the_repository_is_found(context: EnvContext, record: SweRecord) -> None:
    leaky = record.model_copy(update={"files": {**record.files, "notes/copy.txt": record.tests["hidden/test_calc.py"]}})
    found = {finding.check: finding for finding in await audit_record(context, leaky)}
    assert not found["hidden tests"].ok
    assert "/testbed/notes/copy.txt" in found["hidden tests"].detail


async def test_a_future_in_git_is_found(
    context: EnvContext, record: SweRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set-up that forgot its hygiene: a later commit that only the reflog and the object store still know."""
    from envs.swe import repositories

    future = "git commit -q --allow-empty -m 'the fix' && git tag v2 && git reset -q --hard HEAD~1"
    monkeypatch.setattr(repositories, "_COMMIT", f"{repositories._COMMIT}\n{future}")
    history = (await audit_record(context, record))[0]
    assert not history.ok
    assert "commits: 2" in history.detail
    assert "refs: refs/tags/v2" in history.detail
