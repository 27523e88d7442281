"""Rows of the data sets by their real field names, about one small repository, and the images they name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from envs.swe import diff_files
from envs.swe.datasets.spec import END, START
from tests.envs.images import GIT_WITH_A_FUTURE, directory_image

BROKEN = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef double(a):\n    return 2 * a\n",
    "tests/test_calc.py": "import calc\n\n\ndef test_double():\n    assert calc.double(2) == 4\n",
}
FIXED = {**BROKEN, "calc.py": BROKEN["calc.py"].replace("a - b", "a + b")}
TESTED = {
    **BROKEN,
    "tests/test_calc.py": f"{BROKEN['tests/test_calc.py']}\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n",
}
HEALTHY = {**FIXED, "tests/test_calc.py": TESTED["tests/test_calc.py"]}
FIX, TEST_PATCH, BUG = diff_files(BROKEN, FIXED), diff_files(BROKEN, TESTED), diff_files(FIXED, BROKEN)
FAIL_TO_PASS, PASS_TO_PASS = ["tests/test_calc.py::test_add"], ["tests/test_calc.py::test_double"]

CONDA = "opt/miniconda3"
_PYTEST = """#!/usr/bin/env python3
import sys
sys.path[0] = "/testbed"
import pytest
sys.exit(pytest.main())
"""


def commit_content(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """``parsed_commit_content`` of an R2E-Gym row whose commit changes the files ``old`` to ``new``."""
    diffs = [
        {
            "header": {"file": {"path": path}, "misc_line": None},
            "is_binary_file": False,
            "minus_file": {"path": f"a/{path}" if path in old else "/dev/null"},
            "plus_file": {"path": f"b/{path}" if path in new else "/dev/null"},
            "old_file_content": old.get(path, ""),
            "new_file_content": new.get(path, ""),
        }
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    ]
    return json.dumps({"file_diffs": diffs, "commit_message": "", "metadata": {}})


def image(root: Path, files: Mapping[str, str], directory: str = "testbed") -> str:
    """A directory image laid out as SWE-bench's, with a conda environment that has pytest, its repository in
    ``directory``.

    The commit the task starts from is the repository's ``HEAD``.
    """
    directory_image(root, files, GIT_WITH_A_FUTURE)
    if directory != "testbed":
        (root / "testbed").rename(root / directory)
    for path, text in conda_files(directory).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        (root / path).chmod(0o755)
    (root / "opt/site").mkdir()
    return str(root)


def conda_files(directory: str = "testbed") -> dict[str, str]:
    """What a conda environment comes down to here, below an image's root."""
    return {
        f"{CONDA}/bin/activate": f'conda() {{ export PATH="/{CONDA}/envs/$2/bin:$PATH"; }}\n',
        f"{CONDA}/envs/testbed/bin/pytest": _PYTEST.replace("testbed", directory),
    }


def swebench_log(lines: Iterable[str]) -> str:
    """Summary lines between the markers that swebench looks for."""
    return "\n".join([START, *lines, END])


def classic(**fields: Any) -> dict[str, Any]:
    """The twelve fields of 2023, tests as JSON."""
    return {
        "repo": "demo/calc",
        "instance_id": "demo__calc-1",
        "base_commit": "HEAD",
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": "add(2, 3) gives -1.",
        "hints_text": "",
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(FAIL_TO_PASS),
        "PASS_TO_PASS": json.dumps(PASS_TO_PASS),
        "environment_setup_commit": "HEAD",
        **fields,
    }


def rebench(**fields: Any) -> dict[str, Any]:
    """nebius/SWE-rebench: lists of tests, and how they run; a field may be null."""
    config = {
        "env_vars": None,
        "env_yml_path": None,
        "install": "pip install -e .[dev]",
        "log_parser": "parse_log_pytest",
        "no_use_env": None,
        "packages": "requirements.txt",
        "pip_packages": ["pytest"],
        "pre_install": None,
        "python": "3.9",
        "reqs_path": ["requirements/base.txt"],
        "test_cmd": "pytest --no-header -rA --tb=line --color=no -p no:cacheprovider",
    }
    return {
        **classic(FAIL_TO_PASS=FAIL_TO_PASS, PASS_TO_PASS=PASS_TO_PASS),
        "FAIL_TO_FAIL": [],
        "PASS_TO_FAIL": [],
        "license_name": "MIT License",
        "docker_image": "swerebench/sweb.eval.x86_64.demo_1776_calc-1",
        "image_name": None,
        "install_config": config,
        "requirements": "pytest==8.0.0",
        "environment": None,
        "meta": {"failed_lite_validators": [], "has_test_patch": True, "is_lite": True},
        **fields,
    }


def rebench_v2(**fields: Any) -> dict[str, Any]:
    config = {
        "base_image_name": "python:3.9",
        "docker_specs": None,
        "install": ["pip install -e ."],
        "log_parser": "parse_log_pytest",
        "test_cmd": ["pytest -rA --color=no -p no:cacheprovider tests/test_calc.py"],
    }
    return {
        "base_commit": "HEAD",
        "created_at": 1609298073000,
        "instance_id": "demo__calc-2",
        "scaffold": "",
        "language": "python",
        "meta": {"num_modified_files": 1},
        "patch": FIX,
        "pr_description": "Fix add",
        "problem_statement": "add(2, 3) gives -1.",
        "repo": "demo/calc",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": FAIL_TO_PASS,
        "PASS_TO_PASS": PASS_TO_PASS,
        "install_config": config,
        "image_name": "docker.io/swerebenchv2/demo-calc:2-abc",
        **fields,
    }


def extra(**fields: Any) -> dict[str, Any]:
    """nebius/SWE-bench-extra: SWE-rebench's forerunner, without a way to run the tests."""
    row = {**rebench(version=1), **fields}
    lacking = ("install_config", "docker_image", "image_name", "requirements", "environment", "license_name")
    return {key: value for key, value in row.items() if key not in lacking}


def gym(**fields: Any) -> dict[str, Any]:
    """SWE-Gym/SWE-Gym (and Lite): eleven of SWE-bench's fields, lists of tests."""
    row = {
        **classic(FAIL_TO_PASS=FAIL_TO_PASS, PASS_TO_PASS=PASS_TO_PASS),
        "repo": "getmoto/moto",
        "instance_id": "getmoto__moto-7365",
        "version": "5.0",
        **fields,
    }
    return {key: value for key, value in row.items() if key != "environment_setup_commit"}


def smith(**fields: Any) -> dict[str, Any]:
    """SWE-bench/SWE-smith: the patch is the bug."""
    return {
        "instance_id": "demo__calc.0a1b2c3d.func_basic__x1y2z3",
        "repo": "swesmith/demo__calc.0a1b2c3d",
        "patch": BUG,
        "FAIL_TO_PASS": FAIL_TO_PASS,
        "PASS_TO_PASS": [*PASS_TO_PASS, "tests/test_other.py::test_elsewhere"],
        "created_at": "2025-05-01T00:00:00",
        "image_name": "jyangballin/swesmith.x86_64.demo_1776_calc.0a1b2c3d",
        "base_commit": "f" * 40,
        "problem_statement": "add(2, 3) gives -1.",
        **fields,
    }


def nemo_around(row: Mapping[str, Any], dataset_name: str, **fields: Any) -> dict[str, Any]:
    """A row of NeMo Gym's swe_agents: a request around another data set's row."""
    metadata = {
        "instance_id": row["instance_id"],
        "base_commit": row.get("base_commit", ""),
        "dataset_name": dataset_name,
        "split": "train",
        "problem_statement": row["problem_statement"],
        "golden_patch": row.get("patch", ""),
        "instance_dict": json.dumps(row),
    }
    params = {"input": [], "metadata": metadata, "temperature": 0.7, "max_output_tokens": 12288}
    return {
        "responses_create_params": params,
        "agent_ref": {"type": "responses_api_agents", "name": "swe_agents_train"},
        **fields,
    }


def nemo_generated(image: str, **fields: Any) -> dict[str, Any]:
    """A row of NeMo Gym's swerl_gen: scripts that were made of a SWE-Gym row."""
    activate = "#!/bin/bash\nsource /opt/miniconda3/bin/activate\nconda activate testbed\ncd /testbed\n"
    apply = f"git checkout HEAD tests/test_calc.py\ngit apply -v - <<'EOF_114329324912'\n{TEST_PATCH}\nEOF_114329324912"
    scripts = {
        "setup_script": f"{activate}{apply}",
        "test_script": f"{activate}pytest -rA -p no:cacheprovider tests/test_calc.py",
        "regression_script": f"{activate}git checkout HEAD tests/test_calc.py",
    }
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "..."}]},
        "metadata": {"relevant_file_contents": "{}", "remove_repo_name": False, "image": image},
        "instance": {**gym(), **scripts},
        "dataset_name": "SWE-Gym/SWE-Gym",
        "dataset_split": "train",
        "mode": "eval",
        "agent_ref": {"type": "responses_api_agents", "name": "swerl_gen_simple_agent"},
        **fields,
    }
