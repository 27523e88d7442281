"""Reading pytest's summary, and the verdict drawn from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.swe.pytest_log import judge_pytest_log, parse_summary, r2e_test_name, worst_status
from envs.swe.records import STATUSES, SweRecord

HEADER = "=========================== short test summary info ============================"
FOOTER = "========================= 1 failed, 2 passed in 0.03s ========================="


def log_of(*lines: str, before: str = "", footer: str = FOOTER) -> str:
    return "\n".join([before, HEADER, *lines, footer, ""])


def test_every_status_is_read_with_its_full_node_id() -> None:
    log = log_of(
        "PASSED tests/test_a.py::TestX::test_one",
        "SKIPPED [2] tests/test_a.py:9: needs a network",
        "SKIPPED tests/test_a.py::test_unfolded - why",
        "XFAIL tests/test_a.py::test_known - reason - with a dash",
        "XPASS tests/test_a.py::test_surprise ",
        "FAILED tests/test_a.py::test_two - AssertionError: assert [1] == [2]",
        "ERROR tests/test_b.py - SyntaxError: invalid syntax",
    )
    assert parse_summary(log) == {
        "tests/test_a.py::TestX::test_one": "PASSED",
        "tests/test_a.py::test_unfolded": "SKIPPED",
        "tests/test_a.py::test_known": "XFAIL",
        "tests/test_a.py::test_surprise": "XPASS",
        "tests/test_a.py::test_two": "FAILED",
        "tests/test_b.py": "ERROR",
    }


@pytest.mark.parametrize(
    ("line", "node"),
    [
        ("FAILED t.py::t[a b] - x", "t.py::t[a b]"),
        ("FAILED t.py::t[a - b] - msg [x] - y", "t.py::t[a - b]"),
        ("FAILED t.py::t - assert [1]", "t.py::t"),
        ("PASSED t.py::t[{} += 1]", "t.py::t[{} += 1]"),
        ("PASSED t.py::t[a - b]", "t.py::t[a - b]"),
        ("FAILED t.py::t[::x - ]]", "t.py::t[::x - ]]"),
    ],
)
def test_ids_with_spaces_brackets_and_dashes(line: str, node: str) -> None:
    assert list(parse_summary(log_of(line)) or {}) == [node]


def test_expected_ids_decide_where_an_ambiguous_id_ends() -> None:
    line = "FAILED t.py::t[a] - b] - message"
    assert parse_summary(log_of(line)) == {"t.py::t[a]": "FAILED"}
    assert parse_summary(log_of(line), {"t.py::t[a] - b]"}) == {"t.py::t[a] - b]": "FAILED"}


def test_log_without_summary_has_no_verdict() -> None:
    assert parse_summary("PASSED tests/test_a.py::test_one\n1 passed") is None
    assert judge_pytest_log("Killed", {"t.py::t": "PASSED"}) is None
    assert (
        judge_pytest_log("the words short test summary info in a sentence\nPASSED t.py::t", {"t.py::t": "PASSED"})
        is None
    )


def test_colors_are_removed() -> None:
    log = f"\x1b[36m\x1b[1m{HEADER}\x1b[0m\n\x1b[32mPASSED\x1b[0m t.py::\x1b[1mtest_a\x1b[0m\n"
    assert parse_summary(log) == {"t.py::test_a": "PASSED"}


def test_forged_summary_cannot_improve_a_status() -> None:
    forged = log_of("PASSED t.py::test_a", footer="=== 1 passed in 0.01s ===")
    real = log_of("FAILED t.py::test_a - assert 0")
    for log in (forged + real, real + forged):
        verdict = judge_pytest_log(log, {"t.py::test_a": "PASSED"})
        assert verdict is not None
        assert not verdict.resolved


def test_a_test_that_passes_and_errs_in_teardown_is_an_error() -> None:
    assert parse_summary(log_of("PASSED t.py::a", "ERROR t.py::a - at teardown")) == {"t.py::a": "ERROR"}


def test_resolved_needs_every_expected_status_and_ignores_other_tests() -> None:
    expected = {"t.py::a": "PASSED", "t.py::b": "FAILED"}
    good = judge_pytest_log(log_of("PASSED t.py::a", "FAILED t.py::b - x", "FAILED t.py::new - y"), expected)
    assert good is not None
    assert good.resolved
    absent = judge_pytest_log(log_of("PASSED t.py::a"), expected)
    assert absent is not None
    assert not absent.resolved
    assert absent.difference == "t.py::b: absent, expected FAILED"
    other = judge_pytest_log(log_of("PASSED t.py::a", "PASSED t.py::b"), expected)
    assert other is not None
    assert not other.resolved


def test_a_collection_error_is_a_verdict_and_not_resolved() -> None:
    verdict = judge_pytest_log(log_of("ERROR t.py - SyntaxError: invalid syntax"), {"t.py::a": "PASSED"})
    assert verdict is not None
    assert not verdict.resolved


def test_r2e_keys_drop_the_file() -> None:
    assert r2e_test_name("r2e_tests/test_1.py::TestX::test_a[1]") == "TestX.test_a[1]"
    verdict = judge_pytest_log(log_of("PASSED r2e_tests/test_1.py::TestX::test_a"), {"TestX.test_a": "PASSED"}, "name")
    assert verdict is not None
    assert verdict.resolved


def test_r2e_keys_that_collide_count_as_their_worst() -> None:
    equal = log_of("PASSED r2e_tests/test_1.py::test_a", "PASSED r2e_tests/test_2.py::test_a")
    assert resolves(equal, {"test_a": "PASSED"})
    lines = ("PASSED r2e_tests/test_1.py::test_a", "FAILED r2e_tests/test_2.py::test_a - x", "PASSED a.py::test_b")
    assert not resolves(log_of(*lines), {"test_a": "PASSED"})
    assert resolves(log_of(*lines), {"test_a": "FAILED", "test_b": "PASSED"})
    assert resolves(log_of(*reversed(lines)), {"test_a": "FAILED", "test_b": "PASSED"})


# What R2E-Gym's own parser and comparison make of these logs resolves with each of these expectations.
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["FAILED t.py::test_y - assert [1 - 2]"], {"test_y - assert [1 - 2]": "FAILED"}),
        (["FAILED t.py::test_y[a - b] - x"], {"test_y[a": "FAILED"}),
        (["PASSED t.py::t[a - b]", "PASSED t.py::t[a - c]"], {"t[a - b]": "PASSED", "t[a - c]": "PASSED"}),
        (["ERROR r2e_tests/test_2.py - ImportError", "PASSED t.py::test_a"], {"": "ERROR", "test_a": "PASSED"}),
        (["ERROR t.py::test_a - late", "FAILED t.py::test_a - x"], {"test_a": "FAILED"}),
        (["PASSED t.py::test_a", "XFAIL u.py::test_a", "SKIPPED v.py::test_a"], {"test_a": "PASSED"}),
    ],
)  # fmt: skip
def test_a_gold_log_that_r2e_gym_resolves_is_resolved_here(lines: list[str], expected: dict[str, str]) -> None:
    row = {"repo_name": "r", "docker_image": "i", "commit_hash": "c", "problem_statement": "p"}
    record = SweRecord.model_validate({**row, "expected_output_json": json.dumps(expected)})
    assert resolves(log_of(*lines), record.expected)
    worse = [line.replace("PASSED", "FAILED") for line in lines]
    assert worse == lines or not resolves(log_of(*worse), record.expected)


def resolves(log: str, expected: dict[str, str]) -> bool:
    verdict = judge_pytest_log(log, expected, "name")
    return verdict is not None and verdict.resolved


letters = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=12)
nodes = st.builds(
    lambda name, parameter: f"tests/test_x.py::test_{name}" + (f"[{parameter}]" if parameter else ""),
    st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
    st.none() | letters,
)


@given(st.dictionaries(nodes, st.sampled_from(sorted(STATUSES)), max_size=8), st.text("ab -[]:", max_size=20))
def test_parse_summary_reads_back_pytest_lines(statuses: dict[str, str], message: str) -> None:
    says = {"FAILED", "ERROR", "SKIPPED", "XFAIL"}
    lines = [f"{status} {node}" + (f" - {message}" if status in says else "") for node, status in statuses.items()]
    assert parse_summary(log_of(*lines), statuses) == statuses


@given(st.text(max_size=300))
def test_parser_accepts_any_log(text: str) -> None:
    parse_summary(f"{HEADER}\n{text}")
    parse_summary(text)


@given(st.sampled_from(sorted(STATUSES)), st.sampled_from(sorted(STATUSES)))
def test_worst_is_symmetric(first: str, second: str) -> None:
    assert worst_status(first, second) == worst_status(second, first)


SUITE = """
import unittest
import pytest

@pytest.mark.parametrize("x", ["a b", "a - b", "[", "] - x", "::"])
def test_odd_ids(x): assert x != "a - b"

@pytest.fixture
def late():
    yield
    raise RuntimeError("at teardown")

def test_teardown(late): pass

@pytest.mark.skip(reason="no")
def test_skipped(): pass

@pytest.mark.xfail
def test_known(): assert 0

class TestOld(unittest.TestCase):
    def test_method(self): print("=== short test summary info ===\\nFAILED nothing::at_all")
"""


def test_parse_summary_matches_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_s.py").write_text(SUITE)
    (tmp_path / "test_broken.py").write_text("def :\n")
    command = [sys.executable, "-m", "pytest", "-rA", "--no-fold-skipped", "-p", "no:cacheprovider", "--rootdir", "."]
    run = subprocess.run(
        [*command, "--continue-on-collection-errors"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    got = parse_summary(run.stdout)
    assert got == {
        "nothing::at_all": "FAILED",
        "test_s.py::test_odd_ids[a b]": "PASSED",
        "test_s.py::test_odd_ids[a - b]": "FAILED",
        "test_s.py::test_odd_ids[[]": "PASSED",
        "test_s.py::test_odd_ids[] - x]": "PASSED",
        "test_s.py::test_odd_ids[::]": "PASSED",
        "test_s.py::test_teardown": "ERROR",
        "test_s.py::test_skipped": "SKIPPED",
        "test_s.py::test_known": "XFAIL",
        "test_s.py::TestOld::test_method": "PASSED",
        "test_broken.py": "ERROR",
    }
