"""Protects the packages ``tools``, ``envs``, ``sandbox`` and ``r3`` from user directories with the same names.

``import agent_rl`` installs a finder before Python's path finder, which would search the working directory first. If a
process needs a user's package of such a name, the import fails with a line that names both directories.
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
PACKAGE_ROOT = Path(__file__).parent.parent


class PackageFinder(MetaPathFinder):
    """Finds these packages next to ``agent_rl``, regardless of the import path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of one of these packages or of a module in it; None for other names.

        Raises ImportError if the module is missing here and a user's package of that name may contain it.
        """
        package, _, module = fullname.partition(".")
        if package not in PACKAGES or (path is not None and not _is_own(package, path)):
            return None
        spec = PathFinder.find_spec(fullname, [str(PACKAGE_ROOT)] if path is None else path)
        if spec is None and module and (shadow := _shadowing_path(package)):
            raise ImportError(
                f"{shadow} has the same name as agent-rl's package {package} (at {PACKAGE_ROOT / package}), which has "
                f"no module {module!r}: rename your directory"
            )
        return spec


def protect_package_names() -> None:
    """Install the finder. Raises ImportError if another package of one of these names is imported already."""
    for name in PACKAGES:
        paths = getattr(sys.modules.get(name), "__path__", None)
        if name in sys.modules and not _is_own(name, paths or ()):
            shadow = next(iter(paths or ()), sys.modules[name].__file__)
            raise ImportError(
                f"{shadow} shadows agent-rl's package {name} (at {PACKAGE_ROOT / name}): rename it or run from another "
                "directory"
            )
    if not any(isinstance(finder, PackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PackageFinder())


def _is_own(package: str, paths: Sequence[str]) -> bool:
    return any(os.path.realpath(path) == os.path.realpath(PACKAGE_ROOT / package) for path in paths)


def _shadowing_path(package: str) -> Path | None:
    """The first other directory or module of that name on the import path."""
    candidates = [Path(entry).absolute() / name for entry in sys.path for name in (package, f"{package}.py")]
    return next((path for path in candidates if path.exists() and not _is_own(package, [str(path)])), None)
