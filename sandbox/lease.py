"""Leases: which run holds which sandboxes, and whether it still does.

A run's owner is a process (:mod:`sandbox.owner`). Where that process can be seen, whether it runs is all that counts.
Where it can't (it lives in another process-id namespace, or on another machine that uses the same engine), its
heartbeat is judged: each backend renews its lease every ``BEAT_SECONDS``, where the sandboxes themselves are, so that
whoever can see the sandboxes can see the heartbeat.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sandbox.errors import SandboxError
from sandbox.owner import Owner

BEAT_SECONDS = 15.0
EXPIRY_SECONDS = 300.0
"""Silence after which a lease whose owner can't be seen has run out: many beats, as a suspended machine misses some."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lease:
    """A run's hold on its ``sandboxes`` (ids), kept at ``place``: a directory, or an engine's address.

    ``silent_for``: seconds since its last heartbeat; None where none is known.
    """

    backend: str
    owner: Owner
    sandboxes: tuple[str, ...]
    silent_for: float | None
    place: str

    @property
    def dead(self) -> bool:
        """Whether the sandboxes can go. An owner of which nothing can be known is left alone."""
        if self.owner.visible:
            return not self.owner.running
        return self.silent_for is not None and self.silent_for > EXPIRY_SECONDS

    @property
    def verdict(self) -> str:
        """``dead`` in a few words, with its reason."""
        if self.owner.visible:
            return "alive" if self.owner.running else "dead: its process has ended"
        if self.silent_for is None:
            return "unknown: its process can't be seen from here, and no heartbeat is known"
        return f"{'dead' if self.dead else 'alive'}: last heartbeat {self.silent_for:.0f} s ago"


class Heartbeat:
    """Calls ``beat`` now, and then every ``BEAT_SECONDS`` from a thread of its own until it is stopped.

    A thread, since an event loop that is kept busy for minutes must not lose its sandboxes.
    """

    def __init__(self, beat: Callable[[], None], seconds: float = BEAT_SECONDS) -> None:
        self._beat, self._seconds = beat, seconds
        self._stopped = threading.Event()
        beat()
        self._thread = threading.Thread(target=self._run, name="sandbox lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop beating; returns once the last beat is over."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._beat()
            except (SandboxError, OSError) as error:
                # Nothing is lost before EXPIRY_SECONDS of this.
                _log.warning("a sandbox lease could not be renewed: %s", error)
