"""Line-ups of tests: a correct module passes the right variant of each test and fails all others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random

import pytest

from envs.swe.mutants import MAX_VARIANTS, WRONG_PASSED, LineUp, TestFile, draw_line_up, visible_statements

TESTS = '''import unittest
import pytest

def total(*numbers): return sum(numbers)

def test_number(): assert total(20, 35) == 55

def test_text():
    """Says é."""
    assert "one two".split() == ["one", "two"], "é"

def test_float(): assert 7 / 2 == 3.5
def test_bytes(): assert "ab".encode() == b"ab"
def test_none(): assert {}.get(1) == None
def test_empty(): assert list(()) == []
def test_true(): assert "a".isalpha()
def test_not(): assert not "1".isalpha()
def test_in(): assert "a" in "abc"
def test_member(): assert "a number" in "not a number."
def test_false(): assert "1".isalpha() is False
def test_match():
    with pytest.raises(Exception, match="out of range"):
        raise IndexError("out of range")

def test_is(): assert {}.get(1) is None
def test_bools(): assert ("1".isdigit(), "a".isdigit()) == (True, False)
def test_other(): assert total(1, 2) == total(2, 1)
def test_order(): assert total(1, 2) < total(2, 2)

def test_raises():
    with pytest.raises(KeyError):
        {}[1]

@pytest.mark.parametrize("first, expected", [(1, 2), pytest.param(3, 4)])
def test_rows(first, expected): assert first + 1 == expected

def test_assigned():
    expected = "abc"
    assert "ab" + "c" == expected

class Point(tuple):
    def __new__(cls, x, y): return tuple.__new__(cls, (x, y))

def test_instance(): assert (total(1, 2), total(3, 4)) == Point(3, y=7)
def test_instance_and_literal(): assert Point(3, 7) == (3, 7)

def check_sum(numbers, result): assert sum(numbers) == result

def test_helper(): check_sum([1, 2], 3)

class TestCase(unittest.TestCase):
    def test_equal(self): self.assertEqual(total(4, 5), 9)
    def test_truth(self): self.assertTrue("a".isalpha())
    def test_none(self): self.assertIsNone({}.get(1))
    def test_is(self): self.assertIs({}.get(1), None)
    def test_in(self): self.assertIn("one two", "one two three")
    def test_regex(self): self.assertRaisesRegex(Exception, "invalid", int, "x")
'''
FILE = TestFile(TESTS.encode(), "t.py")
EXPECTED = {function.key: "PASSED" for function in FILE.functions}


def line_up(seed: int, **options: object) -> LineUp:
    drawn = draw_line_up({"t.py": FILE.content}, EXPECTED, (), frozenset(), Random(seed), **options)  # type: ignore[arg-type]
    assert drawn is not None
    return drawn


def statuses(content: bytes) -> dict[str, str]:
    """The statuses of the tests in a file, run here."""
    space: dict[str, object] = {}
    exec(compile(content, "t.py", "exec"), space)
    case = space["TestCase"]
    assert isinstance(case, type)
    methods = {name: getattr(case(name), name) for name in vars(case) if name.startswith("test")}
    tests = {name: value for name, value in space.items() if name.startswith("test") and callable(value)}
    return {name: _status(test) for name, test in {**tests, **methods}.items()}  # type: ignore[arg-type]


def _status(test: Callable[..., None]) -> str:
    marks = getattr(test, "pytestmark", ())
    try:
        for row in marks[0].args[1] if marks else [()]:
            test(*getattr(row, "values", row))
    except (Exception, pytest.fail.Exception):
        return "FAILED"
    return "PASSED"


def test_correct_module_passes_the_right_variant_alone() -> None:
    for seed in range(20):
        drawn = line_up(seed)
        assert drawn.right.keys() == EXPECTED.keys() - {"t.py::test_order"}
        assert b"assert  " not in drawn.files["t.py"], "a space would tell the wrong variant"
        assert drawn.deviations(statuses(drawn.files["t.py"])) == {}, seed


def test_literal_has_as_many_variants_as_the_budget_allows() -> None:
    alone = draw_line_up({"t.py": FILE.content}, EXPECTED, ["t.py::test_number"], frozenset(), Random(1))
    assert alone is not None
    assert len(alone.wrong["t.py::test_number"]) == MAX_VARIANTS - 1
    assert alone.fixed == {"t.py::test_number"}


LITERALS = (
    *("test_member", "test_match", "test_assigned", "test_instance", "test_instance_and_literal"),
    *("TestCase::test_in", "TestCase::test_regex"),
)


@pytest.mark.parametrize("name", LITERALS)
def test_text_that_is_expected_contained_or_matched_is_a_literal(name: str) -> None:
    alone = draw_line_up({"t.py": FILE.content}, EXPECTED, [f"t.py::{name}"], frozenset(), Random(1))
    assert alone is not None
    assert len(alone.wrong[f"t.py::{name}"]) == MAX_VARIANTS - 1


COMPARED_AND_USED = ("assert f(data) == data", "data.append(2); assert f() == data", "assert f(data)")


@pytest.mark.parametrize("use", COMPARED_AND_USED)
def test_variable_that_is_not_only_compared_is_no_expected_value(use: str) -> None:
    content = f"def test_it():\n    data = [1]; {use}\n".encode()
    sites = [site for function in TestFile(content).functions for site in function.sites]
    assert sites
    assert max(site.rank for site in sites) < 2


def test_truth_values_and_none_have_the_same_variants() -> None:
    """A set of variants that only one of them has would tell the right one."""
    texts = []
    for right in ("True", "False", "None"):
        content = f"def test_it(): assert f() is {right}\n".encode()
        drawn = draw_line_up({"t.py": content}, {"t.py::test_it": "PASSED"}, (), frozenset(), Random(2))
        assert drawn is not None
        texts.append(set(re.findall(rb" is (\w+)", drawn.files["t.py"])))
    assert texts == [{b"True", b"False", b"None"}] * 3


def test_right_variant_is_found_at_every_place_and_with_every_name() -> None:
    tests = {"t.py::test_number": "PASSED"}
    ups = [draw_line_up({"t.py": FILE.content}, tests, (), frozenset(), Random(seed)) for seed in range(60)]
    drawn = [up for up in ups if up is not None]
    assert len({up.right["t.py::test_number"].rsplit("_", 1)[1] for up in drawn}) >= 12


def test_statements_that_the_agent_can_read_come_last() -> None:
    tests = b"import calc\ndef test_add():\n    assert calc.add(1, 2) == 3\n    assert calc.add(2, 2) == 4\n"
    visible = visible_statements([tests.replace(b"    assert calc.add(2, 2) == 4\n", b"")])
    for seed in range(10):
        drawn = draw_line_up({"t.py": tests}, {"t.py::test_add": "PASSED"}, (), visible, Random(seed))
        assert drawn is not None
        assert drawn.files["t.py"].count(b"(1, 2) == 3\n") == 1 + len(drawn.wrong["t.py::test_add"])


def test_place_where_a_correct_patch_deviates_is_left_out() -> None:
    drawn = line_up(3)
    unusable = drawn.unusable({"t.py::test_number": WRONG_PASSED, "t.py::test_true": "its right variant failed"})
    again = line_up(4, excluded=unusable)
    assert "t.py::test_true" not in again.right
    assert drawn.places["t.py::test_number"] != again.places.get("t.py::test_number")


@pytest.mark.parametrize("content", [b"def :\n", b"\xff\xfe", b"x = 1\r", b"", b"def test_a(): pass\n"])
def test_file_without_usable_tests_has_no_line_up(content: bytes) -> None:
    assert draw_line_up({"t.py": content}, {"t.py::test_a": "PASSED"}, (), frozenset(), Random(1)) is None


def test_record_tells_which_tests_fail_before_the_fix() -> None:
    from tests.redteam.test_pytest_attacks import NAMES, RECORD

    assert RECORD.failing == set(NAMES) - {NAMES[1]}
    stdout = (
        "=== short test summary info ===\nPASSED r2e_tests/test_1.py::test_a\nFAILED r2e_tests/test_1.py::T::test_b\n"
    )
    image = RECORD.model_copy(
        update={
            "files": {},
            "expected_output_json": json.dumps({"test_a": "PASSED", "T.test_b": "PASSED"}),
            "execution_result_content": json.dumps({"old_commit_res_stdout": stdout}),
        }
    )
    assert image.failing == {"T.test_b"}
    assert image.model_copy(update={"execution_result_content": "[1"}).failing == frozenset()
