"""Builds the default container image from the distribution's own packages: ``python -m sandbox.base_image``.

No image registry is needed: ``debootstrap`` makes a root file system from the mirror that this machine's apt uses, and
the engine imports it. ``--rootfs DIR`` leaves the directory instead, which is an image for bubblewrap.
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
"""The backends whose sandboxes are containers."""
DEBIAN_PACKAGES = ("bash", "ca-certificates", "git", "grep", "less", "patch", "procps", "python3", "python3-pytest")
"""What the image holds beside the distribution's minimal base (coreutils, sed, tar, findutils, diffutils, ...)."""
_BUILD_SECONDS = 1800.0
_IMAGE_SETTINGS = (
    "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "ENV LANG=C.UTF-8",
    'CMD ["bash"]',
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code (2: a mistake or a missing part, told in one line)."""
    from sandbox.docker.backend import DEFAULT_IMAGE

    parser = argparse.ArgumentParser(
        prog="python -m sandbox.base_image", description="Build the default sandbox image."
    )
    parser.add_argument("--engine", choices=ENGINES, default="docker", help="default %(default)s")
    parser.add_argument("--name", default=DEFAULT_IMAGE, help="the image's name (default %(default)s)")
    parser.add_argument("--rootfs", type=Path, help="make this directory, for bubblewrap, and no container image")
    parser.add_argument("--suite", help="the distribution's release (default: this machine's)")
    parser.add_argument("--mirror", help="where packages come from (default: where this machine's apt gets them)")
    parser.add_argument(
        "--pip", nargs="*", default=[], metavar="REQ", help="Python packages to add, e.g. pytest==8.3.5"
    )
    parser.add_argument("--force", action="store_true", help="build again what is there already")
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
    """Build the container image ``name`` unless ``engine`` has it; podman takes docker's. Raises ``SandboxError``."""
    from sandbox.docker.engine import connect

    api = connect(engine)
    if not force and api.images(name):
        _say(f"{name} is there already")
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
    """Make the root file system in ``directory`` unless it is there. Raises ``SandboxError``."""
    if (directory / "usr").is_dir() and not force:
        _say(f"{directory} is there already")
        return
    if os.geteuid() != 0:
        raise SandboxUnavailableError("building a root file system needs root: run it with sudo")
    if shutil.which("debootstrap") is None:
        raise SandboxUnavailableError("debootstrap is not installed: apt-get install debootstrap")
    found_suite = suite or _codename()
    found_mirror, components = _apt_source(found_suite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Built beside and renamed, so that a directory of this name is always whole.
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        made = Path(scratch) / "rootfs"
        with _step(f"installing {found_suite} with {', '.join(DEBIAN_PACKAGES)} (about a minute)"):
            _debootstrap(made, found_suite, mirror or found_mirror, components)
        if pip:
            with _step(f"adding {', '.join(pip)}"):
                _add_python_packages(made, pip)
        if directory.exists():
            shutil.rmtree(directory)
        made.rename(directory)


def _debootstrap(directory: Path, suite: str, mirror: str | None, components: Sequence[str]) -> None:
    if mirror is None:
        raise SandboxUnavailableError(
            f"this machine's apt has no source for {suite}: name one with --suite SUITE --mirror URL"
        )
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
    """Install wheels for the image's Python, fetched by the pip of this one: the image has no network and no pip."""
    version = max(path.name.removeprefix("python3.") for path in (directory / "usr/lib").glob("python3.*"))
    target = directory / f"usr/local/lib/python3.{version}/dist-packages"
    target.mkdir(parents=True, exist_ok=True)
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", "--only-binary=:all:"),
        *(f"--python-version=3.{version}", f"--target={target}", "--upgrade"),
        *requirements,
    )


def _copy_from_docker(api: Any, name: str) -> bool:
    """Load docker's image ``name``; False where docker has none."""
    from sandbox.docker.engine import connect

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
        answer = api.import_image_from_stream(tar.stdout, repository=name, tag="latest", changes=list(_IMAGE_SETTINGS))
    if tar.returncode != 0 or '"error"' in str(answer):
        raise SandboxUnavailableError(f"the engine did not take the image: {answer}")


def _codename() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip('"')
    raise SandboxUnavailableError("this machine's distribution has no codename: name one with --suite SUITE")


def _apt_source(suite: str) -> tuple[str | None, list[str]]:
    """The mirror and the components of ``suite`` in this machine's apt configuration; (None, [main]) without one."""
    if shutil.which("apt-get") is None:
        return None, ["main"]
    listing = _run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages")
    rows = [line.split() for line in listing.splitlines() if len(line.split()) == 3]
    mirror = next((uri for uri, release, part in rows if (release, part) == (suite, "main")), None)
    parts = [part for uri, release, part in rows if uri == mirror and release == suite and part in ("main", "universe")]
    return mirror, sorted(set(parts)) or ["main"]


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_BUILD_SECONDS, text=True)
    except subprocess.TimeoutExpired:
        raise SandboxUnavailableError(f"{argv[0]} did not end within {_BUILD_SECONDS:.0f} s") from None
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no reason given"]
        raise SandboxUnavailableError(f"{argv[0]} failed with exit code {done.returncode}: {last[0]}")
    return done.stdout


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    _say(f"{what} ...")
    started = time.monotonic()
    yield
    _say(f"  done in {time.monotonic() - started:.0f} s")


def _say(text: str) -> None:
    print(f"sandbox image: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
