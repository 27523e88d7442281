"""From a template to one concrete function, its seeded bug, and the calls that tell the two apart."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from envs.mini.templates import LOCAL_NAMES, LOOP_NAMES, NAMES, NOUNS, Template

_SITE = re.compile(r"\[\[(.+?\|\|[a-z_]+)\]\]")
_WORDS = (
    "ab",
    "cat",
    "dog",
    "sun",
    "level",
    "noon",
    "code",
    "tree",
    "red",
    "box",
    "ant",
    "map",
    "oak",
    "radar",
    "stop",
)
_CHARS = "aboestx"


@dataclass(frozen=True, slots=True)
class Bug:
    """One way to break a function: its ``family`` and the whole broken source."""

    family: str
    source: str


@dataclass(frozen=True, slots=True)
class Function:
    """A correct function of a generated repository: ``kinds`` are the kinds of its arguments."""

    template: str
    name: str
    kinds: tuple[str, ...]
    source: str
    bugs: tuple[Bug, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A call and what it gives; ``result`` is a repr, or ``raises X``."""

    call: str
    result: str


def build_function(template: Template, rng: random.Random, taken: set[str]) -> Function:
    """One function of ``template`` with names and constants drawn from ``rng``; its name is not in ``taken``."""
    name = f"{rng.choice(template.verbs)}_{rng.choice(NOUNS)}"
    while name in taken:
        name = f"{rng.choice(template.verbs)}_{rng.choice(NOUNS)}"
    values = {"f": name, "k": str(rng.randint(2, 9)), "v": rng.choice(LOOP_NAMES)}
    used: set[str] = set()
    for slot, kind in zip("abc", template.kinds, strict=False):
        values[slot] = rng.choice([word for word in NAMES[kind] if word not in used])
        used.add(values[slot])
    values["t"] = rng.choice([word for word in LOCAL_NAMES if word not in used])
    marked = template.source
    for slot, text in values.items():
        marked = marked.replace("{" + slot + "}", text)
    source = _SITE.sub(lambda site: site.group(1).split("||")[0], marked)
    return Function(template.key, name, template.kinds, source, tuple(_bugs(marked, source)))


def _bugs(marked: str, source: str) -> Iterator[Bug]:
    sites = list(_SITE.finditer(marked))
    for site in sites:
        parts = site.group(1).split("||")
        for bad, family in zip(parts[1::2], parts[2::2], strict=True):
            broken = marked[: site.start()] + bad + marked[site.end() :]
            yield Bug(family, _SITE.sub(lambda other: other.group(1).split("||")[0], broken))
    head, _, last = source.rstrip("\n").rpartition("\n")
    if last.startswith("    return "):
        yield Bug("missing_return", f"{head}\n    {last.removeprefix('    return ')}\n")


def draw_arguments(kinds: tuple[str, ...], rng: random.Random) -> tuple[Any, ...]:
    """Arguments of the given kinds, small enough to read in an issue."""
    return tuple(_DRAW[kind](rng) for kind in kinds)


def run_case(source: str, name: str, arguments: tuple[Any, ...]) -> Case:
    """Call the function ``name`` of ``source`` (our own template text) and say what it gave."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    call = f"{name}({', '.join(map(repr, arguments))})"
    try:
        return Case(call, repr(scope[name](*arguments)))
    except Exception as error:  # the broken variant of a template may raise anything: that is its symptom
        return Case(call, f"raises {type(error).__name__}")


_DRAW: dict[str, Callable[[random.Random], Any]] = {
    "int": lambda rng: rng.randint(0, 9) if rng.random() < 0.8 else rng.randint(10, 99),
    "pos": lambda rng: rng.randint(1, 5),
    "ints": lambda rng: [rng.randint(0, 9) for _ in range(rng.choice((0, 2, 2, 3, 3)))],
    "word": lambda rng: rng.choice(_WORDS),
    "words": lambda rng: [rng.choice([*_WORDS, ""]) for _ in range(rng.choice((1, 2, 2, 3)))],
    "char": lambda rng: rng.choice(_CHARS),
    "dict": lambda rng: {rng.choice(_WORDS): rng.randint(1, 9) for _ in range(rng.choice((1, 2)))},
    "bool": lambda rng: rng.random() < 0.5,
}
