"""Builds images from directories with the container engine: without a network, and from base images that it has."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import docker.errors

from sandbox.docker.client import EngineClient
from sandbox.errors import ImageBuildError

_FROM = re.compile(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*", re.IGNORECASE)
_LAST_LINES = 3


def image_name(directory: Path) -> str:
    """Return the name of the image of ``directory``: a digest of its files, their modes and the targets of its links.

    Raises ``ImageBuildError`` without a Dockerfile.
    """
    if not (directory / "Dockerfile").is_file():
        raise ImageBuildError(f"{directory}: no Dockerfile")
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        name = f"{path.relative_to(directory)}\0{path.lstat().st_mode:o}\0{len(content)}\0"
        digest.update(name.encode(errors="surrogateescape") + content)
    return f"agent-rl-built:{digest.hexdigest()[:24]}"


def base_images(dockerfile: str) -> list[str]:
    """Return the images from which the Dockerfile begins its stages, without those that an argument names."""
    stages, images = {"scratch"}, []
    for line in dockerfile.splitlines():
        if match := _FROM.fullmatch(line.strip()):
            if match[1].lower() not in stages and "$" not in match[1]:
                images.append(match[1])
            stages.add((match[2] or "").lower())
    return images


def build_image(api: EngineClient, directory: Path, name: str, timeout: float) -> None:
    """Build image ``name``; the engine's cache keeps its layers. Blocking. Raises ``ImageBuildError``."""
    deadline, said = time.monotonic() + timeout, [""]
    try:
        for line in _output(api, directory, name):
            said.append(str(line.get("stream", "")))
            if "error" in line:
                reason = " ".join(" ".join([*said[-_LAST_LINES:], str(line["error"])]).split())
                raise ImageBuildError(f"{directory}: it cannot be built without a network: {reason[-400:]}")
            if time.monotonic() > deadline:
                raise ImageBuildError(f"{directory}: its build takes more than {timeout:.0f} s")
    except (docker.errors.BuildError, docker.errors.APIError, TypeError) as error:
        raise ImageBuildError(f"{directory}: {error}") from None


def _output(api: EngineClient, directory: Path, name: str) -> Iterator[dict[str, str]]:
    """The engine's lines about the build. Closing it ends the build."""
    with closing(
        api.build(path=str(directory), tag=name, network_mode="none", rm=True, forcerm=True, decode=True)
    ) as it:
        yield from it
