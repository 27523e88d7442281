"""The record of one software-engineering task: R2E-Gym's row plus the fields of a task without a container image.

The fields of R2E-Gym (https://github.com/R2E-Gym/R2E-Gym) that grading reads keep their names and types.
:mod:`envs.swe.datasets` converts the rows of other data sets; :mod:`envs.swe.sources` reads the rows. A *local* task
contains its repository: ``files`` are the initial files of the working directory, ``tests`` the hidden test files,
``test_command`` the command that runs them (or ``calls`` the hidden tests that are single calls), ``gold_patch`` the
reference fix.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from envs.swe.calls import Call
from envs.swe.datasets import normalize
from envs.swe.datasets.spec import SwebenchSpec
from envs.swe.diff.git_diff import diff_files, is_test_path
from envs.swe.pytest_log import KeyMode, merge_by_name, parse_summary, r2e_test_name, strip_ansi, truncate_name
from envs.types import TaskRecordError

STATUSES = frozenset({"PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"})
R2E_TEST_COMMAND = "bash run_tests.sh"
WORKDIR = "/testbed"
Verifiability = Literal["", "no", "weak", "yes"]
SYSTEM_DIRS = frozenset(
    {
        *("bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32"),
        *("media", "mnt", "opt", "proc", "root", "run", "sbin", "srv", "sys", "tmp", "usr", "var"),
    }
)
_DIRECTORY = re.compile(r"(?!\.)[A-Za-z0-9._-]+")
SWEBENCH_SCRIPT = "/tmp/agent-rl-eval.sh"
SWEBENCH_TEST_COMMAND = f"bash {SWEBENCH_SCRIPT}"


class SweRecord(BaseModel):
    """One task. Missing fields take their defaults; unknown keys are ignored.

    - ``expected_output_json``: a JSON object from a test's key to its status after the reference fix. The key is
      pytest's full node id for a local task. For an R2E-Gym row it is the node id without its file, joined by dots;
      equal keys are merged (:func:`envs.swe.pytest_log.merge_by_name`).
    - ``calls``: hidden tests by key. If there are any, only they run.
    - ``site_packages``: a directory of Python packages for the sandbox, relative to the record's file.
    - ``verified``: a run confirmed that the gold patch resolves the task and the empty patch does not.
    - ``verifiable``: whether the negative control can verify a success; "weak" if only truth values of the tests that
      fail before the fix are asserted, empty if it is unknown. Tests that are calls need no negative control.
    - ``swebench``: the grading of SWE-bench-like rows (:mod:`envs.swe.datasets`), which a script in the image runs.
      Their expected output has PASSED for every test in FAIL_TO_PASS and PASS_TO_PASS.
    - ``bug_patch``: a git diff that breaks the image's correct repository at the start of each sandbox.
    - ``workdir``: the directory of the repository in the image.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    repo_name: str
    docker_image: str = ""
    commit_hash: str = ""
    parsed_commit_content: str = ""
    execution_result_content: str = ""
    expected_output_json: str
    problem_statement: str = Field(min_length=1)

    task_id: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    tests: dict[str, str] = Field(default_factory=dict)
    test_command: str = ""
    calls: dict[str, Call] = Field(default_factory=dict)
    gold_patch: str = ""
    site_packages: str = ""
    verified: bool = False
    verifiable: Verifiability = ""
    swebench: SwebenchSpec | None = None
    bug_patch: str = ""
    workdir: str = WORKDIR

    @field_validator("expected_output_json")
    @classmethod
    def _expected_is_not_empty(cls, value: str) -> str:
        try:
            pairs = json.loads(value, object_pairs_hook=tuple)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error}); right would be an object from a test to its status") from None
        if not pairs or not isinstance(pairs, tuple):
            raise ValueError(
                "empty or no object: a task without expected tests would always be resolved; name its tests"
            )
        statuses: dict[str, str] = {}
        for test, status in pairs:
            if not isinstance(status, str) or status not in STATUSES:
                raise ValueError(f"status {status!r} of {test!r} is none of {', '.join(sorted(STATUSES))}")
            if statuses.setdefault(name := strip_ansi(test), status) != status:
                raise ValueError(f"test {name!r} is both {statuses[name]} and {status}; one of them would be right")
        return value

    @model_validator(mode="before")
    @classmethod
    def _convert_row(cls, value: Any) -> Any:
        row = normalize(value) if isinstance(value, Mapping) else value
        return {"verifiable": "yes", **row} if isinstance(row, dict) and row.get("calls") else row

    @field_validator("files", "tests")
    @classmethod
    def _paths_are_inside_workdir(cls, value: dict[str, str]) -> dict[str, str]:
        for path in value:
            parts = PurePosixPath(path).parts
            if not _is_relative_inside(path) or parts[0] == ".git":
                raise ValueError(f"path {path!r}: right would be a path relative to the working directory, inside it")
        return value

    @field_validator("site_packages")
    @classmethod
    def _site_packages_is_below_file(cls, value: str) -> str:
        if value and not _is_relative_inside(value):
            raise ValueError(f"{value!r}: right would be a directory relative to that of the task file, below it")
        return value

    @field_validator("repo_name", "commit_hash", "task_id", "docker_image")
    @classmethod
    def _names_are_printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError(f"{value!r}: right would be a name without control characters")
        return value

    @field_validator("workdir")
    @classmethod
    def _workdir_is_no_system_dir(cls, value: str) -> str:
        name = value.removeprefix("/")
        if value != f"/{name}" or not _DIRECTORY.fullmatch(name) or name in SYSTEM_DIRS:
            raise ValueError(
                f"{value!r}: right would be a top-level directory of the image that only holds the repository"
            )
        return value

    @model_validator(mode="after")
    def _has_a_repository(self) -> SweRecord:
        if not self.files and not self.docker_image:
            raise ValueError("neither files nor docker_image: the task has no repository; give one of them")
        if self.files and not (self.test_command or self.calls):
            raise ValueError("test_command is empty: a task with files needs a test_command or calls")
        if not self.expected:
            raise ValueError("expected_output_json: its keys name no test (R2E-Gym's empty key stands for a file)")
        if self.files and (self.bug_patch or self.workdir != WORKDIR):
            raise ValueError(
                f"bug_patch, workdir: only for images; a task with files starts from its files in {WORKDIR}"
            )
        return self

    @property
    def id(self) -> str:
        """``task_id``, or the repository and commit of a row without one."""
        return self.task_id or f"{self.repo_name}@{self.commit_hash[:12]}"

    @property
    def is_local(self) -> bool:
        """Whether the record contains its repository."""
        return bool(self.files)

    @property
    def hidden(self) -> frozenset[str]:
        """The paths of the hidden tests that the record names."""
        return self.swebench.hidden if self.swebench else frozenset(self.tests)

    @property
    def command(self) -> str:
        """The command that runs the hidden tests in the working directory."""
        return self.test_command or (SWEBENCH_TEST_COMMAND if self.swebench else R2E_TEST_COMMAND)

    @property
    def key_mode(self) -> KeyMode:
        """The kind of the keys of ``expected``."""
        return "node" if self.is_local or self.swebench else "name"

    @property
    def expected(self) -> dict[str, str]:
        """The statuses that resolve the task, by test, without color codes.

        The keys of an R2E-Gym row are truncated and merged as R2E-Gym does it.
        """
        expected = {strip_ansi(key): value for key, value in json.loads(self.expected_output_json).items()}
        if self.key_mode == "node":
            return expected
        return merge_by_name((truncate_name(key), status) for key, status in expected.items())

    @property
    def failing(self) -> frozenset[str]:
        """The expected tests that fail before the fix, as far as the record names them."""
        if self.swebench:
            return frozenset(self.swebench.fail_to_pass)
        try:
            run = json.loads(self.execution_result_content or "{}")
            before = run.get("old_commit_statuses") or parse_summary(run.get("old_commit_res_stdout") or "") or {}
        except (ValueError, TypeError, AttributeError, RecursionError):
            return frozenset()
        if self.key_mode == "name":
            before = merge_by_name((r2e_test_name(node), status) for node, status in before.items())
        return frozenset(test for test in self.expected if before.get(test) != "PASSED") if before else frozenset()

    @property
    def gold(self) -> str:
        """The reference fix as a git diff, possibly empty. For an R2E-Gym row it is made from the commit without tests.

        Raises ``TaskRecordError`` if ``parsed_commit_content`` does not have R2E-Gym's format.
        """
        try:
            return self.gold_patch or _gold_of_commit(self.parsed_commit_content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TaskRecordError(
                f"task {self.id}: parsed_commit_content: not a commit in R2E-Gym's format "
                f"({type(error).__name__}: {error})"
            ) from None


def _is_relative_inside(path: str) -> bool:
    """Whether ``path`` is a nonempty relative path without ``..`` and null bytes."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def _gold_of_commit(content: str) -> str:
    if not content:
        return ""
    old: dict[str, str] = {}
    new: dict[str, str] = {}
    for diff in json.loads(content).get("file_diffs", []):
        path = diff["header"]["file"]["path"]
        if diff.get("is_binary_file") or is_test_path(path):
            continue
        if (diff.get("minus_file") or {}).get("path") != "/dev/null":
            old[path] = diff.get("old_file_content", "")
        if (diff.get("plus_file") or {}).get("path") != "/dev/null":
            new[path] = diff.get("new_file_content", "")
    return diff_files(old, new)


def parse_record(row: Mapping[str, Any], source: str) -> SweRecord:
    """A record from a row. Raises ``TaskRecordError``: one line with ``source``, the field and what would be right."""
    try:
        return SweRecord.model_validate(row)
    except ValidationError as error:
        raise TaskRecordError(f"{source}: {validation_problems(error)[0]}") from None


def write_jsonl(path: Path | str, records: Iterable[SweRecord]) -> int:
    """Write the records, one per line, and return their number. A killed write leaves the old file unchanged."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        with open(Path(directory, "new"), "w", encoding="utf-8") as out:
            count = sum(1 for record in records if out.write(record.model_dump_json() + "\n"))
            out.flush()
            os.fsync(out.fileno())
        os.replace(out.name, path)
    return count


def validation_problems(error: ValidationError) -> list[str]:
    """The problems of a row: one line per field with the value that would be right."""
    return [_explain(problem) for problem in error.errors(include_url=False)]


def _explain(problem: ErrorDetails) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{field}: required, and not given"
    message = problem["msg"].removeprefix("Value error, ")
    if not field:  # a problem of the whole row: the message names its fields
        return message
    value = "" if problem["type"] == "value_error" else f", got {_short(problem['input'])}"
    return f"{field}: {message}{value}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
