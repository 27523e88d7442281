"""The pytest plugin that monitors the hidden tests inside their sandbox; :mod:`envs.swe.integrity` installs it.

It runs on the repository's own Python and pytest, so it uses only features of Python 3.6. It is imported before the
repository's code, records what must not change (the functions of pytest and unittest, the hidden tests' files and
code), and writes its report when pytest ends. With audit hooks (Python 3.8) it also detects changes that are undone
before a check: swapped code, trace and profile functions.
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
    """Whether doctest itself sets the trace function: it resets it to None after each example."""
    return getattr(frame, "f_code", None) is _DOCTEST and frame.f_locals.get("save_trace") is None  # type: ignore[attr-defined]


def _from_repository(source: object) -> bool:
    """Whether a source file belongs to the repository and not to a virtual environment inside it."""
    if not isinstance(source, str):
        return False
    path = os.path.realpath(source)
    return path.startswith(_TOP) and not any(part in path for part in _INSTALLED)


def _digests(roots: "list[str]") -> "dict[str, str]":
    """SHA-256 by path of the files at and below ``roots``. Follows links."""
    digests = {}
    for root in roots:
        paths = [root]
        for directory, _, names in os.walk(root, followlinks=True):
            paths += [os.path.join(directory, name) for name in names if not name.endswith(".pyc")]
        for path in filter(os.path.isfile, map(os.path.realpath, paths)):
            with open(path, "rb") as content:
                digests[path] = hashlib.sha256(content.read()).hexdigest()
    return digests


def _code(value: object) -> object:
    return getattr(getattr(value, "__func__", value), "__code__", None)


def _functions() -> "dict[str, tuple[object, object]]":
    """All attributes of the watched packages and their classes: ``module.Class.name`` -> (object, its code)."""
    functions = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in _WATCHED or module is None:
            continue
        for key, value in list(vars(module).items()):
            functions[name + "." + key] = (value, _code(value))
            if isinstance(value, type) and value.__module__ == name:
                members = list(vars(value).items())
                functions.update((".".join((name, key, inner)), (member, _code(member))) for inner, member in members)
    return functions


def _hidden_functions(files: "dict[str, str]") -> "dict[str, object]":
    """Code by ``module.name`` and ``module.Class.name`` of all functions in the modules of ``files``."""
    codes = {}
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if not isinstance(source, str) or os.path.realpath(source) not in files:
            continue
        for key, value in list(vars(module).items()):
            members = list(vars(value).items()) if isinstance(value, type) and value.__module__ == name else []
            codes[name + "." + key] = _code(value)
            codes.update((".".join((name, key, inner)), _code(member)) for inner, member in members)
    return {key: code for key, code in codes.items() if code is not None}


def _hooks() -> "dict[str, object]":
    """This thread's trace and profile functions, by the function that sets them."""
    return {"sys.settrace": sys.gettrace(), "sys.setprofile": sys.getprofile()}


def _item_code(item: object) -> object:
    """The code of the function that a collected test calls, if it has one."""
    return _code(vars(item).get("_obj"))


def _status(report: object) -> str:
    """A phase's status as in pytest's short summary, or empty if the phase has none."""
    outcome, called = getattr(report, "outcome", ""), getattr(report, "when", "") == "call"
    if hasattr(report, "wasxfail"):
        return {"skipped": "XFAIL", "passed": "XPASS", "failed": "FAILED"}.get(outcome, "")
    if outcome == "failed":
        return "FAILED" if called else "ERROR"
    if outcome == "skipped":
        return "SKIPPED"
    return "PASSED" if called and outcome == "passed" else ""


def _relative_to_workdir(test: str, root: str) -> str:
    """A test's name as in the summary: relative to the working directory instead of pytest's root."""
    path, mark, rest = test.partition("::")
    return os.path.relpath(os.path.join(root, path), _TOP).replace(os.sep, "/") + mark + rest if path else test


class SessionMonitor:
    """Observes one pytest session."""

    def __init__(self, report: str, password: str, watched_paths: "list[str]", modules: "list[str]") -> None:
        self.report, self.password, self.watched_paths, self.modules = report, password, watched_paths, modules
        self.started = time.time()
        self.files = _digests(watched_paths)
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
        """Write the report."""
        self._compare_files()
        self._compare_hooks()
        now = _hidden_functions(self.files)
        self.swapped.update(key for key, code in self.hidden.items() if now.get(key) is not code)
        self.shadowed |= set(self._shadowed())
        root = os.path.realpath(str(getattr(config, "rootpath", None) or getattr(config, "rootdir", _TOP)))
        content = {
            "outcomes": [[_relative_to_workdir(test, root), status] for test, status in self.outcomes],
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
        now = _digests(self.watched_paths)
        # Tests may create new files beside them.
        self.changed.update(path for path, digest in self.files.items() if now.get(path) != digest)

    def audit(self, event: str, arguments: "tuple[object, ...]") -> None:
        """The hook for ``sys.addaudithook``."""
        if event in _TRACING:
            if not _ends_a_doctest(_frame(1)):
                self.traced.add(event)
        elif event == "object.__setattr__" and arguments[1] == "__code__":
            function = arguments[0]
            source = os.path.realpath(getattr(_code(function), "co_filename", ""))
            if source in self.files or source.startswith(self.directories):
                self.swapped.add(getattr(function, "__module__", "") + "." + getattr(function, "__qualname__", ""))

    def _compare_hooks(self) -> None:
        """Record changed trace and profile functions, for a Python without audit hooks."""
        self.traced.update(name for name, hook in _hooks().items() if hook is not self.hooks[name])

    def _compare_item(self, item: object) -> None:
        """Record a test that is not the collected one or calls other code."""
        self._compare_hooks()
        name = str(getattr(item, "nodeid", ""))
        known, code = self.items.get(name, (None, None))
        present = _item_code(item)
        if known is not item or "runtest" in vars(item) or (None not in (code, present) and code is not present):
            self.swapped.add(name)

    def _was_never_called(self, test: str, status: str) -> bool:
        return status in ("PASSED", "XPASS") and test not in self.called

    def _shadowed(self) -> "list[str]":
        """Modules of the standard library and pytest that were imported from the repository."""
        return [name for name in self.modules if _from_repository(getattr(sys.modules.get(name), "__file__", None))]

    def _replaced(self) -> "list[str]":
        """Functions of pytest and unittest that changed, except those that an installed package changed."""
        now, replaced = _functions(), []
        for key, (value, code) in self.functions.items():
            current, present = now.get(key, (None, None))
            if code is None or (current is value and present is code):
                continue
            source = getattr(present, "co_filename", None)
            if source is None or _from_repository(source):
                replaced.append(key)
        return sorted(replaced)

    def _plugins(self, config: object) -> "list[str]":
        """Plugins from the repository, except a conftest.py that existed before the tests started."""
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


def _start_monitor() -> "SessionMonitor | None":
    """The session's monitor. None in a worker process that pytest started: the first process emptied the settings."""
    settings_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "settings.json")
    with open(settings_path) as file:
        settings = file.read()
    if not settings:
        return None
    for path in (settings_path, os.path.abspath(__file__)):  # the code under test could read them
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
    monitor = SessionMonitor(**json.loads(settings))
    if hasattr(sys, "addaudithook"):
        sys.addaudithook(monitor.audit)
    return monitor


_monitor = _start_monitor()


def pytest_configure(config: object) -> None:
    if _monitor is not None:
        config.pluginmanager.register(_monitor)  # type: ignore[attr-defined]


def pytest_unconfigure(config: object) -> None:
    if _monitor is not None:
        _monitor.finish(config)
