"""nebius/SWE-rebench and SWE-rebench-V2: rows that bring their test command and log parser along (docs/datasets.md)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

from envs.swe.datasets.scripts import CONDA, apply_patch, eval_script, patched_tests, put_tests
from envs.swe.datasets.spec import Row, as_record, given, lines, parse_object, published_image, require, strings

_CONFIG = "install_config"
_TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_PYTEST_PARSERS = frozenset({"parse_log_pytest", "parse_log_pytest_options", "parse_log_pytest_v2"})
# Parsers that SWE-rebench-V2 at c71902a and swebench 5.0.2 both have, and that give tests the same names there.
_V2_PARSERS = _PYTEST_PARSERS | {
    *("parse_log_ant", "parse_log_cargo", "parse_log_cucumber", "parse_log_doctest", "parse_log_googletest"),
    *("parse_log_gotest", "parse_log_jest_json", "parse_log_jq", "parse_log_karma", "parse_log_micropython_test"),
    *("parse_log_minitest", "parse_log_rspec_transformed_json", "parse_log_ruby_unit", "parse_log_tap"),
    "parse_log_vitest",
}
_LOCALE = "LANG=C.UTF-8 LC_ALL=C.UTF-8 "
_V2_APPLY = "-v --3way --recount --ignore-space-change --whitespace=nowarn"
# Durations that test runners of V2's languages write into a test's name: " [1.3 ms]", " in 29 msec", " (1.2s)".
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
    """A test's name without the time that it took."""
    for pattern in _DURATIONS:
        test = pattern.sub("", test)
    return test.strip()


def _read_v1(row: Row, config: Mapping[str, Any]) -> dict[str, Any]:
    patch, base = str(row["test_patch"]), str(row["base_commit"])
    *first, tests = [f"{_LOCALE}{command}" for command in _commands(config, "test_cmd")]
    install = [f"{_LOCALE}{command}" for command in _commands(config, "install")]
    script = eval_script(
        [*CONDA, *_commands(config, "eval_commands"), *install, *put_tests(patch, base)],
        [*first, f"{tests} {shlex.join(patched_tests(patch))}"],
    )
    spec = _spec(row, script, _known_parser(str(config["log_parser"])))
    image = row.get("docker_image") or row.get("image_name")
    return as_record(row, spec, docker_image=image or published_image(row, "swerebench/sweb.eval.x86_64.", "_1776_"))


def _read_v2(row: Row, config: Mapping[str, Any]) -> dict[str, Any]:
    require(row, "SWE-rebench-V2", "image_name")
    if (parser := str(config["log_parser"])) not in _V2_PARSERS:
        raise ValueError(
            f"{_CONFIG}.log_parser: {parser!r} is none that swebench 5 has, or it names tests otherwise there, so the "
            "row cannot be graded; right would be parse_log_pytest or parse_log_cargo, say"
        )
    directory = f"/{str(row['repo']).rpartition('/')[2]}"
    tests = {key: [without_duration(test) for test in strings(row.get(key, ()))] for key in _TESTS}
    script = eval_script(
        [
            f"cd {shlex.quote(directory)}",
            "git update-index -q --refresh",
            *apply_patch(str(row["test_patch"]), _V2_APPLY),
        ],
        _commands(config, "test_cmd"),
    )
    spec = {**_spec(row, script, parser), **tests, "rules": "swe-rebench-v2"}
    return as_record(row, spec, docker_image=row["image_name"], workdir=directory)


def _commands(config: Mapping[str, Any], name: str) -> list[str]:
    """The commands in a field; the tests' may not be blank."""
    found = lines(config.get(name, ()), f"{_CONFIG}.{name}")
    if name == "test_cmd" and not found:
        raise ValueError(f"{_CONFIG}.test_cmd: blank; right would be the command that runs the tests")
    return found


def _spec(row: Row, script: str, parser: str) -> dict[str, Any]:
    own = {"eval_script": script, "log_parser": parser, "eval_type": "pass_and_fail"}
    return {**given(row, "version", "test_patch", *_TESTS), **own}


def _known_parser(name: str) -> str:
    """``name``, where swebench has a parser of it. Raises ``ValueError`` else."""
    if name in _PYTEST_PARSERS or (known := _parsers()) is None or name in known:
        return name
    raise ValueError(
        f"{_CONFIG}.log_parser: {name!r} is none of the {len(known)} that swebench 5 has, so the row cannot be graded; "
        "right would be parse_log_pytest, say"
    )


@cache
def _parsers() -> frozenset[str] | None:
    """The names of swebench's log parsers; None where it is not installed, which is told before anything is graded."""
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
    except ImportError:
        return None
    return frozenset(PARSER_REGISTRY)
