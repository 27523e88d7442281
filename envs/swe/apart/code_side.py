"""Runs the code under test for hidden tests that run in another sandbox: imports it, and does what the tests ask for.

All of this is at the mercy of the code under test, and so is every answer. What keeps the tests safe is the other end
(:mod:`envs.swe.apart.tests_side`), which takes nothing from here but values and numbers of objects.
"""

import importlib
import importlib.util
import io
import os
import pickle
import sys
import types
from typing import Any

from agent_rl_wire import TYPES, Ended, Wire  # type: ignore[import-not-found]

_VALUES = (str, bytes, int, float, tuple, list, dict, set, frozenset)
_LEFT_OUT = frozenset(
    [
        *("__class__", "__new__", "__init__", "__del__", "__init_subclass__", "__subclasshook__", "__prepare__"),
        *("__getattribute__", "__getattr__", "__setattr__", "__delattr__", "__get__", "__set__", "__delete__"),
        *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__"),
        *("__eq__", "__ne__", "__hash__", "__sizeof__", "__mro_entries__", "__set_name__", "__class_getitem__"),
    ]
)


class Local:
    """A function or another object of the tests', which can be called; files and objects of classes that the tests
    define have attributes too."""

    def __init__(self, link: "Link", given: "dict[str, Any]") -> None:
        self._link, self._number = link, given["o"]
        self.__dict__.update(given["w"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("callback", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._link.ask("attribute", self, name)


class Printed(io.TextIOBase):
    """Standard output or error of the code under test: the tests print it, so that they can capture it."""

    def __init__(self, link: "Link", name: str) -> None:
        self._link, self._name = link, name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._link.send(["print", self._name, str(text)])
        return len(text)


class Link(Wire):
    """The end of the code under test."""

    def __init__(self, read: Any, write: Any, top: str) -> None:
        super().__init__(read, write)
        self._top = top
        self._objects: dict[int, Any] = {}
        self._kinds: dict[int, type] = {}
        self._locals: dict[int, Local] = {}

    def ask(self, what: str, *arguments: Any) -> Any:
        """Ask the tests; meanwhile do what they ask."""
        self.send([what, *map(self.encode, arguments)])
        return self.serve()

    def serve(self) -> Any:
        """Do what the tests ask until they answer."""
        while True:
            what, *arguments = self.receive()
            values = [self.decode(argument) for argument in arguments]
            if what == "value":
                return values[0]
            if what == "raise":
                raise values[0]
            self._do(what, values)

    def _do(self, what: str, values: "list[Any]") -> None:
        try:
            answer = ["value", self.encode(getattr(self, "do_" + what)(*values))]
        except BaseException as error:
            answer = ["raise", self._error(error)]
        self.send(answer)

    def do_find(self, name: str, path: "list[str]") -> bool:
        """Whether ``name`` is a module of the repository."""
        sys.path[:] = path
        importlib.invalidate_caches()
        spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
        places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
        return any(os.path.realpath(place).startswith(self._top + os.sep) for place in places)

    def do_module(self, name: str) -> Any:
        return importlib.import_module(name)

    def do_get(self, value: Any, name: str) -> Any:
        if name == "__all__" and isinstance(value, types.ModuleType) and not hasattr(value, name):
            return [name for name in vars(value) if not name.startswith("_")]
        return getattr(value, name)

    def do_set(self, value: Any, name: str, new: Any) -> None:
        setattr(value, name, new)

    def do_delete(self, value: Any, name: str) -> None:
        delattr(value, name)

    def do_call(self, function: Any, args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> Any:
        return function(*args, **kwargs)

    def do_method(self, value: Any, name: str, args: "tuple[Any, ...]", kwargs: "dict[str, Any]") -> Any:
        if name == "__getitem__":
            return value[args[0]]
        return getattr(type(value), name)(value, *args, **kwargs)

    def do_equal(self, one: Any, other: Any) -> bool:
        return bool(one == other)

    def do_hash(self, value: Any) -> int:
        return hash(value)

    def _error(self, error: BaseException) -> Any:
        try:
            return self.encode(error)
        except Exception:
            return {
                "e": type(error).__name__ if type(error).__name__ in TYPES else "Exception",
                "a": {"t": [str(error)]},
            }

    def refer(self, value: Any) -> Any:
        if isinstance(value, Local):
            return {"o": value._number}
        if type(value) in TYPES.values() and isinstance(value, BaseException):
            return {"e": type(value).__name__, "a": self.encode(value.args)}
        self._objects[id(value)] = value
        given: dict[str, Any] = {"r": id(value)}
        if isinstance(value, types.ModuleType):
            return {"m": id(value), "n": value.__name__, "p": [str(part) for part in getattr(value, "__path__", ())]}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"x": id(value), "n": value.__name__, "u": [self.encode(base) for base in value.__bases__]}
        if isinstance(value, BaseException):
            return {"r": id(value), "k": self.encode(type(value)), "a": self.encode(value.args)}
        kind = type(value)
        given["k"] = id(kind)
        if id(kind) not in self._kinds:
            self._kinds[id(kind)] = kind
            given["n"], given["h"] = (
                kind.__name__,
                [*_special(kind), *(["__getitem__"] if isinstance(value, type) else [])],
            )
        for base in _VALUES:
            if isinstance(value, base):
                given["v"], given["z"] = self.encode(_plain(base, value)), base.__name__
                break
        return given

    def resolve(self, given: "dict[str, Any]") -> Any:
        if "r" in given:
            return self._objects[given["r"]]
        if "g" in given:
            return pickle.loads(bytes.fromhex(given["g"]))
        if "e" in given:
            return TYPES[given["e"]](*self.decode(given["a"]))
        return self._locals.setdefault(given["o"], Local(self, given))


def _plain(base: Any, value: Any) -> Any:
    """A subclass's value as one of its base class."""
    if base is dict:
        return dict(dict.items(value))
    if base in (int, float):
        return base.__new__(base, value)
    return str.__str__(value) if base is str else base(base.__iter__(value))


def _special(kind: type) -> "list[str]":
    """The special methods that a class has, or, of one that is also a value of a built-in class, overrides."""
    values = [base for base in _VALUES if issubclass(kind, base)]
    found: set[str] = set()
    for base in kind.__mro__:
        if base is object or base in values:
            break
        found.update(name for name in vars(base) if not values or not name.startswith("_") or name.endswith("__"))
    return sorted(
        name
        for name in found
        if name not in _LEFT_OUT and (values or name[:2] == name[-2:] == "__") and callable(getattr(kind, name, None))
    )


def main() -> None:
    directory, top = sys.argv[1:]
    read = os.fdopen(os.open(os.path.join(directory, "asked"), os.O_RDWR), "rb", 1 << 16)
    write = os.fdopen(os.open(os.path.join(directory, "answered"), os.O_RDWR), "wb", 1 << 16)
    link = Link(read, write, os.path.realpath(top))
    link.send(["value", True])
    sys.stdout, sys.stderr = Printed(link, "stdout"), Printed(link, "stderr")
    try:
        link.serve()
    except Ended:
        os._exit(0)


main()
