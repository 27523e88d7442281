"""Task candidates before validation, and the error for a rejected candidate."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from envs.swe.diff.git_diff import diff_files, is_test_path
from envs.swe.diff.tree_diff import decode_text
from envs.swe.records import SweRecord

MAX_FILE_BYTES = 1 << 20
MAX_RECORD_BYTES = 24 << 20
"""Largest total size of the text files of one task."""
PLACEHOLDER = "still to be written"
_OPTIONS = "-rA --no-fold-skipped --tb=no -q --color=no -p no:cacheprovider"


class CandidateRejected(Exception):
    """The candidate is not a valid task. ``reason`` is a category for the report; ``detail`` has the specifics."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


@dataclass(frozen=True, slots=True)
class CodeChange:
    """The source of a candidate.

    ``files`` are the agent's initial files, ``fixed`` the changed files after the fix (None: removed), ``hidden`` the
    hidden tests' files and ``run`` what pytest runs: by default all test modules among them. ``decoys`` are other wrong
    versions of files in ``fixed``; the tests must fail with them too, otherwise the fix is not unique. ``root`` is
    added to the import path; by default it follows from the files. An empty ``issue`` is written later.
    """

    repo: str
    task_id: str
    files: Mapping[str, str]
    fixed: Mapping[str, str | None]
    hidden: Mapping[str, str]
    run: Sequence[str] = ()
    commit: str = ""
    message: str = ""
    decoys: Sequence[Mapping[str, str]] = ()
    root: str = ""
    issue: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A record without its expected output and, if ``issue`` is empty, without its issue.

    ``message`` describes the change; ``decoys`` are patches that must not resolve the task.
    """

    record: SweRecord
    message: str = ""
    decoys: tuple[str, ...] = ()
    issue: str = ""


def make_candidate(change: CodeChange, site_packages: str) -> Candidate:
    """A candidate whose tests import from ``site_packages``. Raises ``CandidateRejected`` for one that is too large."""
    size = sum(map(len, change.files.values())) + sum(map(len, change.hidden.values()))
    if size > MAX_RECORD_BYTES:
        raise CandidateRejected("repository too large", f"{size >> 20} MiB of text")
    run = change.run or sorted(filter(is_test_module, change.hidden))
    if not run:
        raise CandidateRejected("changes no test")
    before = {path: change.files[path] for path in change.fixed if path in change.files}
    after = {path: text for path, text in change.fixed.items() if text is not None}
    gold = diff_files(before, after)
    if not gold:
        raise CandidateRejected("the fix changes nothing")
    record = SweRecord(
        repo_name=change.repo,
        task_id=change.task_id,
        commit_hash=change.commit,
        expected_output_json=json.dumps({PLACEHOLDER: "PASSED"}),
        problem_statement=PLACEHOLDER,
        files=dict(change.files),
        tests=dict(change.hidden),
        test_command=pytest_command(change.root or import_root(change.files), run),
        gold_patch=gold,
        site_packages=site_packages,
    )
    decoys = tuple(diff_files({path: change.files[path] for path in decoy}, decoy) for decoy in change.decoys)
    return Candidate(record, change.message, decoys, change.issue)


def pytest_command(root: str, run: Sequence[str]) -> str:
    """Bash that runs the test files ``run`` with ``root`` on the import path."""
    return f'PYTHONPATH="{root}:$PYTHONPATH" python3 -m pytest {_OPTIONS} {shlex.join(run)}'


def import_root(files: Mapping[str, str]) -> str:
    """The import path of a repository: ``src`` and the top directory for a src layout, else the top directory."""
    return "src:." if any(path.startswith("src/") and path.endswith(".py") for path in files) else "."


def with_egg_info(files: Mapping[str, str], name: str, version: str = "0.0.0") -> dict[str, str]:
    """The files with the metadata of an editable installation, from which code reads its own version."""
    directory = "src/" if import_root(files).startswith("src") else ""
    path = f"{directory}{name.replace('-', '_')}.egg-info/PKG-INFO"
    return {path: f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", **files}


def is_changed_line(line: str) -> bool:
    """Whether a line of a diff adds or removes a line of the file."""
    return line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))


def is_test_module(path: str) -> bool:
    """Whether the file's name marks it as a test module that pytest can collect by path."""
    name = PurePosixPath(path).name
    if name.startswith("test"):
        return name.endswith(".py") and (is_test_path(path) or name in ("tests.py", "test.py"))
    return name.endswith(("_test.py", "_tests.py"))


def is_code(path: str) -> bool:
    """Whether the file is Python source code of the project: no test, set-up or documentation."""
    top = path.partition("/")[0]
    name = PurePosixPath(path).name
    if not path.endswith(".py") or is_test_path(path) or name in ("setup.py", "conftest.py", "noxfile.py"):
        return False
    return top not in ("doc", "docs", "example", "examples", "benchmarks", "scripts") and not top.startswith(".")


def record_text(data: bytes) -> str | None:
    """The text of a file, or None if a record cannot contain it: binary, too large, or a Git LFS pointer."""
    return None if len(data) > MAX_FILE_BYTES or is_lfs_pointer(data) else decode_text(data)


def is_lfs_pointer(data: bytes) -> bool:
    """Whether a file is a Git LFS pointer."""
    return data.startswith(b"version https://git-lfs.github.com/spec/")
