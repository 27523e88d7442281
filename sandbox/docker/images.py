"""A container engine's images: fetched when missing, within limits, and removed again to keep within a disk budget.

Only images that were pulled here are ever removed: they stand in a ledger, a file of this user's for each engine, with
the id they were pulled as and when a sandbox was last started from them. An image that the user has pulled, built or
renamed since is not ours, and neither is one that a container uses: the engine refuses to remove it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import docker.errors
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from sandbox.docker.engine import EngineClient
from sandbox.errors import ImageMissingError, ImagePullError, SandboxDiskFullError, SandboxError, SandboxLostError
from sandbox.timeouts import uncharged
from sandbox.types import ImagePolicy

Call = Callable[[Callable[[], None], type[SandboxError]], Awaitable[None]]
Ledger = dict[str, dict[str, Any]]

_MOST_WAIT = 60.0
# What registries and engines say of an image that no retry will find.
_FOR_GOOD = (
    "not found",
    "manifest unknown",
    "does not exist",
    "unauthorized",
    "denied",
    "invalid reference",
    "gave http response",
)
_log = logging.getLogger(__name__)


class ImageStore:
    """The images of one engine. ``call`` runs blocking work in a thread and converts the client's errors."""

    def __init__(self, api: EngineClient, policy: ImagePolicy, call: Call, ledger: Path) -> None:
        self._api, self._policy, self._call = api, policy, call
        self._ledger = ledger
        self._slots = asyncio.Semaphore(policy.pulls_at_once)
        self._pulling: dict[str, asyncio.Task[None]] = {}
        self._stopped = threading.Event()

    async def fetch(self, image: str) -> None:
        """Pull ``image``; once, however many wait for it, and to its end, should they all go away.

        Waiting for it is uncharged. It has bounds of its own: the policy's attempts, each of which fails once the
        engine has been silent for two minutes.

        Raises ``ImageMissingError`` where no registry has it for us, ``ImagePullError`` after the last attempt.
        """
        if image not in self._pulling:
            task = self._pulling[image] = asyncio.create_task(self._fetch(image))
            task.add_done_callback(lambda _: self._pulling.pop(image))
        with uncharged():
            await asyncio.shield(self._pulling[image])

    def used(self, image: str) -> None:
        """Note that a sandbox was started from ``image``. Blocking."""
        if self._ledger.exists():
            with self._entries() as entries:
                if image in entries:
                    entries[image]["used"] = time.time()

    async def close(self) -> None:
        """End pulls that are under way."""
        self._stopped.set()
        if self._pulling:
            await asyncio.wait(set(self._pulling.values()))

    async def _fetch(self, image: str) -> None:
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(ImagePullError),
            stop=stop_after_attempt(self._policy.attempts),
            wait=wait_random_exponential(multiplier=self._policy.first_wait, max=_MOST_WAIT),
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
                    raise SandboxLostError(f"image {image!r}: the backend was closed under its pull")
                if "error" in line:
                    raise _failure(image, str(line["error"]))
        except docker.errors.APIError as error:
            raise _failure(image, str(error.explanation or error)) from None

    def _record(self, image: str) -> None:
        """Enter a pulled image, and remove those used longest ago while all of them take more than the budget."""
        with self._entries() as entries:
            found = self._api.inspect_image(image)
            entries[image] = {"id": found["Id"], "bytes": found["Size"], "used": time.time()}
            if self._policy.budget_gb is None:
                return
            for other in [name for name, entry in entries.items() if self._id(name) != entry["id"]]:
                del entries[other]
            oldest_first = sorted(entries, key=lambda name: entries[name]["used"])
            for other in oldest_first:
                if other != image and sum(entry["bytes"] for entry in entries.values()) > self._policy.budget_gb * 1e9:
                    self._remove(other, entries)

    def _remove(self, image: str, entries: Ledger) -> None:
        try:
            self._api.remove_image(image)
        except docker.errors.APIError as error:
            if error.status_code != 409:
                raise
            return  # A container uses it.
        del entries[image]

    def _id(self, image: str) -> str | None:
        try:
            return str(self._api.inspect_image(image)["Id"])
        except docker.errors.ImageNotFound:
            return None

    @contextmanager
    def _entries(self) -> Iterator[Ledger]:
        """The ledger, held by this process alone meanwhile and written back at the end."""
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        with self._ledger.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries: Ledger = {}
            with contextlib.suppress(FileNotFoundError):
                entries = json.loads(self._ledger.read_text())
            yield entries
            scratch = self._ledger.with_suffix(".new")
            scratch.write_text(json.dumps(entries, indent=1))
            scratch.replace(self._ledger)


def _failure(image: str, text: str) -> SandboxError:
    if "no space left on device" in text:
        return SandboxDiskFullError(f"image {image!r}: no room for it on the engine's disk")
    if any(words in text.lower() for words in _FOR_GOOD):
        return ImageMissingError(f"image {image!r} can't be pulled: {text.strip()}")
    return ImagePullError(f"image {image!r} could not be pulled: {text.strip()}")


def ledger_of(info: Mapping[str, Any]) -> Path:
    """Where the ledger of the engine is that says ``info`` of itself."""
    engine = hashlib.sha256(f"{info['Name']}:{info['DockerRootDir']}".encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "agent-rl", f"images-{engine}.json")
