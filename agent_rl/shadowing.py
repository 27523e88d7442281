"""Keeps a user's own ``tools``, ``envs``, ``sandbox`` or ``r3`` from being taken for our packages of these names.

``import agent_rl`` puts a finder before Python's import path, which would ask the working directory first. Where
both are wanted in one process only one can have the name: then the import fails with a line that names both
directories.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGES = ("sandbox", "tools", "envs", "r3")
HOME = Path(__file__).parent.parent


class OwnPackages(MetaPathFinder):
    """Finds our packages beside ``agent_rl``, wherever else a directory of their names lies."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The place of our package or of a module in it; None for any other name.

        Raises ImportError for a module that ours lacks where a foreign directory of the package's name may have it.
        """
        package, _, module = fullname.partition(".")
        if package not in PACKAGES or (path is not None and not _is_ours(package, path)):
            return None
        found = PathFinder.find_spec(fullname, [str(HOME)] if path is None else path)
        if found is None and module and (foreign := _foreign(package)):
            raise ImportError(
                f"{foreign} has the name of agent-rl's package {package} (at {HOME / package}), which has no "
                f"{module!r}: rename that directory"
            )
        return found


def claim_names() -> None:
    """Let our packages' names mean ours in this process. Raises ImportError where a foreign one is imported already."""
    for name in PACKAGES:
        places = getattr(sys.modules.get(name), "__path__", None)
        if name in sys.modules and not _is_ours(name, places or ()):
            foreign = next(iter(places or ()), sys.modules[name].__file__)
            raise ImportError(
                f"{foreign} shadows agent-rl's package {name} (at {HOME / name}): rename it or run from elsewhere"
            )
    if not any(isinstance(finder, OwnPackages) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnPackages())


def _is_ours(package: str, places: Sequence[str]) -> bool:
    return any(os.path.realpath(place) == os.path.realpath(HOME / package) for place in places)


def _foreign(package: str) -> Path | None:
    """The first directory or module of that name on the import path that is not ours."""
    named = [Path(entry).absolute() / name for entry in sys.path for name in (package, f"{package}.py")]
    return next((path for path in named if path.exists() and not _is_ours(package, [str(path)])), None)
