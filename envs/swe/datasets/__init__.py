"""Converts rows of known data sets, recognized by their fields, to the fields of a record.

Each family of data sets has a module; docs/reference/datasets.md lists its fields and grading rules. A row that no
family recognizes must have the fields of a record: R2E-Gym's, or those of a local task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envs.swe.datasets import nemo_gym, swe_gym, swe_rebench, swe_smith, swebench
from envs.swe.datasets.spec import Row

FAMILIES = (nemo_gym, swe_smith, swe_rebench, swe_gym, swebench)
"""The modules of the families; the first one that ``recognizes`` a row reads it. ``read`` returns a record's fields or
raises ``ValueError`` with the field, its problem and what would be right."""

_REQUIRED = ("problem_statement", "expected_output_json", "repo_name")


def normalize(row: Row) -> dict[str, Any]:
    """The row under a record's field names. Null fields are left out, so that they take their defaults.

    Raises ``ValueError`` for a row that its family cannot grade.
    """
    fields = {key: value for key, value in nemo_gym.unwrap(row).items() if value is not None or key in _REQUIRED}
    family = next((family for family in FAMILIES if family.recognizes(fields)), None)
    if family is not None:
        record: dict[str, Any] = family.read(fields)
        return record
    if "repo" in fields and "repo_name" not in fields:
        fields["repo_name"] = fields.pop("repo")
    return fields


def join_spec(row: Row, specs: Mapping[str, Row]) -> Row:
    """The row with the grading fields of the row with its ``instance_id`` in ``specs``.

    A row that has them, or has no counterpart, is returned unchanged. Raises ``ValueError`` if the counterpart starts
    from another commit.
    """
    spec = specs.get(str(row.get("instance_id")))
    if spec is None or has_grading_spec(row):
        return row
    for field in ("repo", "base_commit"):
        if row.get(field) != spec.get(field):
            raise ValueError(f"{field}: {row.get(field)!r}, and {spec.get(field)!r} in specs: not the same task")
    return {**row, **{key: spec[key] for key in swebench.JOINED if spec.get(key) is not None}}


def has_grading_spec(row: Row) -> bool:
    """Whether a SWE-bench-like row has its own grading fields."""
    return bool(row.get("eval_script") or row.get("install_config"))
