"""Rows of the data sets that tasks come from, recognised by their fields and brought into a record's shape.

Each family has a module; docs/datasets.md says which fields it reads and by which rules it is graded. A row that no
family recognizes has a record's own fields: R2E-Gym's, or those of a local task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envs.swe.datasets import gym, nemo, rebench, smith, swebench
from envs.swe.datasets.spec import Row


@dataclass(frozen=True, slots=True)
class Family:
    """A family of data sets. ``read`` gives a record's fields, or raises ``ValueError``: the field, what is wrong with
    it, and what would be right."""

    name: str
    recognizes: Callable[[Row], bool]
    read: Callable[[Row], dict[str, Any]]


FAMILIES = (
    Family("Nemotron", nemo.recognizes, nemo.read),
    Family("SWE-smith", smith.recognizes, smith.read),
    Family("SWE-rebench", rebench.recognizes, rebench.read),
    Family("SWE-Gym", gym.recognizes, gym.read),
    Family("SWE-bench", swebench.recognizes, swebench.read),
)
"""The first that recognizes a row reads it."""

_REQUIRED = ("problem_statement", "expected_output_json", "repo_name")


def normalize(row: Row) -> dict[str, Any]:
    """The row under a record's field names. Fields that are null are left out, so that they take their defaults.

    Raises ``ValueError`` for a row that its family cannot grade.
    """
    found = {key: value for key, value in nemo.unwrapped(row).items() if value is not None or key in _REQUIRED}
    family = next((family for family in FAMILIES if family.recognizes(found)), None)
    if family is not None:
        return family.read(found)
    if "repo" in found and "repo_name" not in found:
        found["repo_name"] = found.pop("repo")
    return found


def with_spec(row: Row, specs: Mapping[str, Row]) -> Row:
    """The row with what grades it from the row of its ``instance_id`` in ``specs``; as it is where it needs none or
    there is none. Raises ``ValueError`` where that row starts from another commit."""
    spec = specs.get(str(row.get("instance_id")))
    if spec is None or says_how(row):
        return row
    for field in ("repo", "base_commit"):
        if row.get(field) != spec.get(field):
            raise ValueError(f"{field}: {row.get(field)!r}, and {spec.get(field)!r} in specs: not the same task")
    return {**row, **{key: spec[key] for key in swebench.JOINED if spec.get(key) is not None}}


def says_how(row: Row) -> bool:
    """Whether a row of SWE-bench's kin says by itself how it is graded."""
    return bool(row.get("eval_script") or row.get("install_config"))
