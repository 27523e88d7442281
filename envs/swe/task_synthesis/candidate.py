"""Task candidates before validation, and the error for a rejected candidate."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envs.swe.diff.git_diff import diff_files
from envs.swe.records import SweRecord
from envs.swe.task_synthesis.files import import_root, is_test_module

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


def is_changed_line(line: str) -> bool:
    """Whether a line of a diff adds or removes a line of the file."""
    return line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))
