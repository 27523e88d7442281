"""SWE-Gym (and Lite): SWE-bench's fields for eleven other repositories, with test commands from its harness.

The commands are those of SWE-Gym/SWE-Bench-Fork at 242429c, swebench/harness/constants.py (docs/reference/datasets.md).
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from envs.swe.datasets.spec import (
    CONDA,
    Row,
    apply_test_patch,
    as_record,
    eval_script,
    grading,
    image_of,
    require,
    test_files,
)

_TEST_COMMANDS = {
    "bokeh/bokeh": "pytest -rA -n0",
    "conan-io/conan": "pytest -n0 -rA",
    "dask/dask": "pytest -n0 -rA --color=no",
    "facebookresearch/hydra": "pytest -rA --tb=long",
    "getmoto/moto": "pytest -n0 -rA",
    "iterative/dvc": "pytest -rA",
    "modin-project/modin": "pytest -n0 -rA",
    "pandas-dev/pandas": "pytest -rA --tb=long",
    "project-monai/monai": "pytest -rA",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "python/mypy": "pytest -n0 -rA",
}
_PARSERS = {"pydantic/pydantic": "parse_log_pytest_v2"}
_SETUP = {"conan-io/conan": ["export PYTHONPATH=${PYTHONPATH:-}:$(pwd)"]}
_MYPY = "python/mypy"
_MYPY_CASE = re.compile(r"\[case ([^\]]+)\]")


def recognizes(row: Row) -> bool:
    return "instance_id" in row and not row.get("eval_script") and _repository(row) in _TEST_COMMANDS


def read(row: Row) -> dict[str, Any]:
    require(row, "SWE-Gym", "base_commit", "test_patch", "FAIL_TO_PASS")
    repository, patch = _repository(row), str(row["test_patch"])
    setup = [*CONDA, *_SETUP.get(repository, ()), *apply_test_patch(patch, str(row["base_commit"]))]
    script = eval_script(setup, [f"{_TEST_COMMANDS[repository]} {_test_selection(repository, patch)}"])
    spec = grading(row, script, _PARSERS.get(repository, "parse_log_pytest"))
    return as_record(row, spec, docker_image=image_of(row, "xingyaoww/sweb.eval.x86_64.", "_s_"))


def _repository(row: Row) -> str:
    return str(row.get("repo", "")).lower()


def _test_selection(repository: str, patch: str) -> str:
    """Arguments of the test command: the patched files, or for mypy's data files the test cases in the patch."""
    if repository != _MYPY:
        return shlex.join(test_files(patch))
    return f"-k {shlex.quote(' or '.join(_MYPY_CASE.findall(patch)))}"
