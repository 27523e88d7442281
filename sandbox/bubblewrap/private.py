"""Directories and files of the host that no sandbox may see, wherever a mount or a link leads to them.

They are the checkout, the working directory, home, the directories of temporary files and caches, ``.env`` files, and
those that ``ImagePolicy.private`` names. Where one lies below a directory that is bound into sandboxes, it is covered.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import SandboxStartError

_CACHES = (".cache", ".cache/tasks", "runs")


@dataclass(frozen=True, slots=True)
class _Mount:
    """The directory ``root`` of the file system ``device`` is mounted at ``point``."""

    device: str
    root: Path
    point: Path


@dataclass(frozen=True, slots=True)
class Bind:
    """A host directory or file and its place in sandboxes."""

    source: Path
    target: Path


def private_paths(named: Iterable[Path] = ()) -> frozenset[Path]:
    """Return the paths that no sandbox may see: those of this process, and ``named``. They exist and hold no link."""
    places = [Path(__file__).parents[2], *_working_directory()]
    candidates = [*places, *named, Path.home(), Path(tempfile.gettempdir())]
    candidates += [place / name for place in places for name in _CACHES]
    candidates += [parent / ".env" for place in places for parent in (place.resolve() / "_").parents]
    candidates += [Path(os.environ[name]) for name in ("XDG_CACHE_HOME",) if os.environ.get(name)]
    mounts = list(_mounts())
    found = {path.resolve() for path in candidates if path.exists()}
    return frozenset(alias for path in found for alias in _aliases(path, mounts))


@dataclass(frozen=True, slots=True)
class Cover:
    """The bwrap arguments that cover the private path ``source`` in sandboxes."""

    source: Path
    arguments: tuple[str, ...]


def covers(binds: Iterable[Bind], private: Iterable[Path]) -> list[Cover]:
    """Return the covers of the ``private`` paths below ``binds``.

    Raises ``SandboxStartError`` if a bind itself is private.
    """
    private, result = sorted(private), list[Cover]()
    for bind in binds:
        source, covered = bind.source.resolve(), list[Path]()
        for path in private:
            if path == source:
                raise SandboxStartError(
                    f"{source}: sandboxes would see it at {bind.target}, but it holds private files (the checkout, "
                    "caches, runs or a home); move these to another directory, or set sandbox.backend to docker"
                )
            hidden_already = any(path.is_relative_to(each) for each in covered)
            if path.is_relative_to(source) and not hidden_already and path.exists():
                covered.append(path)
                target = str(bind.target / path.relative_to(source))
                hidden = ("--tmpfs", target, "--remount-ro", target)
                result.append(Cover(path, hidden if path.is_dir() else ("--ro-bind", "/dev/null", target)))
    return result


def mount_arguments(mounts: Iterable[str | Cover]) -> list[str]:
    """Return ``mounts`` as bwrap arguments. Covers of paths that are gone are left out: bwrap cannot mount them."""
    arguments = list[str]()
    for mount in mounts:
        if isinstance(mount, str):
            arguments.append(mount)
        elif mount.source.exists():
            arguments += mount.arguments
    return arguments


def _working_directory() -> list[Path]:
    with suppress(FileNotFoundError):
        return [Path.cwd()]
    return []


def _aliases(path: Path, mounts: list[_Mount]) -> Iterator[Path]:
    """Yield every path that leads to ``path`` or a part of it: ``path`` and the other mounts of its file system."""
    yield path
    around = [mount for mount in mounts if path.is_relative_to(mount.point)]
    if not around:
        return
    mount = max(around, key=lambda mount: len(mount.point.parts))
    inner = mount.root / path.relative_to(mount.point)
    for other in mounts:
        if other.device == mount.device and other != mount:
            if inner.is_relative_to(other.root):
                alias = other.point / inner.relative_to(other.root)
            elif other.root.is_relative_to(inner):
                alias = other.point
            else:
                continue
            if alias.exists():
                yield alias


def _mounts() -> Iterator[_Mount]:
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            _, _, device, root, point, *_ = line.split(" ")
            yield _Mount(device, Path(_unescaped(root)), Path(_unescaped(point)))


def _unescaped(path: str) -> str:
    """Undo the octal escapes of the kernel."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path)
