"""The real tasks: how they are built, and that they hold."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from envs import EnvContext
from envs.swe import SweEnvironment, read_jsonl
from envs.swe.diff.git_diff import patched_paths
from envs.swe.task_synthesis.checkout import read_release
from sandbox import SandboxSpec
from scripts.build_release_tasks import RELEASES, Release, catalog_candidate, main

BUILT = Path(__file__).parents[2] / ".cache/tasks/real.jsonl"
BARE = """
from sandbox import ImageMissingError

class BareBackend:
    name = "bare"
    def __init__(self, *, run_id, images):
        pass
    async def start(self, spec):
        raise ImageMissingError("no image: get it with: a tool")
    async def close(self):
        pass
"""
"""A sandbox backend as of a container engine without images."""
DEMO = Release("demo", "1.0", "1.1", "src/demo", "tests", "tests/test_a.py::test_a", "It is wrong.", root="src")


def pack(path: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"demo/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def sdists(tmp_path: Path) -> Path:
    common = {"PKG-INFO": b"x", "demo.egg-info/SOURCES.txt": b"x", ".idea/w.xml": b"x", "setup.cfg": b"[x]\n"}
    pack(
        tmp_path / "demo-1.0.tar.gz",
        {**common, "src/demo/a.py": b"x = 1\r\n", "tests/test_a.py": b"old\n", "tests/blob": b"\xff\xfe"},
    )
    pack(
        tmp_path / "demo-1.1.tar.gz",
        {
            **common,
            "setup.cfg": b"[y]\n",
            "src/demo/a.py": b"x = 2\r\n",
            "src/demo/b.txt": b"new",
            "tests/test_a.py": b"n\n",
        },
    )
    return tmp_path


def test_missing_image_raises_before_any_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare_boxes.py").write_text(BARE)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--out", str(tmp_path / "tasks/real.jsonl"), "--backend", "bare_boxes:BareBackend"]) == 2
    assert capsys.readouterr().err == "error: no image: get it with: a tool, or with: make image\n"
    assert not (tmp_path / "tasks").exists()


def test_catalog_candidate_has_old_code_new_tests_and_the_code_diff(sdists: Path) -> None:
    record = catalog_candidate(
        DEMO, *(read_release(sdists / f"demo-{version}.tar.gz") for version in ("1.0", "1.1"))
    ).record
    assert record.files["tests/test_a.py"] == "old\n"
    assert record.tests == {"tests/test_a.py": "n\n"}
    assert patched_paths(record.gold) == {"src/demo/a.py", "src/demo/b.txt"}
    assert 'PYTHONPATH="src:$PYTHONPATH"' in record.test_command
    assert not record.verified


@pytest.mark.bubblewrap
def test_failed_download_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main(["--out", str(tmp_path / "real.jsonl"), "--backend", "bubblewrap"]) == 2
    assert capsys.readouterr().err.startswith("error: sqlparse-0.5.2: dependencies can't be installed: ERROR: ")


def test_the_releases_are_the_five_named() -> None:
    assert [release.task_id for release in RELEASES] == [
        "sqlparse-0.5.2",
        "packaging-24.1",
        "pathspec-0.12.1",
        "voluptuous-0.14.2",
        "parso-0.8.4",
    ]


@pytest.mark.slow
@pytest.mark.bubblewrap
@pytest.mark.skipif(not BUILT.is_file(), reason="the real tasks are not built (python -m scripts.build_release_tasks)")
@pytest.mark.parametrize("number", [*range(4), pytest.param(4, marks=pytest.mark.exhaustive)])
async def test_the_true_fix_made_in_the_agents_sandbox_resolves_a_real_task(context: EnvContext, number: int) -> None:
    roomy = dataclasses.replace(context, limits=SandboxSpec(memory_mb=1024), grade_timeout=200.0)
    record = read_jsonl(BUILT)[number]
    environment = SweEnvironment(roomy, BUILT)
    task = environment.tasks("heldout")[number]
    async with environment.start(task) as episode:
        assert (await episode.grade()).reward == 0.0
        applied = await episode.sandbox.exec("git apply -", timeout=30, stdin=environment.gold(task).encode())
        assert applied.ok, applied.text
        hidden = {path: text for path, text in record.tests.items() if record.files.get(path) != text}
        assert hidden
        for path in hidden:
            seen = await episode.sandbox.exec(["cat", path], timeout=10)
            assert seen.stdout.decode() != record.tests[path]
        grade = await episode.grade()
    assert grade.resolved
    assert grade.suspected_hack == ()
