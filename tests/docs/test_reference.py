"""The generated parts of docs/reference are what the code says now."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import gpu_status
from scripts.make_reference import COMMAND, REFERENCE, TABLES, page


@pytest.mark.parametrize("name", TABLES)
def test_the_page_is_what_the_script_writes(name: str) -> None:
    assert (REFERENCE / name).read_text() == page(name), f"docs/reference/{name} is out of date; run: {COMMAND}"


def test_a_feature_ran_on_a_gpu_if_all_of_its_checks_were_as_expected() -> None:
    head = "| check | what | found | expected | as expected |\n|---|---|---|---|---|\n"
    passed = gpu_status.passed_checks(
        [head + "| a | x | 1 | 1 | yes |\n| b | x | 1 |  |  |\n| b | y | 2 | 1 | **NO** |\n"]
    )
    entry = {"gpu": ["a"], "tests": ["t"]}
    assert gpu_status.status(entry, passed) == "run on a GPU"
    assert gpu_status.status(entry | {"gpu": ["a", "b"], "dry_run": ["c"]}, passed) == "dry-run, CPU"
    assert gpu_status.status({"gpu": ["c"]}, passed) == "not run"
    assert gpu_status.status({"fakes": ["t"]}, passed) == "fakes only"


def test_the_page_says_that_nothing_ran_until_a_table_of_a_gpu_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Tables of gpu_run.py\n")
    assert "Nothing was run" in gpu_status.summary(gpu_status.records(tmp_path))
    (tmp_path / "run.md").write_text("1 x NVIDIA H100, torch 2.13.0\n\n| check |\n")
    assert gpu_status.summary(gpu_status.records(tmp_path)).endswith(": 1 x NVIDIA H100, torch 2.13.0.")
    (tmp_path / "run.md").write_text("1 x CPU, torch 2.13.0\n\n| check |\n")
    with pytest.raises(ValueError, match="records no run on a GPU"):
        gpu_status.records(tmp_path)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"tests": ["docs/test_reference.py::test_of_nothing"]}, "tests/docs/test_reference.py has no test_of_nothing"),
        ({"dry_run": ["nothing"]}, "has no dry run of nothing"),
    ],
)
def test_a_feature_whose_evidence_does_not_exist_is_refused(entry: dict[str, list[str]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        list(gpu_status.evidence(entry))
