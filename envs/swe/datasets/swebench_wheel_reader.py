"""A program that reads rows as JSON lines and prints their grading fields, with the code of a wheel of swebench 4.

The packages ``swebench`` and ``swebench.harness`` are entered without their ``__init__``, which imports docker and
modal. A row whose repository or version is not in the wheel's tables is left out.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import Any


def enter_wheel(wheel: str) -> tuple[Any, Any, Any]:
    """The modules of constants, log parsers and scripts."""
    for name in ("swebench", "swebench.harness"):
        package = types.ModuleType(name)
        package.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    constants, parsers, scripts = "constants", "log_parsers", "test_spec.create_scripts"
    first, second, third = (
        importlib.import_module(f"swebench.harness.{name}") for name in (constants, parsers, scripts)
    )
    return first, second, third


def main(wheel: str) -> None:
    constants, parsers, scripts = enter_wheel(wheel)
    for row in map(json.loads, sys.stdin):
        repo, commit = row["repo"], row["base_commit"]
        specs = constants.MAP_REPO_VERSION_TO_SPECS.get(repo, {}).get(row["version"])
        if specs is None or repo not in parsers.MAP_REPO_TO_PARSER:
            continue
        commands = scripts.make_eval_script_list(row, specs, "testbed", "/testbed", commit, row["test_patch"])
        fields = {
            "eval_script": "\n".join(["#!/bin/bash", "set -uxo pipefail", *commands]) + "\n",
            "log_parser": parsers.MAP_REPO_TO_PARSER[repo].__name__,
            "eval_type": "fail_only" if repo in constants.FAIL_ONLY_REPOS else "pass_and_fail",
        }
        print(json.dumps({"instance_id": row["instance_id"], "repo": repo, "base_commit": commit, **fields}))


if __name__ == "__main__":
    main(sys.argv[1])
