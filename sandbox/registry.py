"""Plug-in registry: components by name, built in or from entry points of installed packages.

Environments, tool-call formats, objectives and sandbox backends use it. It is in this package because every other
package may import this one.
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
    """The components of one ``kind`` (for example "environment"), imported on first use.

    ``group`` is the entry-point group of installed components. ``built_in`` maps names to
    ``package.module:attribute``; an entry point cannot replace them. ``error`` makes an exception from one line.
    """

    kind: str
    group: str
    built_in: Mapping[str, str]
    error: Callable[[str], Exception]

    def targets(self) -> dict[str, str]:
        """Return every registered name with its ``package.module:attribute``, sorted by name."""
        installed = {point.name: point.value for point in entry_points(group=self.group)}
        return dict(sorted({**installed, **self.built_in}.items()))

    def find(self, name: str) -> str:
        """Return the ``package.module:attribute`` of ``name``, or ``name`` if it is a path itself. Imports nothing.

        Raises ``error`` for an unknown name and suggests the nearest registered one.
        """
        target = name if ":" in name else self.built_in.get(name) or self.targets().get(name)
        if target is None:
            raise self.error(f"unknown {self.kind} {name!r}: {self._hint(name)}")
        return target

    def load(self, name: str) -> Any:
        """Import and return the component ``name``, a registered name or a path ``package.module:attribute``.

        Raises ``error`` as :meth:`find` does, and if the import fails.
        """
        module_name, _, attribute = self.find(name).partition(":")
        try:
            module = importlib.import_module(module_name)
        except (ImportError, SyntaxError) as error:
            absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
            searched = f"; searched the installed packages and {Path.cwd()}" if absent else ""
            raise self.error(f"{self.kind} {name!r}: {module_name} does not import: {error}{searched}") from error
        component: Any = module
        for step in attribute.split("."):
            if not hasattr(component, step):
                near = difflib.get_close_matches(step, dir(component), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                file = getattr(module, "__file__", "no file")
                raise self.error(f"{self.kind} {name!r}: {module_name} ({file}) has no {attribute!r}{hint}")
            component = getattr(component, step)
        return component

    def _hint(self, name: str) -> str:
        registered = list(self.targets())
        near = difflib.get_close_matches(name, registered, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "use a registered name or package.module:attribute"
        return f"{hint} (registered: {', '.join(registered)})"
