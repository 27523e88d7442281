"""Reads the packages that a repository's tests need from its files, without running them."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envs.swe.source_text import SourceText

PYTEST = "pytest==8.3.5"
_TEST_EXTRAS = frozenset({"test", "tests", "testing", "dev", "develop", "development"})
_REQUIREMENTS = re.compile(r"(?:requirements/)?[\w.-]*(?:requirements|test|dev)[\w.-]*\.(?:txt|in)")
_IMPORTED = {
    **{"attr": "attrs", "dateutil": "python-dateutil", "yaml": "pyyaml"},
    **{name: name for name in ("freezegun", "hypothesis", "mock", "numpy", "parameterized", "pretend", "pytz", "six")},
}
"""Packages of modules that tests often import without a declared requirement: module -> package."""


def requirements_of(files: Mapping[str, str], name: str, metadata: str = "") -> tuple[str, ...]:
    """The sorted requirements of the repository ``name`` and its tests, without the repository itself and pytest.

    ``metadata`` is the text of a source release's PKG-INFO, if there is one.
    """
    excluded = {canonicalize_name(name), "pytest", "pip", "tox", "nox"}
    requirements: dict[str, str] = {}
    for line in _requirement_lines(files, metadata):
        parsed = _parse_requirement(line)
        if parsed is not None and parsed[0] not in excluded:
            requirements.setdefault(*parsed)
    return tuple(sorted(requirements.values()))


def project_name(files: Mapping[str, str]) -> str:
    """The project's name in its own files, or an empty string."""
    project = _toml(files.get("pyproject.toml", ""))
    name = _table(project, "project").get("name") or _table(project, "tool", "poetry").get("name")
    name = name or _config(files.get("setup.cfg", "")).get("metadata", {}).get("name")
    return name if isinstance(name, str) else ""


def _requirement_lines(files: Mapping[str, str], metadata: str) -> Iterator[str]:
    yield from _from_metadata(metadata)
    yield from _from_pyproject(_toml(files.get("pyproject.toml", "")))
    yield from _from_setup_cfg(_config(files.get("setup.cfg", "")))
    yield from _from_setup_py(files.get("setup.py", ""))
    yield from _config(files.get("tox.ini", "")).get("testenv", {}).get("deps", "").splitlines()
    for path, text in files.items():
        if _REQUIREMENTS.fullmatch(path):
            yield from text.splitlines()
    yield from _from_imports(files)


def _parse_requirement(line: str) -> tuple[str, str] | None:
    """The canonical name and the normalized requirement of a line. None for options, URLs and other lines."""
    try:
        requirement = Requirement(line.split(" #")[0].strip())
    except InvalidRequirement:
        return None
    if requirement.url or re.search(r"\bextra\b", str(requirement.marker)):
        return None
    return canonicalize_name(requirement.name), str(requirement)


def _from_metadata(text: str) -> Iterator[str]:
    head = text.split("\n\n")[0]
    for requirement in re.findall(r"^Requires-Dist: (.+)$", head, re.MULTILINE):
        extra = re.search(r"""\bextra\s*==\s*['"]([\w-]+)['"]""", requirement)
        if extra is None:
            yield requirement
        elif extra[1] in _TEST_EXTRAS:
            yield requirement.partition(";")[0]


def _from_pyproject(project: Mapping[str, Any]) -> Iterator[str]:
    yield from _strings(_table(project, "project").get("dependencies"))
    for groups in (_table(project, "project", "optional-dependencies"), _table(project, "dependency-groups")):
        yield from (line for group in groups if group in _TEST_EXTRAS for line in _strings(groups[group]))
    poetry = _table(project, "tool", "poetry")
    tables = [_table(poetry, "dependencies"), _table(poetry, "dev-dependencies")]
    tables += [_table(poetry, "group", group, "dependencies") for group in _TEST_EXTRAS]
    for table in tables:  # without versions: poetry has its own version syntax
        yield from (name for name in table if name != "python")


def _from_setup_cfg(config: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    yield from config.get("options", {}).get("install_requires", "").splitlines()
    extras = config.get("options.extras_require", {})
    yield from (line for extra in extras if extra in _TEST_EXTRAS for line in extras[extra].splitlines())


def _from_setup_py(text: str) -> Iterator[str]:
    """The literal requirement lists in the call of ``setup()``."""
    for node in ast.walk(SourceText(text.encode(errors="replace")).tree):
        if not isinstance(node, ast.keyword) or node.arg not in ("install_requires", "tests_require"):
            continue
        yield from _strings([getattr(item, "value", None) for item in getattr(node.value, "elts", ())])


def _from_imports(files: Mapping[str, str]) -> Iterator[str]:
    for path, text in files.items():
        if path.endswith(".py") and "test" in path:
            modules = re.findall(r"^\s*(?:import|from)\s+(\w+)", text, re.MULTILINE)
            yield from (_IMPORTED[module] for module in modules if module in _IMPORTED)


def _toml(text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def _config(text: str) -> Mapping[str, Mapping[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    return {section: dict(parser.items(section)) for section in parser.sections()}


def _table(table: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        inner = table.get(key)
        if not isinstance(inner, dict):
            return {}
        table = inner
    return table


def _strings(value: object) -> Iterable[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
