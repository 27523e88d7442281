"""The small repository in which the recorded turns of ``r2egym_scripts.py`` run."""

from __future__ import annotations

from collections.abc import Mapping

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
