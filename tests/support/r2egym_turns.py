"""Turns of an agent in R2E-Gym's scaffold, drawn from a seed: calls, right and wrong, on a small repository.

:func:`sequences` gives the same ones everywhere. ``r2egym_scripts.py`` beside this file has R2E-Gym's
own scripts answer them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

COUNT = 200
TURNS = 6

_SHORT = '''"""A short module."""

import math


def area(radius):
    """The area of a circle."""
    if radius < 0:
        raise ValueError("negative")
    return math.pi * radius ** 2


class Shape:
    """A shape.

    It has a name,
    a colour,
    and sides.
    """

    sides = 0

    def name(self):
        return "shape"
'''
_FUNCTION = '''
@wrapped(
    {n},
)
def function_{n}(first, second={n}):
    """Function {n}."""

    def inner(value):
        total = value + {n}
        total *= 2
        total -= 1
        return total

    return inner(first) + second


async def later_{n}(): return {n}

'''
_LONG = "import os\n\nVALUES = [\n" + "".join(f"    {n},\n" for n in range(12)) + "]\n"
_LONG += "".join(_FUNCTION.format(n=n) for n in range(8))

FILES: Mapping[str, str] = {
    "README.md": "# A repository\n\nIt has shapes.\n",
    "data/table.csv": "name,sides\nsquare,4\n",
    "pkg/__init__.py": "",
    "pkg/short.py": _SHORT,
    "pkg/long.py": _LONG,
    "pkg/big.py": "".join(f"NUMBER_{n} = {'x' * 90!r}\n" for n in range(105)),
    "pkg/broken.py": "def broken(:\n    pass\n" + "# more\n" * 115,
    "pkg/words.py": "# Привет, мир: круг и квадрат, площадь и сторона\nNAMES = ['круг', 'квадрат']\n",
    "pkg/tabs.py": "def tabbed():\n\tvalue = 1  \n\tif value:\n\t\treturn value\n\n\n\treturn None",
    "pkg/feed.py": "FIRST = 1\n\x0cSECOND = 2\nTHIRD = 3\n",
    "deep/a/b/c.py": "def circle():\n    return 'circle'\n",
    ".hidden/secret.py": "circle = 'hidden'\n",
    "pkg/.dot.py": "circle = 'hidden'\n",
    **{f"many/m{n:03d}.py": f"COMMON = {n}\n{'SHARED = 1' if n < 90 else ''}\n" for n in range(104)},
}

_PATHS = (
    *("pkg/short.py", "/testbed/pkg/short.py", "./pkg//short.py", "pkg/long.py", "/testbed/pkg/long.py"),
    *("pkg/words.py", "pkg/tabs.py", "pkg/feed.py", "pkg/__init__.py", "pkg/broken.py", "pkg/big.py", "deep/a/b/c.py"),
    *("pkg", "/testbed", ".", "", "nope.py", "nope/x.py", "README.md", "data/table.csv", "new.py", "pkg/new.py"),
)
_EDITED = ("pkg/short.py", "/testbed/pkg/short.py", "pkg/tabs.py", "pkg/words.py", "new.py", "pkg/long.py", "README.md")
_NEW_TEXTS = (
    "x = 1",
    "def f():\n\treturn 1\n\n# end",
    "",
    "def broken(:\n    pass",
    "# конец",
    "a\n" * 30,
    "Z" * 12_000,
)
_OLD_TEXTS = (
    *("import math", "    return math.pi * radius ** 2", "return", "nothing like it", "", "def area(radius):\n    "),
    *('"""A short module."""', "value = 1  \n\tif value:", "NAMES", "# A repository", "x = 1", "круг", "sides = 0\n\n"),
)
_COMMANDS = (
    *("echo hello", "printf 'a\\nb\\n'; printf 'oops\\n' >&2", "false", "exit 3", "exit 124", "seq 1 100", "seq 1 80"),
    *("seq 1 81 >&2", "cd pkg && ls", "ls pkg | sort", "  cd", "pip list", "nohup ls", "pipx", "cd.. ", "", "   "),
    *("cat pkg/short.py | head -5", "printf '\\033[31mred\\033[0m\\r\\n'", "printf '\\033[31mred\\033[0m'; exit 2"),
    *(
        "echo $0 | sed 's/.*sh$/sh/'",
        "[ 1 == 1 ] 2>/dev/null; echo $?",
        "kill -9 $$",
        "pwd",
        "echo one > made.py; cat made.py",
    ),
    *(
        "printf 'x = 1\\n' > pkg/new.py",
        "rm -f new.py",
        "printf 'a\\rb\\n'",
        "test -f new.py && cat new.py",
        "true",
        "-x",
    ),
    *("printf '\\n\\n  padded  \\n\\n'", "ls --no-such-option 2>/dev/null", "printf 'line %s\\n' 1 2 3 | grep -n 2"),
)
_TERMS = (
    *(
        "circle",
        "def",
        "^def",
        "def [a-f]",
        "COMMON",
        "SHARED",
        "import",
        "no such thing",
        "[",
        "",
        "круг",
        "sides",
        ".",
    ),
    *("Shape", "return .*pi", "- x y", "a\\|b", "x = 1", "*", '"', "  def", "def\nclass"),
)


def _xml(name: str, arguments: Sequence[tuple[str, str]]) -> str:
    parameters = "".join(f"  <parameter={key}>{value}</parameter>\n" for key, value in arguments)
    return f"<function={name}>\n{parameters}</function>"


def _view(rng: random.Random) -> str:
    path = rng.choice(_PATHS)
    more: list[tuple[str, str]] = []
    if rng.random() < 0.45:
        first, last = rng.randint(-1, 120), rng.choice([-1, rng.randint(0, 130)])
        form = rng.choice(["[{}, {}]", "({}, {})", "{}, {}", "{} {}", "[{},{}]", "[{}]", "[{}, {}, 3]", "[a, b]"])
        more.append(("view_range", form.format(first, last)))
    if rng.random() < 0.3:
        more.append(("concise", rng.choice(["True", "true", "False", "yes", ""])))
    if rng.random() < 0.1:
        more.append(("python_only", rng.choice(["False", "True"])))
    rng.shuffle(more)
    return _xml("file_editor", [("command", "view"), ("path", path), *more])


def _create(rng: random.Random) -> str:
    given = [
        ("command", "create"),
        ("path", rng.choice(["new.py", "pkg/new.py", "nope/x.py", "pkg", "notes.txt", "README.md"])),
    ]
    if rng.random() < 0.9:
        given.append(("file_text", rng.choice(_NEW_TEXTS)))
    return _xml("file_editor", [*given, *_linting(rng)])


def _replace(rng: random.Random) -> str:
    given = [("command", "str_replace"), ("path", rng.choice(_EDITED))]
    if rng.random() < 0.95:
        given.append(("old_str", rng.choice(_OLD_TEXTS)))
    if rng.random() < 0.9:
        given.append(("new_str", rng.choice(_NEW_TEXTS)))
    return _xml("file_editor", [*given, *_linting(rng)])


def _insert(rng: random.Random) -> str:
    given = [("command", "insert"), ("path", rng.choice(_EDITED))]
    if rng.random() < 0.9:
        given.append(("insert_line", rng.choice(["0", "1", "3", "7", "20", "25", "400", "-1", "two", " 5 "])))
    if rng.random() < 0.9:
        given.append(("new_str", rng.choice(_NEW_TEXTS)))
    return _xml("file_editor", [*given, *_linting(rng)])


def _undo(rng: random.Random) -> str:
    return _xml("file_editor", [("command", "undo_edit"), ("path", rng.choice([*_EDITED, "pkg/new.py", "pkg"]))])


def _odd_edit(rng: random.Random) -> str:
    odd: list[list[tuple[str, str]]] = [
        [("command", "delete"), ("path", "pkg/short.py")],
        [("path", "pkg/short.py")],
        [("command", "view")],
        [("command", "view"), ("path", "pkg/short.py"), ("lines", "3")],
        [("command", "view"), ("path", "pkg/short.py"), ("view", "[1, 2]")],
        [("path", "pkg/short.py"), ("command", "view"), ("path", "pkg/tabs.py")],
        [("command", "str_replace"), ("path", "pkg/short.py"), ("old_str", "-x"), ("new_str", "y")],
    ]
    return _xml("file_editor", rng.choice(odd))


def _linting(rng: random.Random) -> list[tuple[str, str]]:
    return [("enable_linting", rng.choice(["True", "False", ""]))] if rng.random() < 0.3 else []


def _bash(rng: random.Random) -> str:
    command = rng.choice(_COMMANDS)
    key = "cmd" if rng.random() < 0.95 else rng.choice(["command", "cm", "code"])
    return _xml("execute_bash", [(key, command)])


def _search(rng: random.Random) -> str:
    given = [("search_term", rng.choice(_TERMS))] if rng.random() < 0.97 else []
    if rng.random() < 0.75:
        given.append(("path", rng.choice([*_PATHS, "many", "deep"])))
    if rng.random() < 0.15:
        given.append(("python_only", rng.choice(["False", "True", ""])))
    return _xml("search", given)


def _odd_text(rng: random.Random) -> str:
    return rng.choice(
        [
            "I have no call to make.",
            "<function=execute_bash>\n<parameter=cmd>echo unclosed\n</function>",
            "<function=execute_bash>\n<parameter=cmd>echo first\n<parameter=cmd>echo second</parameter>\n</function>",
            "<function=execute_bash>\n<parameter=cmd>echo one</parameter>\ntext between\n"
            "<parameter=cmd>echo two</parameter>\n</function>",
            "<function = execute_bash><parameter=cmd>echo spaced</parameter></function>",
            "<function=execute_bash><parameter = cmd >\n\n  echo spaced  \n\n</parameter></function> and more",
            "<function=></function>",
            "<function=  >\n</function>",
            "<function=execute_bash>\n<parameter=cmd>echo never ends</parameter>",
            "<think><function=execute_bash><parameter=cmd>echo thought</parameter></function></think>",
            "<function=execute_bash>\n<parameter=cmd>echo '</function>'</parameter>\n</function>",
            _xml("execute_bash", [("cmd", "echo a")]) + "\n" + _xml("execute_bash", [("cmd", "echo b")]),
            _xml("finish", [("command", "done")]),
            _xml("finish", [("command", "submit"), ("result", "all done")]),
        ]
    )


_KINDS: Sequence[tuple[int, Callable[[random.Random], str]]] = (
    *((5, _view), (2, _create), (3, _replace), (3, _insert), (2, _undo), (1, _odd_edit)),
    *((5, _bash), (5, _search), (2, _odd_text)),
)


def sequences() -> list[list[str]]:
    """``COUNT`` sequences of ``TURNS`` turns' texts."""
    weights, kinds = zip(*_KINDS, strict=True)
    made = []
    for index in range(COUNT):
        rng = random.Random(f"r2egym {index}")
        made.append([kind(rng) for kind in rng.choices(kinds, weights, k=TURNS)])
    return made
