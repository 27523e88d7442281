"""What a rehearsed rank has held, computed and sent, phase by phase."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_ROUNDING = 512
"""torch's allocator gives memory in pieces of so many bytes."""


@dataclass
class Phase:
    """One phase: ``peak`` bytes of device memory, ``flops`` of matrix products and attention, ``sent`` bytes by group,
    ``calls`` of collectives by group, and ``syncs``, how often the host waited for the device."""

    peak: int = 0
    flops: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    syncs: int = 0


class Ledger:
    """Adds up what happens, by phase. ``held``: bytes of device memory that are there now; ``pinned``: of the host.
    ``failed``: the phase that an exception came out of first."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self.held = self.pinned = 0
        self._known: dict[int, int] = {}
        self.name = self.failed = "start"
        self._now = self.phases.setdefault(self.name, Phase())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, all is counted for phase ``name``."""
        before = self.name
        self._turn_to(name)
        try:
            yield
        except Exception:
            self.failed = name if self.failed == "start" else self.failed
            raise
        finally:
            self._turn_to(before)

    def _turn_to(self, name: str) -> None:
        self.name, self._now = name, self.phases.setdefault(name, Phase())
        self._now.peak = max(self._now.peak, self.held)

    def computed(self, flops: int) -> None:
        self._now.flops += flops

    def sent(self, group: str, size: int) -> None:
        self._now.sent[group] += size
        self._now.calls[group] += 1

    def waited(self) -> None:
        self._now.syncs += 1

    def made(self, storage: Any) -> None:
        """A tensor has ``storage`` on the device, which may be known already."""
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = 0
        self._takes(storage)
        weakref.finalize(storage, self._freed, key)

    def resized(self, storage: Any) -> None:
        """``storage`` has another size now."""
        if storage._cdata in self._known:
            self._takes(storage)

    def _takes(self, storage: Any) -> None:
        size = -(-storage.nbytes() // _ROUNDING) * _ROUNDING
        self.held += size - self._known[storage._cdata]
        self._known[storage._cdata] = size
        self._now.peak = max(self._now.peak, self.held)

    def _freed(self, key: int) -> None:
        self.held -= self._known.pop(key)
