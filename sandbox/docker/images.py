"""Images of a container engine: pulls missing ones and removes old ones to stay within a disk budget.

It removes only images that it pulled itself. An index file per user and engine records their ids and when a sandbox was
last started from them. It keeps images that the user pulled, built or renamed, and images in use by a container.

It also builds images from directories: without a network, and from base images that the engine has.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import docker.errors
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from sandbox.docker.client import EngineClient
from sandbox.errors import (
    ImageBuildError,
    ImageMissingError,
    ImagePullError,
    SandboxDiskFullError,
    SandboxError,
    SandboxLostError,
)
from sandbox.timeouts import uncharged
from sandbox.types import ImagePolicy

Call = Callable[[Callable[[], None], type[SandboxError]], Awaitable[None]]
ImageIndex = dict[str, dict[str, Any]]
"""Image name -> its id, size in bytes, and the time of its last use."""

_MAX_BACKOFF = 60.0
# Parts of error messages after which a retry is useless.
_PERMANENT_FAILURES = (
    "not found",
    "manifest unknown",
    "does not exist",
    "unauthorized",
    "denied",
    "invalid reference",
    "gave http response",
)
_log = logging.getLogger(__name__)
_FROM = re.compile(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*", re.IGNORECASE)
_LAST_LINES = 3


class ImageStore:
    """The images of one engine. ``call`` runs blocking work in a thread and translates the client's errors."""

    def __init__(self, api: EngineClient, policy: ImagePolicy, call: Call, index: Path) -> None:
        self._api, self._policy, self._call = api, policy, call
        self._index = index
        self._slots = asyncio.Semaphore(policy.max_concurrent_pulls)
        self._pulling: dict[str, asyncio.Task[None]] = {}
        self._stopped = threading.Event()

    async def fetch(self, image: str) -> None:
        """Pull ``image``. Concurrent callers share one pull, which continues if they are cancelled.

        The wait does not count against the callers' timeouts. ``ImagePolicy.attempts`` limits it; each attempt fails
        after 2 minutes without a response of the engine.

        Raises ``ImageMissingError`` if the registry does not have it, ``ImagePullError`` after the last attempt.
        """
        if image not in self._pulling:
            task = self._pulling[image] = asyncio.create_task(self._fetch(image))
            task.add_done_callback(lambda _: self._pulling.pop(image))
        with uncharged():
            await asyncio.shield(self._pulling[image])

    def mark_used(self, image: str) -> None:
        """Record that a sandbox was started from ``image``. Blocking."""
        if self._index.exists():
            with self._locked_index() as entries:
                if image in entries:
                    entries[image]["used"] = time.time()

    async def close(self) -> None:
        """Stop all pulls."""
        self._stopped.set()
        if self._pulling:
            await asyncio.wait(set(self._pulling.values()))

    async def _fetch(self, image: str) -> None:
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(ImagePullError),
            stop=stop_after_attempt(self._policy.attempts),
            wait=wait_random_exponential(multiplier=self._policy.initial_backoff, max=_MAX_BACKOFF),
            before_sleep=lambda state: _log.warning("%s", state.outcome.exception() if state.outcome else ""),
            reraise=True,
        )
        async with self._slots:
            await attempts(self._call, partial(self._pull, image), ImagePullError)
        await self._call(partial(self._record, image), ImagePullError)

    def _pull(self, image: str) -> None:
        try:
            for line in self._api.pull(image, stream=True, decode=True):
                if self._stopped.is_set():
                    raise SandboxLostError(f"image {image!r}: the backend was closed during the pull")
                if "error" in line:
                    raise _pull_error(image, str(line["error"]))
        except docker.errors.APIError as error:
            raise _pull_error(image, str(error.explanation or error)) from None

    def _record(self, image: str) -> None:
        """Add a pulled image to the index, then remove the least recently used images above the budget."""
        with self._locked_index() as entries:
            info = self._api.inspect_image(image)
            entries[image] = {"id": info["Id"], "bytes": info["Size"], "used": time.time()}
            if self._policy.budget_gb is None:
                return
            for other in [name for name, entry in entries.items() if self._current_id(name) != entry["id"]]:
                del entries[other]
            oldest_first = sorted(entries, key=lambda name: entries[name]["used"])
            for other in oldest_first:
                if other != image and sum(entry["bytes"] for entry in entries.values()) > self._policy.budget_gb * 1e9:
                    self._remove(other, entries)

    def _remove(self, image: str, entries: ImageIndex) -> None:
        try:
            self._api.remove_image(image)
        except docker.errors.APIError as error:
            if error.status_code != 409:  # 409: a container uses it
                raise
            return
        del entries[image]

    def _current_id(self, image: str) -> str | None:
        try:
            return str(self._api.inspect_image(image)["Id"])
        except docker.errors.ImageNotFound:
            return None

    @contextmanager
    def _locked_index(self) -> Iterator[ImageIndex]:
        """Lock the index file, yield its entries, and write them back."""
        self._index.parent.mkdir(parents=True, exist_ok=True)
        with self._index.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries: ImageIndex = {}
            with contextlib.suppress(FileNotFoundError):
                entries = json.loads(self._index.read_text())
            yield entries
            scratch = self._index.with_suffix(".new")
            scratch.write_text(json.dumps(entries, indent=1))
            scratch.replace(self._index)


def _pull_error(image: str, text: str) -> SandboxError:
    if "no space left on device" in text:
        return SandboxDiskFullError(f"image {image!r}: the engine's disk is full")
    if any(words in text.lower() for words in _PERMANENT_FAILURES):
        return ImageMissingError(f"image {image!r} can't be pulled: {text.strip()}")
    return ImagePullError(f"image {image!r} could not be pulled: {text.strip()}")


def image_index_path(engine_info: Mapping[str, Any]) -> Path:
    """Return the path of the index file of an engine."""
    engine = hashlib.sha256(f"{engine_info['Name']}:{engine_info['DockerRootDir']}".encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "agent-rl", f"images-{engine}.json")


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
