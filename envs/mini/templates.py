"""The functions that generated repositories are made of, with the places where a bug can be seeded.

``templates.txt`` has the templates. Each is the source of one correct function below a line ``# key | verbs to name it
by | kinds of its arguments``. ``[[good||bad||family]]`` marks a site: the text ``good`` may be exchanged for ``bad``, a
bug of ``family``; several ``||bad||family`` pairs may follow one ``good``. Placeholders: ``{f}`` the function's name,
``{a} {b} {c}`` its parameters, ``{v}`` a loop variable, ``{t}`` a local, ``{k}`` a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FAMILIES = (
    "flipped_comparison",
    "boundary",
    "off_by_one",
    "wrong_default",
    "swapped_arguments",
    "missing_return",
    "wrong_operator",
    "wrong_constant",
    "wrong_variable",
    "negated_condition",
    "wrong_builtin",
    "wrong_initial",
    "wrong_index",
    "boolean_operator",
)
"""All bug families."""

HELDOUT_FAMILIES = ("wrong_index", "boolean_operator")
"""Families that no train task has, and that the split ``heldout_family`` consists of."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "total price score speed level stock weight budget order item user record value point rate cost size "
    "length title label line token field day hour page row batch node"
)
MODULES = _words(
    "pricing stock report stats scores billing orders metrics ledger reader labels tables pages utils core"
)

NAMES = {
    "int": _words("n x y count amount num size"),
    "pos": _words("n count amount num size step"),
    "ints": _words("items values nums scores data rows"),
    "word": _words("text name label word title"),
    "words": _words("words names parts labels fields"),
    "char": _words("char mark sep letter"),
    "dict": _words("table prices mapping counts stock"),
    "bool": _words("flag ready active done open"),
}
"""Parameter names by kind of argument."""

LOOP_NAMES = _words("item value entry elem v")
LOCAL_NAMES = _words("total result acc out found")


@dataclass(frozen=True, slots=True)
class Template:
    """One function: ``verbs`` to name it by, the kind of each argument (``NAMES``' keys), its marked source."""

    key: str
    verbs: tuple[str, ...]
    kinds: tuple[str, ...]
    source: str


def _parse(text: str) -> Iterator[Template]:
    for block in text.split("# ")[1:]:
        head, _, source = block.partition("\n")
        key, verbs, kinds = (part.strip() for part in head.split("|"))
        yield Template(key, _words(verbs), _words(kinds), source.strip() + "\n")


TEMPLATES = tuple(_parse(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")))
"""All templates. Each of the sources is correct as it stands without a mutation."""
