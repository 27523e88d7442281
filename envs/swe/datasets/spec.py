"""The grading fields of a SWE-bench-like row, and helpers of the families: they read fields of rows, and write eval
scripts (bash) for rows that only have a test command.

The field names are swebench 5's. The modules of the other families convert their rows to these fields.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from envs.swe.diff.git_diff import patched_paths, split_patch

Row = Mapping[str, Any]

Rules = Literal["swebench", "swe-rebench-v2", "swe-smith"]
"""The rules for a success: swebench's report decides; every expected test is PASSED ("swe-rebench-v2"); or no expected
test failed, where a test that is not in the log has not failed ("swe-smith")."""

PASSED = "PASSED"
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
"""swebench's markers around the tests' output."""

CONDA = ("source /opt/miniconda3/bin/activate", "conda activate testbed", "cd /testbed")
"""First lines of SWE-bench-like eval scripts: activate the image's environment and enter its repository."""

_DATA_SUFFIXES = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")


class SwebenchSpec(BaseModel):
    """The grading fields of a row under SWE-bench's names (``swebench.types.TestSpec``).

    ``eval_script``, ``log_parser`` and ``eval_type`` are empty in SWE-bench's original rows with twelve fields, which
    swebench 5 cannot grade. ``hidden_files`` are hidden tests in the image, for rows whose ``test_patch`` lacks them.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, coerce_numbers_to_str=True)

    image: str = ""
    eval_script: str = ""
    log_parser: str = ""
    eval_type: str = ""
    version: str = ""
    test_patch: str
    fail_to_pass: tuple[str, ...] = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: tuple[str, ...] = Field((), alias="PASS_TO_PASS")
    rules: Rules = "swebench"
    hidden_files: tuple[str, ...] = ()

    @field_validator("fail_to_pass", "pass_to_pass", mode="before")
    @classmethod
    def _list_or_json_list(cls, value: Any) -> Any:
        return parse_list(value)

    @property
    def missing(self) -> tuple[str, ...]:
        """The empty fields that grading requires."""
        return tuple(name for name in ("eval_script", "log_parser", "eval_type") if not getattr(self, name))

    @property
    def hidden(self) -> frozenset[str]:
        """The paths of the hidden tests."""
        return patched_paths(self.test_patch) | set(self.hidden_files)

    def instance(self, instance_id: str, repo: str) -> dict[str, Any]:
        """The row that ``swebench.harness.utils.make_test_spec`` reads."""
        return {"instance_id": instance_id, "repo": repo, **self.model_dump(by_alias=True)}


def as_record(row: Row, spec: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A record's fields from the SWE-bench fields that all families share, ``spec`` and ``fields``."""
    names = {"task_id": "instance_id", "repo_name": "repo", "commit_hash": "base_commit", "gold_patch": "patch"}
    record = {field: row[column] for field, column in names.items() if column in row}
    tests = [test for key in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in string_list(spec.get(key, ()))]
    return {
        **record,
        "problem_statement": row.get("problem_statement"),
        "expected_output_json": json.dumps(dict.fromkeys(tests, PASSED)),
        "swebench": spec,
        **fields,
    }


def grading(row: Row, script: str, parser: str = "parse_log_pytest", **fields: Any) -> dict[str, Any]:
    """The spec of a row whose hidden tests ``script`` runs."""
    named = pick_fields(row, "version", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
    return {**named, "eval_script": script, "log_parser": parser, "eval_type": "pass_and_fail", **fields}


def pick_fields(row: Row, *names: str) -> dict[str, Any]:
    """The fields of the row among ``names``."""
    return {name: row[name] for name in names if name in row}


def require(row: Row, family: str, *names: str) -> None:
    """Raise ``ValueError`` for the first field of ``names`` that is missing or empty in the row."""
    if missing := next((name for name in names if not row.get(name)), None):
        raise ValueError(f"{missing}: required in a row of {family}, and not given")


def image_of(row: Row, prefix: str, separator: str) -> Any:
    """The row's image, or the published one: ``prefix`` and the lower-case id with ``separator`` for ``__``."""
    published = f"{prefix}{str(row['instance_id']).lower().replace('__', separator)}:latest"
    return row.get("image") or row.get("docker_image") or row.get("image_name") or published


def parse_list(value: Any) -> Any:
    """Parse a JSON list; return any other value unchanged. Raises ``ValueError`` for broken JSON."""
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); right would be a list of strings") from None


def parse_object(value: Any, field: str) -> dict[str, Any]:
    """An object, or a JSON object. Raises ``ValueError`` that names ``field`` for any other value."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field}: not JSON ({error}); right would be an object") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{field}: a {type(parsed).__name__}; right would be an object")
    return {str(key): item for key, item in parsed.items() if item is not None}


def string_list(value: Any) -> list[str]:
    """The items of a list as strings. Empty for a broken list; the field's own validation reports it."""
    try:
        items = parse_list(value)
    except ValueError:
        return []
    return [str(item) for item in items] if isinstance(items, list | tuple) else []


def command_lines(value: Any, field: str) -> list[str]:
    """Nonblank commands from a string or a list of strings. Raises ``ValueError`` that names ``field`` otherwise."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{field}: right would be a command, or a list of commands")
    return [item for item in items if item.strip()]


def eval_script(setup: Iterable[str], tests: Iterable[str]) -> str:
    """A script that runs the ``setup`` lines and then the ``tests``, whose output is between swebench's markers."""
    lines = ["#!/bin/bash", "set -uxo pipefail", *setup, f": '{START}'", *tests, f": '{END}'"]
    return "\n".join(lines) + "\n"


def apply_test_patch(test_patch: str, base: str) -> list[str]:
    """Lines that reset the patched test files to the commit ``base`` and apply the test patch."""
    existing = [part.path for part in split_patch(test_patch) if not part.is_new]
    reset = [f"git checkout {shlex.quote(base)} -- {shlex.join(existing)}"] if base and existing else []
    return [*reset, *apply_patch(test_patch)]


def apply_patch(patch: str, options: str = "-v") -> list[str]:
    """Lines that apply a patch with ``git apply``."""
    end = f"EOF_{hashlib.sha256(patch.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return [f"git apply {options} - <<'{end}'", *patch.removesuffix("\n").split("\n"), end]


def test_files(test_patch: str) -> list[str]:
    """The test files to run: those that exist after the test patch, without data files."""
    parts = [part for part in split_patch(test_patch) if "\n+++ /dev/null\n" not in part.text]
    return [part.path for part in parts if not part.path.endswith(_DATA_SUFFIXES)]
