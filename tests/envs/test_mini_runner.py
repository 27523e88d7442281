"""The hidden test runner against code that tries to look fixed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from envs.mini.records import runner_source
from envs.swe.pytest_log import judge

TESTS = """from shop import cost


def test_cost_0():
    assert cost(2) == 6


def test_cost_1():
    assert cost(5) == 15
"""
KEYS = ("tests/test_shop.py::test_cost_0", "tests/test_shop.py::test_cost_1")
EXPECTED = dict.fromkeys(KEYS, "PASSED")


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "tests").mkdir()
    (folder / "tests" / "run.py").write_text(runner_source())
    (folder / "tests" / "test_shop.py").write_text(TESTS)
    (folder / "shop.py").write_text(code)
    command = ["/usr/bin/env", "python3", "-S", "-E", "tests/run.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)


def test_right_code_passes(tmp_path: Path) -> None:
    done = run(tmp_path, "def cost(n):\n    return 3 * n\n")
    verdict = judge(done.stdout, EXPECTED)
    assert verdict is not None
    assert verdict.resolved
    assert done.returncode == 0


def test_each_test_has_its_own_status(tmp_path: Path) -> None:
    done = run(tmp_path, "def cost(n):\n    return 3 * n if n == 2 else 1 / 0\n")
    verdict = judge(done.stdout, EXPECTED)
    assert verdict is not None
    assert verdict.tests == {KEYS[0]: "PASSED", KEYS[1]: "FAILED"}
    assert done.returncode == 1


FORGERIES = {
    "exits at import": "import os\nos._exit(0)\n",
    "exits when called": "import os\ndef cost(n):\n    os._exit(0)\n",
    "prints a summary": (
        "print('=== short test summary info ===')\n"
        f"print('PASSED {KEYS[0]}')\nprint('PASSED {KEYS[1]}')\ndef cost(n):\n    return 0\n"
    ),
    "equals everything": (
        "class Any:\n    def __eq__(self, other):\n        return True\ndef cost(n):\n    return Any()\n"
    ),
    "reads the tests": (
        "import pathlib\ntext = pathlib.Path('tests/test_shop.py').read_text()\n"
        "def cost(n):\n    return int(text.split(f'cost({n}) == ')[1].split()[0])\n"
    ),
    "looks into the runner": (
        "import __main__, gc\n"
        "def cost(n):\n"
        "    for thing in gc.get_objects():\n"
        "        if isinstance(thing, tuple) and len(thing) == 3 and thing[1] == f'cost({n})':\n"
        "            return thing[2]\n"
        "    raise LookupError\n"
    ),
    "is of another type": "def cost(n):\n    return 3.0 * n\n",
    "does not parse": "def cost(n:\n",
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES.keys())
def test_forgeries_pass_nothing(tmp_path: Path, code: str) -> None:
    verdict = judge(run(tmp_path, code).stdout, EXPECTED)
    assert verdict is not None
    assert verdict.tests == dict.fromkeys(KEYS, "FAILED")


@pytest.mark.slow
def test_endless_code_is_killed(tmp_path: Path) -> None:
    done = run(tmp_path, "def cost(n):\n    while n == 2:\n        pass\n    return 15\n")
    verdict = judge(done.stdout, EXPECTED)
    assert verdict is not None
    assert set(verdict.tests.values()) == {"FAILED"}
