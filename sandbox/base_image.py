"""Command ``python -m sandbox.base_image``: builds the default sandbox image from the distribution's packages.

It needs no image registry: ``debootstrap`` creates a root file system from this machine's apt mirror, and the container
engine imports it. ``--rootfs DIR`` creates only the directory, which is an image for bubblewrap.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sandbox.errors import SandboxError, SandboxUnavailableError

ENGINES = ("docker", "podman")
"""The backends that use container images."""
DEBIAN_PACKAGES = ("bash", "ca-certificates", "git", "grep", "less", "patch", "procps", "python3", "python3-pytest")
"""Packages of the image on top of the distribution's minimal base (coreutils, sed, tar, findutils, diffutils, ...)."""
_BUILD_SECONDS = 1800.0
_IMAGE_SETTINGS = (
    "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "ENV LANG=C.UTF-8",
    'CMD ["bash"]',
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code (2 after a one-line error)."""
    from sandbox.docker.backend import DEFAULT_IMAGE

    parser = argparse.ArgumentParser(
        prog="python -m sandbox.base_image", description="Build the default sandbox image."
    )
    parser.add_argument("--engine", choices=ENGINES, default="docker", help="container engine (default %(default)s)")
    parser.add_argument("--name", default=DEFAULT_IMAGE, help="image name (default %(default)s)")
    parser.add_argument("--rootfs", type=Path, help="create this directory for bubblewrap instead of a container image")
    parser.add_argument("--suite", help="release of the distribution (default: this machine's)")
    parser.add_argument("--mirror", help="package mirror (default: this machine's apt mirror)")
    parser.add_argument(
        "--pip", nargs="*", default=[], metavar="REQ", help="Python packages to add, e.g. pytest==8.3.5"
    )
    parser.add_argument("--force", action="store_true", help="rebuild an existing image")
    options = parser.parse_args(argv)
    try:
        if options.rootfs is not None:
            build_rootfs(options.rootfs, options.suite, options.mirror, options.pip, force=options.force)
        else:
            source = (options.suite, options.mirror, options.pip)
            build_image(options.name, *source, force=options.force, engine=options.engine)
    except SandboxError as error:
        print(f"sandbox image: {error}", file=sys.stderr)
        return 2
    return 0


def build_image(
    name: str,
    suite: str | None = None,
    mirror: str | None = None,
    pip: Sequence[str] = (),
    *,
    force: bool = False,
    engine: str = "docker",
) -> None:
    """Build the container image ``name`` unless ``engine`` has it; podman copies docker's. Raises ``SandboxError``."""
    from sandbox.docker.client import connect

    api = connect(engine)
    if not force and api.images(name):
        _log(f"{name} exists already")
        return
    if not force and engine == "podman" and _copy_from_docker(api, name):
        return
    with tempfile.TemporaryDirectory(prefix="agent-rl-image-") as scratch:
        rootfs = Path(scratch) / "rootfs"
        build_rootfs(rootfs, suite, mirror, pip)
        with _step(f"importing it as {name}"):
            _import(api, rootfs, name)


def build_rootfs(
    directory: Path,
    suite: str | None = None,
    mirror: str | None = None,
    pip: Sequence[str] = (),
    *,
    force: bool = False,
) -> None:
    """Create the root file system in ``directory`` unless it exists. Raises ``SandboxError``."""
    if (directory / "usr").is_dir() and not force:
        _log(f"{directory} exists already")
        return
    if os.geteuid() != 0:
        raise SandboxUnavailableError("building a root file system needs root: run it with sudo")
    if shutil.which("debootstrap") is None:
        raise SandboxUnavailableError("debootstrap is not installed: apt-get install debootstrap")
    suite = suite or _codename()
    default_mirror, components = _apt_source(suite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Built in a scratch directory and renamed, so that an existing directory is always complete.
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        rootfs = Path(scratch) / "rootfs"
        with _step(f"installing {suite} with {', '.join(DEBIAN_PACKAGES)} (about a minute)"):
            _debootstrap(rootfs, suite, mirror or default_mirror, components)
        if pip:
            with _step(f"adding {', '.join(pip)}"):
                _add_python_packages(rootfs, pip)
        if directory.exists():
            shutil.rmtree(directory)
        rootfs.rename(directory)


def _debootstrap(directory: Path, suite: str, mirror: str | None, components: Sequence[str]) -> None:
    if mirror is None:
        raise SandboxUnavailableError(f"this machine's apt has no source for {suite}: use --suite SUITE --mirror URL")
    _run(
        "debootstrap",
        "--variant=minbase",
        f"--components={','.join(components)}",
        f"--include={','.join(DEBIAN_PACKAGES)}",
        suite,
        str(directory),
        mirror,
    )
    for leftover in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(directory / leftover, ignore_errors=True)
        (directory / leftover).mkdir(parents=True)
    (directory / "usr/local/bin/python").symlink_to("/usr/bin/python3")


def _add_python_packages(directory: Path, requirements: Sequence[str]) -> None:
    """Install wheels for the image's Python with the pip of this Python: the image has no pip and no network."""
    version = max(path.name.removeprefix("python3.") for path in (directory / "usr/lib").glob("python3.*"))
    target = directory / f"usr/local/lib/python3.{version}/dist-packages"
    target.mkdir(parents=True, exist_ok=True)
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", "--only-binary=:all:"),
        *(f"--python-version=3.{version}", f"--target={target}", "--upgrade"),
        *requirements,
    )


def _copy_from_docker(api: Any, name: str) -> bool:
    """Load docker's image ``name``; return False if docker does not have it."""
    from sandbox.docker.client import connect

    try:
        docker = connect("docker")
    except SandboxUnavailableError:
        return False
    if not docker.images(name):
        return False
    with _step(f"copying {name} from docker"), tempfile.TemporaryFile() as file:
        for chunk in docker.get_image(name):
            file.write(chunk)
        file.seek(0)
        list(api.load_image(file))
    return True


def _import(api: Any, rootfs: Path, name: str) -> None:
    with subprocess.Popen(["tar", "-C", str(rootfs), "-c", "."], stdout=subprocess.PIPE) as tar:
        assert tar.stdout is not None
        reply = api.import_image_from_stream(tar.stdout, repository=name, tag="latest", changes=list(_IMAGE_SETTINGS))
    if tar.returncode != 0 or '"error"' in str(reply):
        raise SandboxUnavailableError(f"the engine could not import the image {name}: {reply}")


def _codename() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip('"')
    raise SandboxUnavailableError("this machine's distribution has no codename: use --suite SUITE")


def _apt_source(suite: str) -> tuple[str | None, list[str]]:
    """Return the mirror and the components of ``suite`` from this machine's apt; (None, [main]) if it has none."""
    if shutil.which("apt-get") is None:
        return None, ["main"]
    listing = _run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages")
    rows = [line.split() for line in listing.splitlines() if len(line.split()) == 3]
    mirror = next((uri for uri, release, part in rows if (release, part) == (suite, "main")), None)
    parts = [part for uri, release, part in rows if uri == mirror and release == suite and part in ("main", "universe")]
    return mirror, sorted(set(parts)) or ["main"]


def _run(*argv: str) -> str:
    try:
        completed = subprocess.run(argv, capture_output=True, timeout=_BUILD_SECONDS, text=True)
    except subprocess.TimeoutExpired:
        raise SandboxUnavailableError(f"{argv[0]} did not end within {_BUILD_SECONDS:.0f} s") from None
    if completed.returncode != 0:
        last = (completed.stdout + completed.stderr).strip().splitlines()[-1:] or ["no output"]
        raise SandboxUnavailableError(f"{argv[0]} failed with exit code {completed.returncode}: {last[0]}")
    return completed.stdout


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    _log(f"{name} ...")
    started = time.monotonic()
    yield
    _log(f"  done in {time.monotonic() - started:.0f} s")


def _log(text: str) -> None:
    print(f"sandbox image: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
