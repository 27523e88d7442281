"""The pytest plugin that keeps hidden tests and the code that they test in two sandboxes; :mod:`envs.swe.apart`
loads it.

What the tests import of the repository (all of it but the hidden tests) is imported in the other sandbox. Here stand
proxies, whose attributes, calls and operators are asked for there. Values of built-in types are copied, so that they
are compared here: of what the other sandbox sends only values and numbers of objects are taken, and no code.
"""

import contextlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import pickle
import sys
import threading
import time
import types
from typing import Any

from agent_rl_wire import GONE, TYPES, Ended, Wire  # type: ignore[import-not-found]

_WAIT = 150.0  # the other sandbox's command may wait for its turn behind tool calls
_PRIVATE = ("_pytest", "pytest", "__test__", "__unittest", "__tracebackhide__", "__wrapped__", "__signature__")
"""Attributes that pytest, unittest and inspect look for: the code under test has no say in how tests are run."""
_OWN = frozenset({"__eq__", "__ne__", "__hash__", "__instancecheck__", "__class__", "__dict__"})


def _number(value: Any) -> "int | None":
    """The number of the object in the other sandbox that a proxy stands for."""
    found = getattr(type(value), "_far", None)
    return found(value) if found is not None else None


class Far:
    """A proxy. Its class has the special methods of the class there (:meth:`Link.kind`)."""

    def _far(self) -> "int | None":
        return vars(self).get("_number")

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_PRIVATE) or self._far() is None:
            raise AttributeError(name)
        return _link.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _link.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        _link.ask("delete", self, name)


class Thing(Far):
    """A proxy of an object that is no value of a built-in class: it equals no value, whatever it says of itself."""

    @property
    def __class__(self) -> type:
        kind = type(self)
        if "_class" not in vars(kind):
            type.__setattr__(kind, "_class", _link.ask("get", self, "__class__"))
        return vars(kind)["_class"]

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("an object of the code under test keeps its class")

    def __mro_entries__(self, bases: object) -> "tuple[type, ...]":
        raise TypeError("tests of an isolated task can't derive from classes of the code under test")

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        return bool(_link.ask("equal", self, other)) if _number(other) is not None else NotImplemented

    def __ne__(self, other: Any) -> bool:
        same = self.__eq__(other)
        return same if same is NotImplemented else not same

    def __hash__(self) -> int:
        return _link.ask("hash", self)

    def __instancecheck__(self, value: Any) -> bool:
        if _number(value) is None and type(value) not in TYPES.values():
            return False
        return bool(_link.ask("method", self, "__instancecheck__", (value,), {}))


class Module(types.ModuleType):
    """A module of the other sandbox."""

    def _far(self) -> "int | None":
        return vars(self).get("_number")

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_PRIVATE) or "_number" not in vars(self):
            raise AttributeError(name)
        return _link.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name[:2] == name[-2:] == "__":
            super().__setattr__(name, value)
        elif not isinstance(value, Module):  # a module below, which the import of this side sets
            _link.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        _link.ask("delete", self, name)


class ErrorClass(type):
    """The class of exception classes of the other sandbox: real ones here, so that they can be raised and caught."""

    def _far(cls) -> "int | None":
        return cls.__dict__.get("_class")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _link.ask("call", cls, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _link.ask("get", cls, name)


class Error(Far):
    """An exception of the other sandbox."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # what raises and handles it sets its own attributes

    def __str__(self) -> str:
        return str(_link.ask("method", self, "__str__", (), {}))

    def __repr__(self) -> str:
        return str(_link.ask("method", self, "__repr__", (), {}))


def _forwarded(name: str) -> Any:
    def method(self: object, *args: Any, **kwargs: Any) -> Any:
        return _link.ask("method", self, name, args, kwargs)

    method.__name__ = name
    return method


class Link(Wire):
    """The tests' end."""

    def __init__(self, read: Any, write: Any) -> None:
        super().__init__(read, write)
        self._lock = threading.RLock()
        self._proxies: dict[Any, Any] = {}
        self._kinds: dict[Any, type] = {}
        self._locals: list[Any] = []

    def ask(self, what: str, *arguments: Any) -> Any:
        """The other sandbox's answer. Raises what was raised there, or ``Ended``."""
        with self._lock:
            try:
                self.send([what, *map(self.encode, arguments)])
            except BrokenPipeError:  # pytest would take it for one of its own output
                raise Ended(GONE) from None
            return self.answer()

    def answer(self) -> Any:
        while True:
            what, *arguments = self.receive()
            if what == "print":
                getattr(sys, "stderr" if arguments[0] == "stderr" else "stdout").write(str(arguments[1]))
                continue
            values = [self.decode(argument) for argument in arguments]
            if what == "value":
                return values[0]
            if what == "raise":
                raise values[0] if isinstance(values[0], BaseException) else Ended("raised what can't be")
            self._oblige(self.do_callback if what == "callback" else self.do_attribute, values)

    def do_callback(self, function: Any, args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> Any:
        return function(*args, **kwargs)

    def do_attribute(self, value: Any, name: str) -> Any:
        """An attribute of a file, or of an object of a class that the tests define: nothing leads on from there to
        what runs them."""
        source = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
        if name.startswith("_") or not (isinstance(value, io.IOBase) or os.path.realpath(source) in _hidden):
            raise AttributeError(name)
        return getattr(value, name)

    def _oblige(self, do: Any, values: "list[Any]") -> None:
        try:
            answer = ["value", self.encode(do(*values))]
        except BaseException as error:
            answer = ["raise", self._error(error)]
        self.send(answer)

    def _error(self, error: BaseException) -> Any:
        name = next(kind.__name__ for kind in type(error).__mro__ if TYPES.get(kind.__name__) is kind)
        return self.encode(error) if _number(error) is not None else {"e": name, "a": self.encode((str(error),))}

    def encode(self, value: Any) -> Any:
        number = _number(value)
        return super().encode(value) if number is None else {"r": number}

    def refer(self, value: Any) -> Any:
        if isinstance(value, BaseException):
            return self._error(value)
        if isinstance(value, types.TracebackType):
            return None
        if not isinstance(value, types.FunctionType):
            with contextlib.suppress(Exception):
                return {"g": _pickled(value).hex()}
        self._locals.append(value)
        named = {name: getattr(value, name, None) for name in ("__name__", "__qualname__", "__doc__", "__module__")}
        return {"o": len(self._locals) - 1, "w": {name: text for name, text in named.items() if isinstance(text, str)}}

    def resolve(self, given: "dict[str, Any]") -> Any:
        if "o" in given:
            return self._locals[int(given["o"])]
        if "e" in given:
            kind = TYPES[given["e"]]
            return kind(*self.decode(given["a"])) if issubclass(kind, BaseException) else None
        if "m" in given:
            return self._module(given)
        if "x" in given:
            return self._error_class(given)
        if given["r"] not in self._proxies:
            self._proxies[given["r"]] = self._proxy(given)
        return self._proxies[given["r"]]

    def _module(self, given: "dict[str, Any]") -> Module:
        number = given["m"]
        if number not in self._proxies:
            module = self._proxies[number] = Module(str(given["n"]))
            vars(module)["_number"] = number
            if given["p"]:
                module.__path__ = given["p"]
        return self._proxies[number]

    def _error_class(self, given: "dict[str, Any]") -> type:
        number = given["x"]
        if number not in self._proxies:
            bases = [self.decode(base) for base in given["u"]]
            bases = [base for base in bases if isinstance(base, type) and issubclass(base, BaseException)]
            mixin = () if any(isinstance(base, ErrorClass) for base in bases) else (Error,)
            names = {"_class": number, "__module__": "the_code_under_test"}
            self._proxies[number] = ErrorClass(str(given["n"]), (*mixin, *bases), names)
        return self._proxies[number]

    def _proxy(self, given: "dict[str, Any]") -> Any:
        if "a" in given:
            kind, args = self.decode(given["k"]), self.decode(given["a"])
            proxy = BaseException.__new__(kind, *args)
            proxy.args = args
        elif "z" in given:
            base = TYPES[given["z"]]
            value = self.decode(given["v"])
            proxy = base.__new__(self._kind(given, base), value)
            if base in (list, set, dict):
                base.__init__(proxy, value)
        else:
            proxy = self._kind(given, None)()
        vars(proxy)["_number"] = given["r"]
        return proxy

    def _kind(self, given: "dict[str, Any]", base: Any) -> type:
        key = (given["k"], base)
        if key not in self._kinds:
            names = [str(name) for name in given.get("h", ())]
            members = {name: _forwarded(name) for name in names if name not in _OWN and not name.startswith("_pytest")}
            bases = (Far, base) if base else (Thing,)
            self._kinds[key] = type(str(given.get("n", "value")), bases, members)
        return self._kinds[key]


def _pickled(value: Any) -> bytes:
    """A value of the standard library's, or the name of one of its functions or classes. Raises where it is neither."""
    kind = value if isinstance(value, (type, types.BuiltinFunctionType)) else type(value)
    source = getattr(sys.modules.get(str(kind.__module__)), "__file__", None) or ""
    if "-packages" in source or source.startswith(_top):
        raise TypeError("of no module that the other sandbox surely has")
    return pickle.dumps(value, 2)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of the repository, but not the hidden tests, in the other sandbox."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and not self._is_the_codes(spec):
            return None
        if not _link.ask("find", name, sys.path):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def _is_the_codes(self, spec: importlib.machinery.ModuleSpec) -> bool:
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        within = [os.path.realpath(place) for place in places]
        if not any(place.startswith(_top + os.sep) for place in within):
            return False
        return not any(path == place or path.startswith(place + os.sep) for path in _hidden for place in within)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return _link.ask("module", spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def _connect(directory: str) -> Link:
    """The link to the other sandbox; ends this process where that does not answer in time."""
    deadline = time.time() + _WAIT
    while True:
        try:
            write = os.open(os.path.join(directory, "asked"), os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:
            if time.time() > deadline:
                os._exit(75)
            time.sleep(0.005)
    os.set_blocking(write, True)
    answers = os.open(os.path.join(directory, "answered"), os.O_RDONLY)
    link = Link(os.fdopen(answers, "rb", 1 << 16), os.fdopen(write, "wb", 1 << 16))
    link.answer()
    return link


with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "order.json")) as _given:
    _settings = json.load(_given)
_top = os.path.realpath(os.getcwd())
_hidden = frozenset(os.path.join(_top, path) for path in _settings["hidden"])
_link = _connect(_settings["pipes"])
sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder), Finder())
