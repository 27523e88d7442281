"""Answers of the environment math that try to be right for more than one truth."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("math_verify", reason="needs the trainer environment")

from envs.math.grading_process import compare, parse_expression

pytestmark = pytest.mark.redteam

PERCENT = (
    r"50\%", "50%", r"50\ \%", r"50\,\%", "50~\\%", "50 percent", r"50\text{ percent}", r"50\text{\%}", "50 pct",
    r"50\%\%", r"\frac{50\%}{1}", "50 percentage",
)  # fmt: skip
TRUTHS = ("50", "0.5", r"\frac{1}{2}", "5000", "0.005")


@pytest.mark.parametrize("answer", PERCENT)
def test_a_percentage_is_its_number_and_no_fraction(answer: str) -> None:
    """As in the graders of MATH and PRM800K, which leave percent signs out."""
    assert [truth for truth in TRUTHS if compare(truth, answer)[0]] == ["50"]
    assert not compare(answer, "0.5")[0]
    assert compare(answer, "50")[0]


def test_the_sign_may_stand_on_both_sides() -> None:
    assert compare(r"12.5\%", r"12.5\%")[0]
    assert not compare(r"12.5\%", r"0.125\%")[0]


@pytest.mark.parametrize("text", [" " * 4000, "\\ " * 2000, "~" * 4000, "%" * 4000, "\\%" * 2000])
def test_signs_are_found_in_linear_time(text: str) -> None:
    started = time.process_time()
    parse_expression(text)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "answer",
    [r"0.5=50\%", r"50\%=0.5", r"50\text{ or }0.5", "50, 0.5", r"\{50, 0.5\}", r"50\ \text{or}\ 0.5", "x=50=0.5"],
)
def test_two_numbers_are_not_right_for_both(answer: str) -> None:
    assert sum(compare(truth, answer)[0] for truth in ("50", "0.5")) <= 1
