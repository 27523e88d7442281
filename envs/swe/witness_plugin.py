"""The pytest plugin that watches the hidden tests from inside their box; :mod:`envs.swe.witness` puts it there.

It runs on the repository's own Python and pytest, so it uses nothing newer than Python 3.6. It is imported before any
of the repository's code, notes what must not change from then on (the functions of pytest and unittest, the hidden
tests' files), and writes its report when pytest has come to its end.
"""

import hashlib
import json
import os
import sys
import time

_WATCHED = ("_pytest", "pytest", "pluggy", "unittest")
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_TOP = os.path.realpath(os.getcwd()) + os.sep


def _from_repository(source: object) -> bool:
    """Whether a source file belongs to the repository, and not to an environment inside it."""
    if not isinstance(source, str):
        return False
    path = os.path.realpath(source)
    return path.startswith(_TOP) and not any(part in path for part in _INSTALLED)


def _digests(places: "list[str]") -> "dict[str, str]":
    """SHA-256 by path of the files at and below ``places``; links are followed."""
    found = {}
    for place in places:
        paths = [place]
        for folder, _, names in os.walk(place, followlinks=True):
            paths += [os.path.join(folder, name) for name in names if not name.endswith(".pyc")]
        for path in filter(os.path.isfile, map(os.path.realpath, paths)):
            with open(path, "rb") as content:
                found[path] = hashlib.sha256(content.read()).hexdigest()
    return found


def _code(value: object) -> object:
    return getattr(getattr(value, "__func__", value), "__code__", None)


def _functions() -> "dict[str, tuple[object, object]]":
    """Every attribute of the watched packages and of their classes: ``module.Class.name`` -> (object, its code)."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in _WATCHED or module is None:
            continue
        for key, value in list(vars(module).items()):
            found[name + "." + key] = (value, _code(value))
            if isinstance(value, type) and value.__module__ == name:
                members = list(vars(value).items())
                found.update((".".join((name, key, inner)), (member, _code(member))) for inner, member in members)
    return found


def _status(report: object) -> str:
    """A phase's status in the words of pytest's short summary; empty where the phase says nothing."""
    outcome, called = getattr(report, "outcome", ""), getattr(report, "when", "") == "call"
    if hasattr(report, "wasxfail"):
        return {"skipped": "XFAIL", "passed": "XPASS", "failed": "FAILED"}.get(outcome, "")
    if outcome == "failed":
        return "FAILED" if called else "ERROR"
    if outcome == "skipped":
        return "SKIPPED"
    return "PASSED" if called and outcome == "passed" else ""


def _from_here(test: str, root: str) -> str:
    """A test's name as the summary gives it: from the working directory, not from pytest's root."""
    path, mark, rest = test.partition("::")
    return os.path.relpath(os.path.join(root, path), _TOP).replace(os.sep, "/") + mark + rest if path else test


class Witness:
    """One pytest session as it was seen."""

    def __init__(self, report: str, password: str, places: "list[str]", modules: "list[str]") -> None:
        self.report, self.password, self.places, self.modules = report, password, places, modules
        self.started = time.time()
        self.files = _digests(places)
        self.functions = _functions()
        self.outcomes: list[list[str]] = []
        self.changed: set[str] = set()
        self.shadowed = set(self._shadowed())

    def pytest_collectstart(self, collector: object) -> None:
        path = os.path.realpath(str(getattr(collector, "path", None) or getattr(collector, "fspath", "")))
        if path in self.files and _digests([path]).get(path) != self.files[path]:
            self.changed.add(path)

    def pytest_collection_finish(self) -> None:
        self._compare_files()

    def pytest_collectreport(self, report: object) -> None:
        if getattr(report, "outcome", "") == "failed":
            self.outcomes.append([str(getattr(report, "nodeid", "")), "ERROR"])

    def pytest_runtest_logreport(self, report: object) -> None:
        status = _status(report)
        if status:
            self.outcomes.append([str(getattr(report, "nodeid", "")), status])

    def finish(self, config: object) -> None:
        """Write what was seen."""
        self._compare_files()
        self.shadowed |= set(self._shadowed())
        root = os.path.realpath(str(getattr(config, "rootpath", None) or getattr(config, "rootdir", _TOP)))
        content = {
            "password": self.password,
            "outcomes": [[_from_here(test, root), status] for test, status in self.outcomes],
            "changed": sorted(os.path.relpath(path, _TOP) for path in self.changed),
            "replaced": self._replaced(),
            "shadowed": sorted(self.shadowed),
            "plugins": self._plugins(config),
        }
        with open(self.report + ".new", "w") as out:
            json.dump(content, out)
        os.rename(self.report + ".new", self.report)

    def _compare_files(self) -> None:
        now = _digests(self.places)
        # Files that tests make beside them are theirs to make.
        self.changed.update(path for path, digest in self.files.items() if now.get(path) != digest)

    def _shadowed(self) -> "list[str]":
        """Modules of the standard library and of pytest that the repository gives instead."""
        return [name for name in self.modules if _from_repository(getattr(sys.modules.get(name), "__file__", None))]

    def _replaced(self) -> "list[str]":
        """Functions of pytest and unittest that are not what they were, unless an installed package changed them."""
        now, wrong = _functions(), []
        for key, (value, code) in self.functions.items():
            current, present = now.get(key, (None, None))
            if code is None or (current is value and present is code):
                continue
            source = getattr(present, "co_filename", None)
            if source is None or _from_repository(source):
                wrong.append(key)
        return sorted(wrong)

    def _plugins(self, config: object) -> "list[str]":
        """Plugins that the repository brought, other than by a conftest that was there before the tests began."""
        manager = getattr(config, "pluginmanager", None)
        sources = []
        for plugin in manager.get_plugins() if manager else ():
            module = sys.modules.get(type(plugin).__module__)
            source = getattr(plugin, "__file__", None) or getattr(module, "__file__", None)
            if not source or not _from_repository(source):
                continue
            known = os.path.basename(source) == "conftest.py" and os.path.isfile(source)
            if not known or os.stat(source).st_ctime > self.started:
                sources.append(os.path.relpath(source, _TOP))
        return sorted(set(sources))


def _open() -> "Witness | None":
    """The session's witness; None in a process that pytest started to help (the plugin is there for one)."""
    order = os.path.join(os.path.dirname(os.path.abspath(__file__)), "order.json")
    with open(order) as given:
        settings = given.read()
    if not settings:
        return None
    for path in (order, os.path.abspath(__file__)):  # nothing is left for the code under test to read
        open(path, "w").close()
    folder, module = os.path.split(os.path.splitext(os.path.abspath(__file__))[0])
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part != folder]
    for name, rest in {
        "PYTHONPATH": os.pathsep.join(parts),
        "PYTEST_ADDOPTS": os.environ.get("PYTEST_ADDOPTS", "").replace("-p " + module, "").strip(),
    }.items():
        os.environ.pop(name, None)
        if rest:
            os.environ[name] = rest
    return Witness(**json.loads(settings))


_witness = _open()


def pytest_configure(config: object) -> None:
    if _witness is not None:
        config.pluginmanager.register(_witness)  # type: ignore[attr-defined]


def pytest_unconfigure(config: object) -> None:
    if _witness is not None:
        _witness.finish(config)
