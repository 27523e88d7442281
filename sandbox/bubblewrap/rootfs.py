"""The read-only root file system of a bubblewrap sandbox, from the host's system directories or an image directory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from sandbox.bubblewrap.private import Bind, Cover, covers
from sandbox.errors import ImageMissingError
from sandbox.types import ImagePolicy

HOST_IMAGE = "host"
HOST_HOME = "/home/agent"
"""Home in a sandbox of ``HOST_IMAGE``; not /root, which may contain the running Python."""
ROOTFS_HOME = "/root"
_GENERATION = "1"  # increase it with every change of the generated files
_PYTHON_SECONDS = 30.0
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_TOP_DIRS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_TOOL_DIRS = (*_TOP_DIRS, "libexec", "include", "share")
"""The parts of /usr, /usr/local and a Python's own directory that programs need."""
_ETC_COPIES = ("alternatives", "ld.so.cache", "ld.so.conf", "localtime", "mime.types", "debian_version", "os-release")
_ETC = {
    "passwd": f"root:x:0:0:root:{HOST_HOME}:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
PYTHON_PACKAGES = ("pytest", "markupsafe", "pretend")
"""The packages, if installed here, that a sandbox of ``HOST_IMAGE`` can import besides the standard library."""


@dataclass(frozen=True, slots=True)
class RootFs:
    """The mounts of the read-only root, with its home directory and PATH. A string is one bwrap argument."""

    mounts: tuple[str | Cover, ...]
    home: str
    path: str
    seed: Path | None = None
    """The image directory from which a sandbox copies its initial working directory."""


def host_root(cache: Path, private: Collection[Path]) -> RootFs:
    """Return the root of ``HOST_IMAGE``: the machine's directories of programs and the running Python.

    Generated files are in ``cache``. A directory with ``PYTHON_PACKAGES`` covers the Python's site-packages, so that
    other packages of the host are not visible.
    """
    prefix = Path(sys.base_prefix)
    generated = _generate_files(cache, prefix)
    binds = list[Bind]()
    mounts: list[str | Cover] = [*_bind(generated / "etc", "/etc")]
    for directory in (Path("/"), Path("/usr"), Path("/usr/local"), prefix):
        names = _TOP_DIRS if directory == Path("/") else _TOOL_DIRS
        for name in (*names, *(["ssl"] if directory == prefix else [])):
            mounts += _bind_directory(directory / name, binds)
    site_dirs = _site_dirs()
    mounts += covers(binds, [path for path in private if not any(path.is_relative_to(site) for site in site_dirs)])
    mounts += [part for directory in site_dirs for part in _bind(generated / "site", directory)]
    path = f"{prefix}/bin:{_SYSTEM_PATH}"
    if not (prefix / "bin" / "python").exists():
        mounts += _bind(generated / "bin", "/opt/agent-rl/bin")
        path = f"/opt/agent-rl/bin:{path}"
    return RootFs(tuple(mounts), HOST_HOME, path)


def _generate_files(cache: Path, prefix: Path) -> Path:
    """Return a directory with etc/, site/ and bin/ for sandboxes; create it unless one of the same inputs exists."""
    distributions = _closure(PYTHON_PACKAGES)
    key = [
        _GENERATION,
        str(prefix),
        sys.version,
        *sorted(f"{d.locate_file('')} {d.name} {d.version}" for d in distributions),
    ]
    key += [f"{name} {Path('/etc', name).stat().st_mtime_ns}" for name in _ETC_COPIES if Path("/etc", name).exists()]
    directory = cache / f".host-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
    if directory.is_dir():
        return directory
    # Created in a scratch directory and renamed; if another run does the same, either result is fine.
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        for name in ("etc", "site", "bin"):
            (scratch / name).mkdir()
        _fill_etc(scratch / "etc")
        _copy_packages(distributions, scratch / "site")
        (scratch / "bin" / "python").symlink_to(prefix / "bin" / "python3")
        try:
            scratch.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def resolve_image_directory(image: str, policy: ImagePolicy) -> Path:
    """Return the resolved directory of ``image``. Raises ``ImageMissingError`` if ``policy`` does not allow it."""
    if image == policy.configured:
        return Path(image).resolve()
    if policy.root is None:
        raise ImageMissingError(
            f"image {image!r}: under bubblewrap a task's image is a directory of the host, which must be below "
            "sandbox.image_root; set it, or sandbox.backend to docker"
        )
    root = policy.root.resolve()
    directory = (root / image).resolve()
    if root not in directory.parents:
        raise ImageMissingError(
            f"image {image!r}: leads to {directory}; it must be a directory below sandbox.image_root ({root})"
        )
    return directory


def dir_root(root: Path, private: Collection[Path]) -> RootFs:
    """Return the root file system of the image directory ``root``; links at its top level are not followed.

    Raises ``ImageMissingError``.
    """
    if not _is_dir(root / "usr"):
        raise ImageMissingError(
            f"image {str(root)!r}: for bubblewrap an image is {HOST_IMAGE!r} or the directory of a root file system "
            "(one "
            f"with the directory usr/ in it, not a link); make one with: python -m sandbox.base_image --rootfs DIR"
        )
    mounts, binds = list[str | Cover](), list[Bind]()
    # Each entry is bound onto a new root, where mount points can be created without changing the image directory.
    for entry in sorted(root.iterdir()):
        if entry.name in ("proc", "dev", "sys", "tmp", "root", "run", *_TOP_DIRS) or not _is_dir(entry):
            continue
        mounts += _bind_directory(entry, binds, Path("/", entry.name))
    for name in _TOP_DIRS:
        mounts += _bind_directory(root / name, binds, Path("/", name))
    mounts += covers(binds, private)
    return RootFs(tuple(mounts), ROOTFS_HOME, f"/usr/local/sbin:{_SYSTEM_PATH}:/usr/sbin:/sbin", seed=root)


def path_in_image(root: Path, sandbox_path: str) -> Path:
    """Return the host path of ``sandbox_path`` (absolute) in the image ``root``; it need not exist.

    Raises ``ImageMissingError`` if it contains a link, which would be followed on the host.
    """
    path = root
    for part in PurePosixPath(sandbox_path).parts[1:]:
        path /= part
        if path.is_symlink():
            raise ImageMissingError(
                f"image {str(root)!r}: {path} is a link on the way to {sandbox_path}; replace it by a directory"
            )
    return path


def copy_regular(source: str, target: str) -> None:
    """Copy a regular file of an image; skip pipes and devices, because reading them may never end."""
    if stat.S_ISREG(os.lstat(source).st_mode):
        shutil.copy2(source, target, follow_symlinks=False)


def _is_dir(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _copy_packages(distributions: Iterable[metadata.Distribution], target: Path) -> None:
    for distribution in distributions:
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if file.parts[0] in ("..", "/") or not source.is_file():
                continue
            destination = target / Path(*file.parts)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, destination)


def _closure(names: Iterable[str]) -> list[metadata.Distribution]:
    """Return the installed distributions among ``names`` and their requirements."""
    distributions: dict[str, metadata.Distribution] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in distributions:
            continue
        try:
            distributions[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        # Requirements with a marker are for other platforms, old Pythons or extras.
        requirements = [r for r in distributions[name].requires or () if ";" not in r]
        pending += [_requirement_name(requirement) for requirement in requirements]
    return list(distributions.values())


def _requirement_name(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end]


def _fill_etc(etc: Path) -> None:
    for name, text in _ETC.items():
        (etc / name).write_text(text)
    for name in _ETC_COPIES:
        source = Path("/etc", name)
        if source.is_dir():
            shutil.copytree(source, etc / name, symlinks=True)
        elif source.is_file():
            shutil.copy2(source, etc / name)


def _bind_directory(path: Path, binds: list[Bind], target: Path | None = None) -> list[str]:
    """Return the arguments that bind ``path`` at ``target`` (default: the same path), and add the bind to ``binds``.

    A link stays a link, as /bin is on a merged system: what it leads to is bound by itself. Nothing is bound if
    ``path`` is absent or bound already.
    """
    target = target or path
    if any(target.is_relative_to(bind.target) for bind in binds):
        return []
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(target)]
    if not path.is_dir():
        return []
    binds.append(Bind(path, target))
    return _bind(path, target)


def _site_dirs() -> list[Path]:
    """Return the existing site-packages directories of the base Python."""
    code = "import json, site; print(json.dumps(site.getsitepackages()))"
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    run = subprocess.run([base, "-I", "-c", code], capture_output=True, check=True, timeout=_PYTHON_SECONDS)
    return [Path(directory) for directory in json.loads(run.stdout) if os.path.isdir(directory)]


def _bind(source: Path | str, target: Path | str) -> list[str]:
    return ["--ro-bind", str(source), str(target)]
