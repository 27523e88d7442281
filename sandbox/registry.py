"""Parts of one kind by name: built in, or entry points of packages that a user installed.

Environments, tool-call formats, objectives and sandbox backends are registered so; the class stands here because
every package may import this one.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Registry:
    """The parts of one ``kind`` ("environment"), imported when they are asked for.

    ``group``: the group of entry points that adds to them. ``built_in``: name -> ``package.module:attribute``; an entry
    point can't replace one of these. ``error`` makes the exception for a mistake from one line.
    """

    kind: str
    group: str
    built_in: Mapping[str, str]
    error: Callable[[str], Exception]

    def targets(self) -> dict[str, str]:
        """All registered names -> ``package.module:attribute``, sorted by name."""
        installed = {point.name: point.value for point in entry_points(group=self.group)}
        return dict(sorted({**installed, **self.built_in}.items()))

    def find(self, name: str) -> str:
        """The ``package.module:attribute`` that ``name`` stands for, or is; nothing is imported.

        Raises ``error`` for an unknown name, with the nearest known one.
        """
        target = name if ":" in name else self.built_in.get(name) or self.targets().get(name)
        if target is None:
            raise self.error(f"unknown {self.kind} {name!r}: {self._hint(name)}")
        return target

    def load(self, name: str) -> Any:
        """What is registered as ``name``, or what the path ``package.module:attribute`` names.

        Raises ``error`` as :meth:`find`, and for what does not import.
        """
        module_name, _, attribute = self.find(name).partition(":")
        try:
            module = importlib.import_module(module_name)
        except (ImportError, SyntaxError) as error:
            absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
            places = f"; it was looked for among the installed packages and in {Path.cwd()}" if absent else ""
            raise self.error(f"{self.kind} {name!r}: {module_name} does not import: {error}{places}") from error
        part: Any = module
        for step in attribute.split("."):
            if not hasattr(part, step):
                near = difflib.get_close_matches(step, dir(part), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                place = getattr(module, "__file__", "no file")
                raise self.error(f"{self.kind} {name!r}: {module_name} ({place}) has no {attribute!r}{hint}")
            part = getattr(part, step)
        return part

    def _hint(self, name: str) -> str:
        registered = list(self.targets())
        near = difflib.get_close_matches(name, registered, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "write a registered name or package.module:attribute"
        return f"{hint} (registered: {', '.join(registered)})"
