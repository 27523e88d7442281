"""A candidate for a task before it is tried out, and why one falls."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from envs.swe.diff.git_diff import diff_files, is_test_path
from envs.swe.records import SweRecord, commit_content

MAX_FILE_BYTES = 1 << 20
MAX_RECORD_BYTES = 24 << 20
"""What the text files of one task may have together."""
UNWRITTEN = "still to be written"
_OPTIONS = "-rA --no-fold-skipped --tb=no -q --color=no -p no:cacheprovider"


class Fallen(Exception):
    """A candidate becomes no task. ``reason`` is one of a few, so that they can be counted; ``detail`` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


@dataclass(frozen=True, slots=True)
class Change:
    """What a candidate is made of. ``files`` are what the agent finds, ``fixed`` the changed files after the fix (None:
    removed), ``hidden`` the hidden tests' files and ``run`` those of them that pytest is given.

    ``decoys`` are other wrong states of files of ``fixed``, which the tests must notice, too: else the fix is not
    unique. ``root`` is put on the import path. ``issue`` is given where it need not be written.
    """

    repo: str
    task_id: str
    files: Mapping[str, str]
    fixed: Mapping[str, str | None]
    hidden: Mapping[str, str]
    run: Sequence[str]
    commit: str = ""
    message: str = ""
    decoys: Sequence[Mapping[str, str]] = ()
    root: str = "."
    issue: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A record whose expected output is still to be measured, and whose issue is to be written unless it is given.

    ``message`` says what was changed; ``decoys`` are patches that must not resolve it.
    """

    record: SweRecord
    message: str = ""
    decoys: tuple[str, ...] = ()
    issue: str = ""


def draft(change: Change, site: str) -> Candidate:
    """The draft of a candidate whose tests import from the directory ``site``. Raises ``Fallen`` for one too large."""
    size = sum(map(len, change.files.values())) + sum(map(len, change.hidden.values()))
    if size > MAX_RECORD_BYTES:
        raise Fallen("repository too large", f"{size >> 20} MiB of text")
    before = {path: change.files[path] for path in change.fixed if path in change.files}
    after = {path: text for path, text in change.fixed.items() if text is not None}
    gold = diff_files(before, after)
    if not gold:
        raise Fallen("the fix changes nothing")
    record = SweRecord(
        repo_name=change.repo,
        task_id=change.task_id,
        commit_hash=change.commit,
        parsed_commit_content=commit_content(before, after, change.message),
        expected_output_json=json.dumps({UNWRITTEN: "PASSED"}),
        problem_statement=UNWRITTEN,
        modified_files=tuple(sorted(change.fixed)),
        relevant_files=tuple(sorted(change.fixed)),
        num_non_test_files=len(change.fixed),
        num_non_test_lines=sum(map(is_changed_line, gold.split("\n"))),
        files=dict(change.files),
        tests=dict(change.hidden),
        test_command=pytest_command(change.root, change.run),
        gold_patch=gold,
        site_packages=site,
    )
    decoys = tuple(diff_files({path: change.files[path] for path in decoy}, decoy) for decoy in change.decoys)
    return Candidate(record, change.message, decoys, change.issue)


def pytest_command(root: str, run: Sequence[str]) -> str:
    """Bash that runs the test files ``run`` with ``root`` on the import path."""
    return f'PYTHONPATH="{root}:$PYTHONPATH" python3 -m pytest {_OPTIONS} {shlex.join(run)}'


def import_root(files: Mapping[str, str]) -> str:
    """The directory to put on the import path: ``src`` with the top directory where there are packages in it."""
    return "src:." if any(path.startswith("src/") and path.endswith(".py") for path in files) else "."


def egg_info(files: Mapping[str, str], name: str, root: str, version: str = "0.0.0") -> dict[str, str]:
    """The metadata that an installation in place leaves beside the code, and that code asks for its version."""
    directory = "src/" if root.startswith("src") else ""
    path = f"{directory}{name.replace('-', '_')}.egg-info/PKG-INFO"
    return {} if path in files else {path: f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}


def is_changed_line(line: str) -> bool:
    """Whether a line of a diff adds or removes one of the file."""
    return line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))


def is_test_module(path: str) -> bool:
    """Whether pytest collects the file when it is given its path, and its name says that it holds tests."""
    name = PurePosixPath(path).name
    named = name.startswith("test_") or name.endswith(("_test.py", "_tests.py")) or name in ("tests.py", "test.py")
    return path.endswith(".py") and (named or (is_test_path(path) and name.startswith("test")))


def is_code(path: str) -> bool:
    """Whether the file is Python code that a task can be about: no test, no set-up, no documentation."""
    top = path.partition("/")[0]
    name = PurePosixPath(path).name
    if not path.endswith(".py") or is_test_path(path) or name in ("setup.py", "conftest.py", "noxfile.py"):
        return False
    return top not in ("doc", "docs", "example", "examples", "benchmarks", "scripts") and not top.startswith(".")


def as_text(data: bytes) -> str | None:
    """The text of a file, or None where a record can't carry it: binary, too large, or a pointer to LFS's store."""
    if len(data) > MAX_FILE_BYTES or b"\0" in data or is_lfs(data):
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def is_lfs(data: bytes) -> bool:
    """Whether a file is only a pointer to where Git LFS keeps its content."""
    return data.startswith(b"version https://git-lfs.github.com/spec/")
