"""The pytest plugin that watches the hidden tests from inside their sandbox; :mod:`envs.swe.integrity` puts it there.

It runs on the repository's own Python and pytest, so it uses nothing newer than Python 3.6. It is imported before any
of the repository's code, notes what must not change from then on (the functions of pytest and unittest, the hidden
tests' files and code), and writes its report when pytest has come to its end. Where Python has audit hooks (3.8), one
notes what could be undone before anybody looks: swapped code, trace and profile functions.
"""

import doctest
import hashlib
import hmac
import json
import os
import sys
import time

_WATCHED = ("_pytest", "pytest", "pluggy", "unittest")
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_TRACING = frozenset({"sys.settrace", "sys.setprofile", "sys.monitoring.register_callback"})
_TOP = os.path.realpath(os.getcwd()) + os.sep
_frame = sys._getframe
_DOCTEST = doctest.DocTestRunner.run.__code__


def _ends_a_doctest(frame: object) -> bool:
    """Whether a call that sets the trace function is doctest's own, which sets none again after each example."""
    return getattr(frame, "f_code", None) is _DOCTEST and frame.f_locals.get("save_trace") is None  # type: ignore[attr-defined]


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
        for directory, _, names in os.walk(place, followlinks=True):
            paths += [os.path.join(directory, name) for name in names if not name.endswith(".pyc")]
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


def _hidden_functions(files: "dict[str, str]") -> "dict[str, object]":
    """Code by ``module.name`` and ``module.Class.name`` of every function in the modules of ``files``."""
    found = {}
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if not isinstance(source, str) or os.path.realpath(source) not in files:
            continue
        for key, value in list(vars(module).items()):
            members = list(vars(value).items()) if isinstance(value, type) and value.__module__ == name else []
            found[name + "." + key] = _code(value)
            found.update((".".join((name, key, inner)), _code(member)) for inner, member in members)
    return {key: code for key, code in found.items() if code is not None}


def _hooks() -> "dict[str, object]":
    """This thread's trace and profile functions by what sets them."""
    return {"sys.settrace": sys.gettrace(), "sys.setprofile": sys.getprofile()}


def _item_code(item: object) -> object:
    """The code of the function that a collected test calls, if it has one."""
    return _code(vars(item).get("_obj"))


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


class IntegrityMonitor:
    """One pytest session as it was seen."""

    def __init__(self, report: str, password: str, places: "list[str]", modules: "list[str]") -> None:
        self.report, self.password, self.places, self.modules = report, password, places, modules
        self.started = time.time()
        self.files = _digests(places)
        sources = [getattr(sys.modules.get(name), "__file__", None) for name in _WATCHED]
        self.directories = tuple(os.path.dirname(os.path.realpath(source)) + os.sep for source in sources if source)
        self.functions = _functions()
        self.outcomes: list[list[str]] = []
        self.changed: set[str] = set()
        self.hooks = _hooks()
        self.traced: set[str] = set()
        self.swapped: set[str] = set()
        self.hidden: dict[str, object] = {}
        self.items: dict[str, tuple[object, object]] = {}
        self.called: set[str] = set()
        self.shadowed = set(self._shadowed())

    def pytest_collectstart(self, collector: object) -> None:
        path = os.path.realpath(str(getattr(collector, "path", None) or getattr(collector, "fspath", "")))
        if path in self.files and _digests([path]).get(path) != self.files[path]:
            self.changed.add(path)

    def pytest_collection_finish(self, session: object) -> None:
        self._compare_files()
        self.hidden = _hidden_functions(self.files)
        self.items = {item.nodeid: (item, _item_code(item)) for item in getattr(session, "items", ())}

    def pytest_runtest_call(self, item: object) -> None:
        self.called.add(str(getattr(item, "nodeid", "")))
        self._compare_item(item)

    def pytest_runtest_teardown(self, item: object) -> None:
        self._compare_item(item)

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
        self._compare_hooks()
        now = _hidden_functions(self.files)
        self.swapped.update(key for key, code in self.hidden.items() if now.get(key) is not code)
        self.shadowed |= set(self._shadowed())
        root = os.path.realpath(str(getattr(config, "rootpath", None) or getattr(config, "rootdir", _TOP)))
        content = {
            "outcomes": [[_from_here(test, root), status] for test, status in self.outcomes],
            "changed": sorted(os.path.relpath(path, _TOP) for path in self.changed),
            "replaced": self._replaced(),
            "shadowed": sorted(self.shadowed),
            "plugins": self._plugins(config),
            "swapped": sorted(self.swapped),
            "traced": sorted(self.traced),
            "uncalled": sorted(test for test, status in self.outcomes if self._was_never_called(test, status)),
        }
        text = json.dumps(content).encode()
        seal = hmac.new(self.password.encode(), text, "sha256").hexdigest().encode()
        with open(self.report + ".new", "wb") as out:
            out.write(seal + b"\n" + text)
        os.rename(self.report + ".new", self.report)

    def _compare_files(self) -> None:
        now = _digests(self.places)
        # Files that tests make beside them are theirs to make.
        self.changed.update(path for path, digest in self.files.items() if now.get(path) != digest)

    def audit(self, event: str, arguments: "tuple[object, ...]") -> None:
        """What Python says of itself: a hook for ``sys.addaudithook``."""
        if event in _TRACING:
            if not _ends_a_doctest(_frame(1)):
                self.traced.add(event)
        elif event == "object.__setattr__" and arguments[1] == "__code__":
            function = arguments[0]
            source = os.path.realpath(getattr(_code(function), "co_filename", ""))
            if source in self.files or source.startswith(self.directories):
                self.swapped.add(getattr(function, "__module__", "") + "." + getattr(function, "__qualname__", ""))

    def _compare_hooks(self) -> None:
        """Trace and profile functions, where no audit hook tells of them."""
        self.traced.update(name for name, hook in _hooks().items() if hook is not self.hooks[name])

    def _compare_item(self, item: object) -> None:
        """Whether a test is still the one that was collected, and calls the same code."""
        self._compare_hooks()
        name = str(getattr(item, "nodeid", ""))
        known, code = self.items.get(name, (None, None))
        present = _item_code(item)
        if known is not item or "runtest" in vars(item) or (None not in (code, present) and code is not present):
            self.swapped.add(name)

    def _was_never_called(self, test: str, status: str) -> bool:
        return status in ("PASSED", "XPASS") and test not in self.called

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


def _open() -> "IntegrityMonitor | None":
    """The session's witness; None in a process that pytest started to help (the plugin is there for one)."""
    order = os.path.join(os.path.dirname(os.path.abspath(__file__)), "order.json")
    with open(order) as given:
        settings = given.read()
    if not settings:
        return None
    for path in (order, os.path.abspath(__file__)):  # nothing is left for the code under test to read
        open(path, "w").close()
    directory, module = os.path.split(os.path.splitext(os.path.abspath(__file__))[0])
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part != directory]
    for name, rest in {
        "PYTHONPATH": os.pathsep.join(parts),
        "PYTEST_ADDOPTS": os.environ.get("PYTEST_ADDOPTS", "").replace("-p " + module, "").strip(),
    }.items():
        os.environ.pop(name, None)
        if rest:
            os.environ[name] = rest
    witness = IntegrityMonitor(**json.loads(settings))
    if hasattr(sys, "addaudithook"):
        sys.addaudithook(witness.audit)
    return witness


_witness = _open()


def pytest_configure(config: object) -> None:
    if _witness is not None:
        config.pluginmanager.register(_witness)  # type: ignore[attr-defined]


def pytest_unconfigure(config: object) -> None:
    if _witness is not None:
        _witness.finish(config)
