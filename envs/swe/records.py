"""The record of one software-engineering task: R2E-Gym's row, plus what a task without a container image needs.

R2E-Gym's fields (https://github.com/R2E-Gym/R2E-Gym) keep their names and types, so its rows are read as they are;
SWE-bench's are brought into this shape (:mod:`.rows`). Where rows come from: :mod:`.sources`. A
*local* task brings its repository along: ``files`` is what the working directory starts as, ``tests`` the hidden test
files, ``test_command`` what runs them (or ``calls`` the hidden tests that are nothing but calls), ``gold_patch`` the
true fix.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from envs.swe.calls import Call
from envs.swe.datasets import normalize
from envs.swe.datasets.spec import SwebenchSpec, parse_list
from envs.swe.diff.git_diff import diff_files, is_test_path
from envs.swe.pytest_log import KeyMode, cut_name, fold_names
from envs.types import TaskRecordError

STATUSES = frozenset({"PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"})
R2E_TEST_COMMAND = "bash run_tests.sh"
WORKDIR = "/testbed"
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
    """One task. Every field that the row lacks takes its default; keys that are not named here are ignored.

    ``expected_output_json`` is a JSON object from a test's key to its status after the true fix. The key is pytest's
    full node id for a local task, and the node id without its file, joined by dots, for an R2E-Gym row, where equal
    keys are one (:func:`.pytest_log.fold_names`).
    ``calls`` are hidden tests by their keys; where they are given, they are all that is run.
    ``site_packages`` is a directory of Python packages for the sandbox, relative to the file the record was read from.
    ``verified`` says that the gold patch was seen to resolve the task and an empty patch was seen not to.
    ``isolated`` names expected tests that a success is tried with once more, in a sandbox of their own (:mod:`.apart`).
    ``swebench`` is there in rows of SWE-bench's kind (:mod:`envs.swe.datasets`), which a script in the image grades;
    their expected output says PASSED of every test in FAIL_TO_PASS and PASS_TO_PASS.
    ``bug_patch`` is a git diff that breaks the image's healthy repository before anything else happens in a sandbox.
    ``workdir`` is where an image has its repository.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    repo_name: str
    docker_image: str = ""
    commit_hash: str = ""
    parsed_commit_content: str = ""
    execution_result_content: str = ""
    expected_output_json: str
    problem_statement: str = Field(min_length=1)
    prompt: str = ""
    modified_files: tuple[str, ...] = ()
    relevant_files: tuple[str, ...] = ()
    num_non_test_files: int = 0
    num_non_test_func_methods: int = 0
    num_non_test_lines: int = 0

    task_id: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    tests: dict[str, str] = Field(default_factory=dict)
    test_command: str = ""
    calls: dict[str, Call] = Field(default_factory=dict)
    gold_patch: str = ""
    site_packages: str = ""
    verified: bool = False
    isolated: tuple[str, ...] = ()
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
            raise ValueError("empty or no object: a task that expects nothing would resolve itself; name its tests")
        seen: dict[str, str] = {}
        for test, status in pairs:
            if not isinstance(status, str) or status not in STATUSES:
                raise ValueError(f"status {status!r} of {test!r} is none of {', '.join(sorted(STATUSES))}")
            if seen.setdefault(name := _uncoloured(test), status) != status:
                raise ValueError(f"test {name!r} is both {seen[name]} and {status}; one of them would be right")
        return value

    @field_validator("modified_files", "relevant_files", mode="before")
    @classmethod
    def _list_or_json_list(cls, value: Any) -> Any:
        return parse_list(value)

    @model_validator(mode="before")
    @classmethod
    def _from_any_row(cls, value: Any) -> Any:
        return normalize(value) if isinstance(value, Mapping) else value

    @field_validator("files", "tests")
    @classmethod
    def _paths_stay_inside(cls, value: dict[str, str]) -> dict[str, str]:
        for path in value:
            parts = PurePosixPath(path).parts
            if not _stays_below(path) or parts[0] == ".git":
                raise ValueError(f"path {path!r}: right would be a path relative to the working directory, inside it")
        return value

    @field_validator("site_packages")
    @classmethod
    def _site_stays_beside_the_file(cls, value: str) -> str:
        if value and not _stays_below(value):
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
            raise ValueError(f"{value!r}: right would be a directory of the repository's own at the image's top")
        return value

    @model_validator(mode="after")
    def _has_a_repository(self) -> SweRecord:
        if not self.files and not self.docker_image:
            raise ValueError("neither files nor docker_image: the task has no repository; give one of them")
        if self.files and not (self.test_command or self.calls):
            raise ValueError("test_command is empty: a task with files must say how its tests run, or give calls")
        if not self.expected:
            raise ValueError("expected_output_json: its keys name no test (R2E-Gym's empty key stands for a file)")
        if self.files and (self.bug_patch or self.workdir != WORKDIR):
            raise ValueError(f"bug_patch, workdir: are for images; a task with files starts as these, in {WORKDIR}")
        if self.isolated and not (self.files and self.runs_pytest):
            raise ValueError("isolated: right would be a task with files whose test_command runs pytest")
        if unknown := sorted(set(self.isolated) - set(self.expected)):
            raise ValueError(f"isolated: {unknown[0]!r} is none of the expected tests")
        return self

    @property
    def id(self) -> str:
        """``task_id``, or the repository and commit for a row that has none."""
        return self.task_id or f"{self.repo_name}@{self.commit_hash[:12]}"

    @property
    def is_local(self) -> bool:
        """Whether the record brings its repository along."""
        return bool(self.files)

    @property
    def hidden(self) -> frozenset[str]:
        """The paths of the hidden tests, as far as the record names them."""
        return self.swebench.hidden if self.swebench else frozenset(self.tests)

    @property
    def command(self) -> str:
        """What runs the hidden tests in the working directory."""
        return self.test_command or (SWEBENCH_TEST_COMMAND if self.swebench else R2E_TEST_COMMAND)

    @property
    def runs_pytest(self) -> bool:
        """Whether pytest runs the hidden tests, as far as the command tells; R2E-Gym's script is taken to (that of
        tornado runs unittest)."""
        if self.calls:
            return False
        script = self.swebench.eval_script if self.swebench else self.command
        return script == R2E_TEST_COMMAND or re.search(r"\b(pytest|py\.test)\b", script) is not None

    @property
    def key_mode(self) -> KeyMode:
        """What ``expected`` names tests by."""
        return "node" if self.is_local or self.swebench else "name"

    @property
    def expected(self) -> dict[str, str]:
        """The statuses that resolve the task, by test, colour codes removed; an R2E-Gym row's keys are cut and folded
        as R2E-Gym does it."""
        pairs = [(_uncoloured(key), value) for key, value in json.loads(self.expected_output_json).items()]
        return dict(pairs) if self.key_mode == "node" else fold_names((cut_name(key), value) for key, value in pairs)

    def alone(self) -> SweRecord:
        """The record that expects of the tests in ``isolated`` alone what this one expects of them."""
        expected = {test: status for test, status in self.expected.items() if test in self.isolated}
        return self.model_copy(update={"expected_output_json": json.dumps(expected)})

    @property
    def gold(self) -> str:
        """The true fix as a git diff; for an R2E-Gym row made from its commit, test files left out. May be empty.

        Raises ``TaskRecordError`` for a commit that is none."""
        try:
            return self.gold_patch or _gold_of_commit(self.parsed_commit_content)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TaskRecordError(
                f"task {self.id}: parsed_commit_content: no commit as R2E-Gym writes them "
                f"({type(error).__name__}: {error})"
            ) from None


def _stays_below(path: str) -> bool:
    """Whether ``path`` is relative, leads below where it starts as far as its text tells, and is one at all."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def _uncoloured(key: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", key)


def commit_content(old: Mapping[str, str], new: Mapping[str, str], message: str = "") -> str:
    """``parsed_commit_content`` for a commit that takes the files ``old`` to ``new`` (absent means no such file)."""
    diffs: list[dict[str, Any]] = []
    for path in sorted(set(old) | set(new)):
        if old.get(path) == new.get(path):
            continue
        diffs.append(
            {
                "header": {"file": {"path": path}, "misc_line": None},
                "index_line": None,
                "is_binary_file": False,
                "binary_line": None,
                "minus_file": {"path": f"a/{path}" if path in old else "/dev/null"},
                "plus_file": {"path": f"b/{path}" if path in new else "/dev/null"},
                "hunks": [],
                "old_file_content": old.get(path, ""),
                "new_file_content": new.get(path, ""),
            }
        )
    return json.dumps({"file_diffs": diffs, "commit_message": message, "metadata": {}})


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


def parse_record(row: Mapping[str, Any], where: str) -> SweRecord:
    """A record from a row. Raises ``TaskRecordError``: one line naming ``where``, the field and what would be right."""
    try:
        return SweRecord.model_validate(row)
    except ValidationError as error:
        raise TaskRecordError(f"{where}: {problems_of(error)[0]}") from None


def write_jsonl(path: Path | str, records: Iterable[SweRecord]) -> int:
    """Write the records, one a line, and return how many. A write that is killed leaves the old file as it was."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            for record in records:
                out.write(record.model_dump_json() + "\n")
                count += 1
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return count


def problems_of(error: ValidationError) -> list[str]:
    """What is wrong with a row: a line for each field, what would be right in it."""
    return [_explain(problem) for problem in error.errors(include_url=False)]


def _explain(problem: ErrorDetails) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{field}: required, and not given"
    message = problem["msg"].removeprefix("Value error, ")
    if not field:  # a fault of the whole row, which names its fields
        return message
    got = "" if problem["type"] == "value_error" else f", got {_short(problem['input'])}"
    return f"{field}: {message}{got}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
