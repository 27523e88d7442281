"""Hidden tests that are calls, on this machine: right values pass, whatever else the code under test does does not.

``tests/redteam/test_grading_attacks.py`` has code in a real sandbox that attacks its grading."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.swe import SweRecord
from envs.swe.calls import Call, CallRun
from envs.swe.pytest_log import TestVerdict, judge_pytest_log

KEYS = ("tests/test_shop.py::test_cost_0", "tests/test_shop.py::test_cost_1")
EXPECTED = dict.fromkeys(KEYS, "PASSED")
CALLS = {
    KEYS[0]: Call(module="shop", call="cost(2)", result="6"),
    KEYS[1]: Call(module="shop", call="cost(5)", result="15"),
}
FAILED = dict.fromkeys(KEYS, "FAILED")


@pytest.fixture
def calls() -> Iterator[CallRun]:
    made = CallRun(CALLS)
    yield made
    for path in made.files():
        shutil.rmtree(Path(path).parent, ignore_errors=True)


def run(calls: CallRun, directory: Path, code: str) -> str:
    """What the calls of ``code`` printed."""
    for path, content in calls.files().items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(content)
    (directory / "shop.py").write_text(code)
    done = subprocess.run(["bash", "-c", calls.command], cwd=directory, capture_output=True, timeout=30, check=False)
    return done.stdout.decode(errors="replace")


def verdict_on(calls: CallRun, directory: Path, code: str) -> TestVerdict | None:
    return judge_pytest_log(calls.summary(run(calls, directory, code)), EXPECTED)


def test_right_code_passes(calls: CallRun, tmp_path: Path) -> None:
    verdict = verdict_on(calls, tmp_path, "print('6')\ndef cost(n):\n    print('15')\n    return 3 * n\n")
    assert verdict is not None
    assert verdict.resolved


def test_each_call_has_its_own_status_and_message(calls: CallRun, tmp_path: Path) -> None:
    summary = calls.summary(run(calls, tmp_path, "def cost(n):\n    return 6 if n == 2 else [1 / 0]\n"))
    assert f"PASSED {KEYS[0]}" in summary
    assert f"FAILED {KEYS[1]} - cost(5): raises ZeroDivisionError, expected 15" in summary


def test_expected_values_never_enter_the_sandbox(calls: CallRun) -> None:
    secret = CallRun({KEYS[0]: Call(module="shop", call="cost(2)", result="987654321")})
    assert not any(b"987654321" in content for content in secret.files().values())
    assert "987654321" not in secret.command


CLASS = "class Odd:\n    def {method}\ndef cost(n):\n    return Odd()\n"
WRONG = {
    "equals everything": CLASS.format(method="__eq__(self, other): return True"),
    "is of another type": "def cost(n):\n    return 3.0 * n\n",
    "raises at import": "raise SystemExit(0)\n",
    "raises when called": "def cost(n):\n    raise KeyboardInterrupt\n",
    "does not parse": "def cost(n:\n",
    "prints right-looking lines": "def cost(n):\n    print('PASSED', n)\n    return 0\n",
    "has an endless repr": CLASS.format(method="__repr__(self): return repr(self)"),
    "gives a huge value": "def cost(n):\n    return [3 * n] * 1_000_000\n",
    "gives deep brackets": CLASS.format(method="__repr__(self): return '[' * 9000"),
}


@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG)
def test_wrong_values_fail(calls: CallRun, tmp_path: Path, code: str) -> None:
    verdict = verdict_on(calls, tmp_path, code)
    assert verdict is not None
    assert verdict.tests == FAILED


@pytest.mark.slow
def test_endless_code_is_killed(calls: CallRun, tmp_path: Path) -> None:
    verdict = verdict_on(calls, tmp_path, "def cost(n):\n    while n == 5:\n        pass\n    return 6\n")
    assert verdict is not None
    assert verdict.tests == {KEYS[0]: "PASSED", KEYS[1]: "FAILED"}


def test_a_call_with_two_results_fails() -> None:
    """Else code could answer with one value after another until the right one is among them."""
    calls = CallRun(CALLS)
    log = "\n".join(f"{calls.nonce} {index} {value}" for index in range(2) for value in range(20))
    verdict = judge_pytest_log(calls.summary(log), EXPECTED)
    assert verdict is not None
    assert verdict.tests == FAILED


def test_a_log_without_results_has_no_verdict() -> None:
    assert judge_pytest_log(CallRun(CALLS).summary("0 6\n1 15\n"), EXPECTED) is None


@given(st.lists(st.tuples(st.sampled_from("0123"), st.text()), max_size=8))
def test_output_of_the_code_under_test_adds_no_summary_line(answers: list[tuple[str, str]]) -> None:
    calls = CallRun(CALLS)
    summary = calls.summary("\n".join(f"{calls.nonce} {index} {text}" for index, text in answers))
    assert len(summary.splitlines()) in (0, 2 + len(CALLS) - 1)
    verdict = judge_pytest_log(summary, EXPECTED)
    assert verdict is None or set(verdict.tests) == set(KEYS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"module": "os; os", "call": "f()", "result": "1"},
        {"module": "a", "call": "f()\nb g()", "result": "1"},
        {"module": "a", "call": "f()", "result": "f()"},
    ],
)
def test_a_row_with_a_broken_call_is_refused(record: SweRecord, wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="calls"):
        SweRecord.model_validate({**record.model_dump(), "calls": {"a::b": wrong}})
