"""nebius/SWE-rebench and SWE-rebench-V2: rows with their test command and log parser (docs/reference/datasets.md)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from envs.swe.datasets.spec import (
    CONDA,
    Row,
    apply_patch,
    apply_test_patch,
    as_record,
    command_lines,
    eval_script,
    grading,
    image_of,
    parse_object,
    require,
    string_list,
    test_files,
)

_CONFIG = "install_config"
_PYTEST_PARSERS = frozenset({"parse_log_pytest", "parse_log_pytest_options", "parse_log_pytest_v2"})
# Parsers that give tests the same names in SWE-rebench-V2 at c71902a and in swebench 5.0.2.
_V2_PARSERS = _PYTEST_PARSERS | {
    *("parse_log_ant", "parse_log_cargo", "parse_log_cucumber", "parse_log_doctest", "parse_log_googletest"),
    *("parse_log_gotest", "parse_log_jest_json", "parse_log_jq", "parse_log_karma", "parse_log_micropython_test"),
    *("parse_log_minitest", "parse_log_rspec_transformed_json", "parse_log_ruby_unit", "parse_log_tap"),
    "parse_log_vitest",
}
_LOCALE = "LANG=C.UTF-8 LC_ALL=C.UTF-8 "
_V2_APPLY = "-v --3way --recount --ignore-space-change --whitespace=nowarn"
# Durations in test names of V2's test runners: " [1.3 ms]", " in 29 msec", " (1.2s)".
_DURATIONS = (
    re.compile(r"\s*\[\s*\d+(?:\.\d+)?\s*m?s\s*\]\s*$", re.IGNORECASE),
    re.compile(r"\s+in\s+\d+(?:\.\d+)?\s+m?sec\b", re.IGNORECASE),
    re.compile(r"\s*\(\s*\d+(?:\.\d+)?\s*m?s\s*\)\s*$", re.IGNORECASE),
)


def recognizes(row: Row) -> bool:
    return bool(row.get(_CONFIG)) and not row.get("eval_script")


def read(row: Row) -> dict[str, Any]:
    family = "SWE-rebench"
    require(row, family, "instance_id", "repo", "base_commit", "test_patch")
    config = parse_object(row[_CONFIG], _CONFIG)
    for name in ("test_cmd", "log_parser"):
        if not config.get(name):
            raise ValueError(f"{_CONFIG}.{name}: required in a row of {family}, and not given")
    return _read_v2(row, config) if "language" in row else _read_v1(row, config)


def without_duration(test: str) -> str:
    """A test's name without its duration."""
    for pattern in _DURATIONS:
        test = pattern.sub("", test)
    return test.strip()


def _read_v1(row: Row, config: Mapping[str, Any]) -> dict[str, Any]:
    patch, base = str(row["test_patch"]), str(row["base_commit"])
    *first, tests = [f"{_LOCALE}{command}" for command in _commands(config, "test_cmd")]
    install = [f"{_LOCALE}{command}" for command in _commands(config, "install")]
    script = eval_script(
        [*CONDA, *_commands(config, "eval_commands"), *install, *apply_test_patch(patch, base)],
        [*first, f"{tests} {shlex.join(test_files(patch))}"],
    )
    spec = grading(row, script, _known_parser(str(config["log_parser"])))
    return as_record(row, spec, docker_image=image_of(row, "swerebench/sweb.eval.x86_64.", "_1776_"))


def _read_v2(row: Row, config: Mapping[str, Any]) -> dict[str, Any]:
    require(row, "SWE-rebench-V2", "image_name")
    if (parser := str(config["log_parser"])) not in _V2_PARSERS:
        raise ValueError(
            f"{_CONFIG}.log_parser: {parser!r} is missing in swebench 5 or names tests differently there, so the "
            "row cannot be graded; right would be parse_log_pytest or parse_log_cargo, for example"
        )
    directory = f"/{str(row['repo']).rpartition('/')[2]}"
    tests = {
        key: [without_duration(test) for test in string_list(row.get(key, ()))]
        for key in ("FAIL_TO_PASS", "PASS_TO_PASS")
    }
    setup = [f"cd {shlex.quote(directory)}", "git update-index -q --refresh"]
    setup += apply_patch(str(row["test_patch"]), _V2_APPLY)
    script = eval_script(setup, _commands(config, "test_cmd"))
    spec = grading(row, script, parser, rules="swe-rebench-v2", **tests)
    return as_record(row, spec, docker_image=row["image_name"], workdir=directory)


def _commands(config: Mapping[str, Any], name: str) -> list[str]:
    """The commands in a field. Raises ``ValueError`` for an empty test_cmd."""
    commands = command_lines(config.get(name, ()), f"{_CONFIG}.{name}")
    if name == "test_cmd" and not commands:
        raise ValueError(f"{_CONFIG}.test_cmd: blank; right would be the command that runs the tests")
    return commands


def _known_parser(name: str) -> str:
    """Return ``name`` if swebench has this parser or is not installed; else raise ``ValueError``."""
    if name in _PYTEST_PARSERS or (known := _parsers()) is None or name in known:
        return name
    raise ValueError(
        f"{_CONFIG}.log_parser: {name!r} is none of the {len(known)} parsers of swebench 5, so the row cannot be "
        "graded; right would be parse_log_pytest, for example"
    )


@cache
def _parsers() -> frozenset[str] | None:
    """The names of swebench's log parsers, or None if it is not installed (``check_gradable`` raises for that)."""
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
    except ImportError:
        return None
    return frozenset(PARSER_REGISTRY)
