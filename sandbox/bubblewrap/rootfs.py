"""What a bubblewrap sandbox sees as its root file system: read-only system directories, and nothing of the host's
beside."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from sandbox.errors import ImageMissingError
from sandbox.types import ImagePolicy

HOST_IMAGE = "host"
HOST_HOME = "/home/agent"
"""Home in a sandbox of the host's system directories. Not /root, below which the running Python may live."""
ROOTFS_HOME = "/root"
_GENERATION = "1"  # of what _generated makes: to be changed with it
_ASK_SECONDS = 30.0
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_TOP_DIRS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC_COPIES = ("alternatives", "ld.so.cache", "ld.so.conf", "localtime", "mime.types", "debian_version", "os-release")
_ETC = {
    "passwd": f"root:x:0:0:root:{HOST_HOME}:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
PYTHON_PACKAGES = ("pytest", "markupsafe", "pretend")
"""What a sandbox of the host's system directories can import beside the standard library, as far as it is installed
here."""


@dataclass(frozen=True, slots=True)
class RootFs:
    """bwrap arguments that build the read-only root, and the environment that goes with it."""

    arguments: tuple[str, ...]
    home: str
    path: str
    seed: Path | None = None
    """Root file system whose copy of the working directory a sandbox starts with."""


def host_root(cache: Path) -> RootFs:
    """The machine's own system directories and the running Python. What has to be generated is kept in ``cache``.

    The Python's site-packages are hidden behind a directory that holds ``PYTHON_PACKAGES`` only, so that what else is
    installed on the host is neither seen nor depended on.
    """
    prefix = Path(sys.base_prefix)
    made = _generated(cache, prefix)
    arguments = [*_bind("/usr", "/usr"), *_top_dirs(Path("/")), *_bind(made / "etc", "/etc")]
    if not prefix.is_relative_to("/usr"):
        arguments += _bind(prefix, prefix)
    arguments += [part for directory in _site_dirs() for part in _bind(made / "site", directory)]
    path = f"{prefix}/bin:{_SYSTEM_PATH}"
    if not (prefix / "bin" / "python").exists():
        arguments += _bind(made / "bin", "/opt/agent-rl/bin")
        path = f"/opt/agent-rl/bin:{path}"
    return RootFs(tuple(arguments), HOST_HOME, path)


def _generated(cache: Path, prefix: Path) -> Path:
    """The directory with etc/, site/ and bin/ of a sandbox, made once for each set of what it is made from."""
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
    # Made beside and renamed: another run may be at it too, and then either result will do.
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


def allowed_dir(image: str, policy: ImagePolicy) -> Path:
    """The directory that ``image`` names, its links resolved, where ``policy`` allows it. Raises
    ``ImageMissingError``."""
    if image == policy.own:
        return Path(image).resolve()
    if policy.root is None:
        raise ImageMissingError(
            f"image {image!r}: under bubblewrap a task's image is a directory of the host, which is refused unless "
            "sandbox.image_root names the directory that holds such images; set it, or sandbox.backend to docker"
        )
    root = policy.root.resolve()
    directory = (root / image).resolve()
    if root not in directory.parents:
        raise ImageMissingError(
            f"image {image!r}: leads to {directory}; right would be a directory below sandbox.image_root ({root})"
        )
    return directory


def dir_root(root: Path) -> RootFs:
    """The root file system in the directory ``root``. Links at its top are not followed. Raises
    ``ImageMissingError``."""
    if not _is_dir(root / "usr"):
        raise ImageMissingError(
            f"image {str(root)!r}: for bubblewrap an image is {HOST_IMAGE!r} or the directory of a root file system "
            "(one "
            f"with the directory usr/ in it, not a link); make one with: python -m sandbox.base_image --rootfs DIR"
        )
    arguments: list[str] = []
    # Bound entry by entry onto a root of the sandbox's own, where mount points can be made; the directory itself
    # stays as is.
    for entry in sorted(root.iterdir()):
        if entry.name in ("proc", "dev", "sys", "tmp", "root", "run", *_TOP_DIRS) or not _is_dir(entry):
            continue
        arguments += _bind(entry, f"/{entry.name}")
    arguments += _top_dirs(root)
    return RootFs(tuple(arguments), ROOTFS_HOME, f"/usr/local/sbin:{_SYSTEM_PATH}:/usr/sbin:/sbin", seed=root)


def image_place(root: Path, inside: str) -> Path:
    """Where ``inside``, an absolute path of a sandbox, is in the image ``root``; it need not exist.

    Raises ``ImageMissingError`` where a link is on the way there, which would be followed on the host.
    """
    place = root
    for part in PurePosixPath(inside).parts[1:]:
        place /= part
        if place.is_symlink():
            raise ImageMissingError(
                f"image {str(root)!r}: {place} is a link on the way to {inside}; right would be a directory in its "
                "place"
            )
    return place


def copy_regular(source: str, target: str) -> None:
    """Copy a regular file of an image; pipes and devices, whose reading may never end, are left out."""
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
    """The installed distributions ``names`` and what they require; absent ones are left out."""
    found: dict[str, metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        # Requirements with a marker are for other platforms, old Pythons or extras.
        requirements = [r for r in found[name].requires or () if ";" not in r]
        wanted += [_requirement_name(requirement) for requirement in requirements]
    return list(found.values())


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


def _top_dirs(root: Path) -> list[str]:
    """/bin and its like: links into /usr on a merged system, directories of their own elsewhere."""
    arguments: list[str] = []
    for name in _TOP_DIRS:
        path = root / name
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), f"/{name}"]
        elif path.is_dir():
            arguments += _bind(path, f"/{name}")
    return arguments


def _site_dirs() -> list[Path]:
    """The directories from which the base Python imports third-party packages, as it says itself, as far as they
    exist."""
    question = "import json, site; print(json.dumps(site.getsitepackages()))"
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    answer = subprocess.run([base, "-I", "-c", question], capture_output=True, check=True, timeout=_ASK_SECONDS)
    return [Path(directory) for directory in json.loads(answer.stdout) if os.path.isdir(directory)]


def _bind(source: Path | str, target: Path | str) -> list[str]:
    return ["--ro-bind", str(source), str(target)]
