"""Rows of the data sets that tasks come from, brought into the shape of a :class:`~envs.swe.records.SweRecord`.

R2E-Gym's rows (Lite, Subset, V1) have that shape. SWE-bench's rows come with the twelve fields of 2023, or with those
and what swebench 5 needs to grade them (``image``, ``eval_script``, ``log_parser``, ``eval_type``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from envs.swe.patches import patched_paths


class SwebenchSpec(BaseModel):
    """What a SWE-bench row says about its grading, under the row's own names (``swebench.types.TestSpec``).

    The first four are empty in a row of twelve fields, which swebench 5 cannot grade.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    image: str = ""
    eval_script: str = ""
    log_parser: str = ""
    eval_type: str = ""
    version: str = ""
    test_patch: str
    fail_to_pass: tuple[str, ...] = Field(alias="FAIL_TO_PASS", min_length=1)
    pass_to_pass: tuple[str, ...] = Field((), alias="PASS_TO_PASS")

    @field_validator("fail_to_pass", "pass_to_pass", mode="before")
    @classmethod
    def _list_or_json_list(cls, value: Any) -> Any:
        return parse_list(value)

    @property
    def missing(self) -> tuple[str, ...]:
        """The fields without which swebench cannot grade."""
        return tuple(name for name in ("eval_script", "log_parser", "eval_type") if not getattr(self, name))

    @property
    def hidden(self) -> frozenset[str]:
        """The paths of the hidden tests."""
        return patched_paths(self.test_patch)

    def instance(self, instance_id: str, repo: str) -> dict[str, Any]:
        """The row that ``swebench.harness.utils.make_test_spec`` reads."""
        return {"instance_id": instance_id, "repo": repo, **self.model_dump(by_alias=True)}


def normalise(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row under a record's field names. Fields that are null are left out, so that they take their defaults."""
    given = {key: value for key, value in row.items() if value is not None or key in _REQUIRED}
    if "instance_id" in given:
        return _from_swebench(given)
    if "repo" in given and "repo_name" not in given:
        given["repo_name"] = given.pop("repo")
    return given


def with_spec(row: Mapping[str, Any], specs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The row with what grades it from the row of its ``instance_id`` in ``specs``; as it is where it needs none or
    there is none. Raises ``ValueError`` where that row starts from another commit."""
    spec = specs.get(str(row.get("instance_id")))
    if spec is None or row.get("eval_script"):
        return row
    for field in ("repo", "base_commit"):
        if row.get(field) != spec.get(field):
            raise ValueError(f"{field}: {row.get(field)!r}, and {spec.get(field)!r} in specs: not the same task")
    return {**row, **{key: spec[key] for key in _SPEC_FIELDS if key in spec}}


_REQUIRED = ("problem_statement", "expected_output_json", "repo_name")


def _from_swebench(row: Mapping[str, Any]) -> dict[str, Any]:
    spec = {key: row[key] for key in _SPEC_FIELDS if key in row}
    names = {"task_id": "instance_id", "repo_name": "repo", "commit_hash": "base_commit", "gold_patch": "patch"}
    record = {field: row[column] for field, column in names.items() if column in row}
    record["problem_statement"] = row.get("problem_statement")
    # The name under which the harness publishes an instance's image.
    derived = f"swebench/sweb.eval.x86_64.{row['instance_id']}:latest".lower().replace("__", "_1776_")
    tests = [test for key in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in _strings(row.get(key, ()))]
    return {
        **record,
        "docker_image": row.get("image") or row.get("docker_image") or derived,
        "expected_output_json": json.dumps(dict.fromkeys(tests, "PASSED")),
        "swebench": spec,
    }


_SPEC_FIELDS = (
    "image",
    "eval_script",
    "log_parser",
    "eval_type",
    "version",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
)


def parse_list(value: Any) -> Any:
    """A list given as JSON, read; anything else as it is. Raises ``ValueError`` for broken JSON."""
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); right would be a list of strings") from None


def _strings(value: Any) -> list[str]:
    """The strings of a list, none where it is broken: the field itself is told about by its own check."""
    try:
        found = parse_list(value)
    except ValueError:
        return []
    return [str(item) for item in found] if isinstance(found, list | tuple) else []
