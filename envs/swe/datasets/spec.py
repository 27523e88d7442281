"""What a row of a data set says about its grading, and how its fields are read.

The names are those of swebench 5, which grades SWE-bench's own rows; other data sets' rows are brought into the same
shape, each by the module of its family.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from envs.swe.diff.git_diff import patched_paths

Row = Mapping[str, Any]

Rules = Literal["swebench", "swe-rebench-v2", "swe-smith"]
"""By whose rules statuses make a success: swebench's report decides, or every expected test is PASSED, or no expected
test failed (one that is not in the log has not failed)."""

PASSED = "PASSED"


class SwebenchSpec(BaseModel):
    """What a row says about its grading, under SWE-bench's names (``swebench.types.TestSpec``).

    ``eval_script``, ``log_parser`` and ``eval_type`` are empty in a row of twelve fields, which swebench 5 cannot
    grade. ``hidden_files`` are the hidden tests where the image has them, and no ``test_patch`` brings them.
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
        """The fields without which the row cannot be graded."""
        return tuple(name for name in ("eval_script", "log_parser", "eval_type") if not getattr(self, name))

    @property
    def hidden(self) -> frozenset[str]:
        """The paths of the hidden tests."""
        return patched_paths(self.test_patch) | set(self.hidden_files)

    def instance(self, instance_id: str, repo: str) -> dict[str, Any]:
        """The row that ``swebench.harness.utils.make_test_spec`` reads."""
        return {"instance_id": instance_id, "repo": repo, **self.model_dump(by_alias=True)}


def as_record(row: Row, spec: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """The row under a record's field names: SWE-bench's names of what every family has, ``spec``, and ``fields``."""
    names = {"task_id": "instance_id", "repo_name": "repo", "commit_hash": "base_commit", "gold_patch": "patch"}
    record = {field: row[column] for field, column in names.items() if column in row}
    tests = [test for key in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in strings(spec.get(key, ()))]
    return {
        **record,
        "problem_statement": row.get("problem_statement"),
        "expected_output_json": json.dumps(dict.fromkeys(tests, PASSED)),
        "swebench": spec,
        **fields,
    }


def given(row: Row, *names: str) -> dict[str, Any]:
    """Those of the fields ``names`` that the row has."""
    return {name: row[name] for name in names if name in row}


def require(row: Row, family: str, *names: str) -> None:
    """Raise ``ValueError`` that names the first of the fields ``names`` which the row lacks or has empty."""
    if lacking := next((name for name in names if not row.get(name)), None):
        raise ValueError(f"{lacking}: required in a row of {family}, and not given")


def published_image(row: Row, prefix: str, separator: str) -> str:
    """The name under which a data set publishes an instance's image: ``prefix`` and the id in small letters, its
    double underscore replaced."""
    return f"{prefix}{str(row['instance_id']).lower().replace('__', separator)}:latest"


def parse_list(value: Any) -> Any:
    """A list given as JSON, read; anything else as it is. Raises ``ValueError`` for broken JSON."""
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); right would be a list of strings") from None


def parse_object(value: Any, field: str) -> dict[str, Any]:
    """An object, or one given as JSON. Raises ``ValueError`` that names ``field`` for anything else."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field}: not JSON ({error}); right would be an object") from None
    if not isinstance(found, dict):
        raise ValueError(f"{field}: a {type(found).__name__}; right would be an object")
    return {str(key): item for key, item in found.items() if item is not None}


def strings(value: Any) -> list[str]:
    """The strings of a list, none where it is broken: the field itself is told about by its own check."""
    try:
        found = parse_list(value)
    except ValueError:
        return []
    return [str(item) for item in found] if isinstance(found, list | tuple) else []


def lines(value: Any, field: str) -> list[str]:
    """Commands: a string, or a list of strings. Raises ``ValueError`` that names ``field`` for anything else."""
    items: Iterable[Any] = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else [None]
    found = list(items)
    if not all(isinstance(item, str) for item in found):
        raise ValueError(f"{field}: right would be a command, or a list of commands")
    return [item for item in found if item.strip()]
