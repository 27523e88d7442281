"""A bubblewrap backend, and a small local task whose tests need no pytest in the sandbox."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from envs import EnvContext
from envs.swe import SweRecord, diff_files
from sandbox import ImagePolicy, SandboxSpec, SandboxUnavailableError
from sandbox.factory import open_backend

RUNNER = """
import importlib, sys, traceback

file, lines = sys.argv[1], []
sys.path.insert(0, ".")
try:
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
except Exception as error:
    lines.append(f"ERROR {file} - {type(error).__name__}")
else:
    for name in sorted(name for name in dir(module) if name.startswith("test_")):
        try:
            getattr(module, name)()
            lines.append(f"PASSED {file}::{name}")
        except Exception as error:
            traceback.print_exc()
            lines.append(f"FAILED {file}::{name} - {error}")
print("=" * 20, "short test summary info", "=" * 20)
print(*lines, sep=chr(10))
"""

BROKEN = {"calc.py": "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n", "README.md": "calc\n"}
FIXED = {**BROKEN, "calc.py": BROKEN["calc.py"].replace("a - b", "a + b")}
TESTS = {
    "hidden/test_calc.py": (
        "import calc\n\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n\n\n"
        "def test_double():\n    assert calc.double(2) == 4\n"
    ),
    "hidden/runner.py": RUNNER,
}


@pytest.fixture
def record() -> SweRecord:
    """A calculator that subtracts where it should add."""
    return SweRecord(
        repo_name="calc",
        task_id="calc-add",
        expected_output_json=(
            '{"hidden/test_calc.py::test_add": "PASSED", "hidden/test_calc.py::test_double": "PASSED"}'
        ),
        problem_statement="add(2, 3) gives -1.",
        files=BROKEN,
        tests=TESTS,
        test_command="python3 hidden/runner.py hidden/test_calc.py",
        gold_patch=diff_files(BROKEN, FIXED),
    )


@pytest.fixture
async def context(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnvContext]:
    """A context on bubblewrap with short limits; what it started is closed afterwards."""
    images = ImagePolicy(root=tmp_path_factory.getbasetemp())
    try:
        backend = open_backend("bubblewrap", run_id=f"test-{uuid.uuid4().hex[:8]}", images=images)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    try:
        yield EnvContext(backend, limits=SandboxSpec(memory_mb=256), grade_timeout=30.0)
    finally:
        await backend.close()
