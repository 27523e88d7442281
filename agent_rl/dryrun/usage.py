"""What a rehearsed rank has held, computed and sent, phase by phase."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agent_rl.dryrun.names import Owner
from agent_rl.planner.hardware import Gpu

ROUNDING = 512
"""torch's allocator gives memory in pieces of so many bytes."""


@dataclass
class Phase:
    """One phase: ``flops`` of matrix products and attention, ``seconds`` that all its operations take at least by the
    GPU's speed, ``sent`` bytes and ``calls`` of collectives by group, and ``syncs``, how often the host waited for the
    device."""

    flops: int = 0
    seconds: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    syncs: int = 0


@dataclass(slots=True)
class _Piece:
    """Memory of the device, in bytes, and who holds it."""

    size: int
    owner: Owner


@dataclass(frozen=True, slots=True)
class Held:
    """The most bytes of device memory that a phase held at once, and by whom."""

    peak: int
    owners: dict[Owner, int]


class Ledger:
    """Adds up what happens, by phase, as on ``gpu``. ``held``: bytes of device memory that are there now; ``pinned``:
    of the host. ``failed``: the phase that an exception came out of first."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.phases: dict[str, Phase] = {}
        self.held = self.pinned = 0
        self._known: dict[int, _Piece] = {}
        self._events: list[tuple[str, _Piece | None, int]] = []
        self.name = self.failed = ""
        self._owner: Owner = "temporaries"
        self._now = Phase()  # of nothing; what is outside of all phases is of no interest

    @contextmanager
    def phase(self, name: str, owner: Owner = "temporaries") -> Iterator[None]:
        """Inside, all is counted for phase ``name``, and ``owner`` holds what is made."""
        before = self.name, self._owner
        self._turn_to(name, owner)
        try:
            yield
        except Exception:
            self.failed = self.failed or name
            raise
        finally:
            self._turn_to(*before)

    def _turn_to(self, name: str, owner: Owner) -> None:
        self.name, self._owner = name, owner
        self._now = self.phases.setdefault(name, Phase()) if name else Phase()
        self._events.append((name, None, 0))

    def ran(self, flops: int, moved: int, precision: str) -> None:
        """An operation on the device of ``flops``, which reads and writes ``moved`` bytes of its memory."""
        self._now.flops += flops
        self._now.seconds += max(flops / self.gpu.flops.get(precision, 1e30), moved / self.gpu.memory)

    def copied(self, size: int, *, waits: bool) -> None:
        """Bytes went from the host to the device or back; ``waits``: the host waited until they were there."""
        self._now.seconds += size / self.gpu.host
        self._now.syncs += waits

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
        self._known[key] = _Piece(0, self._owner)
        self._takes(storage)
        weakref.finalize(storage, self._freed, key)

    def resized(self, storage: Any) -> None:
        """``storage`` has another size now."""
        if storage._cdata in self._known:
            self._takes(storage)

    def _takes(self, storage: Any) -> None:
        self._resize(self._known[storage._cdata], -(-storage.nbytes() // ROUNDING) * ROUNDING)

    def _freed(self, key: int) -> None:
        self._resize(self._known.pop(key), 0)

    def _resize(self, piece: _Piece, size: int) -> None:
        self.held += size - piece.size
        self._events.append((self.name, piece, size - piece.size))
        piece.size = size

    def own(self, owner: Owner, storages: Iterable[Any]) -> None:
        """``owner`` holds ``storages``, as long as they are there."""
        for storage in storages:
            if (piece := self._known.get(storage._cdata)) is not None:
                piece.owner = owner

    def keep(self, owner: Owner) -> None:
        """``owner`` holds whatever is there now and belongs to nobody else."""
        for piece in self._known.values():
            if piece.owner == "temporaries":
                piece.owner = owner

    def most(self) -> dict[str, Held]:
        """The fullest moment of each phase. Who holds a piece may have been said after that moment."""
        found: dict[str, Held] = {}
        owners: Counter[Owner] = Counter()
        total, highest = 0, dict.fromkeys(self.phases, -1) | {"": math.inf}
        for name, piece, more in self._events:
            if piece is not None:
                owners[piece.owner] += more
                total += more
            if total > highest[name]:
                highest[name] = total
                found[name] = Held(total, {owner: size for owner, size in owners.items() if size})
        return found
