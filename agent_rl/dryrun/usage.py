"""Records what a dry-run rank allocates, computes and sends, by phase."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agent_rl.dryrun.job import Owner
from agent_rl.planner.hardware import Gpu

ROUNDING = 512
"""Block size of torch's GPU allocator, in bytes."""


@dataclass
class Phase:
    """One phase: ``flops`` of matrix products and attention, those of ``attention``, ``seconds`` that its operations
    take at the GPU's peak speed, ``sent`` bytes and ``calls`` of collectives by group, and ``syncs``: how often the
    host waited for the GPU.
    """

    flops: int = 0
    attention: int = 0
    seconds: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    syncs: int = 0


@dataclass(slots=True)
class _Allocation:
    """Bytes of GPU memory and their owner."""

    size: int
    owner: Owner


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most bytes of GPU memory that a phase used at once, by owner."""

    peak: int
    owners: dict[Owner, int]


class UsageRecorder:
    """Adds up the use of ``gpu`` by phase. ``allocated``: bytes of GPU memory in use now; ``pinned``: bytes of pinned
    host memory; ``failed_phase``: the phase that first raised an exception."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.phases: dict[str, Phase] = {}
        self.allocated = self.pinned = 0
        self._allocations: dict[int, _Allocation] = {}
        self._events: list[tuple[str, _Allocation | None, int]] = []
        self.phase_name = self.failed_phase = ""
        self._owner: Owner = "temporaries"
        self._phase = Phase()  # discarded: collects what happens outside of all phases

    @contextmanager
    def phase(self, name: str, owner: Owner = "temporaries") -> Iterator[None]:
        """Count everything inside for phase ``name`` and assign new allocations to ``owner``."""
        before = self.phase_name, self._owner
        self._enter(name, owner)
        try:
            yield
        except Exception:
            self.failed_phase = self.failed_phase or name
            raise
        finally:
            self._enter(*before)

    def _enter(self, name: str, owner: Owner) -> None:
        self.phase_name, self._owner = name, owner
        self._phase = self.phases.setdefault(name, Phase()) if name else Phase()
        self._events.append((name, None, 0))

    def add_operation(self, flops: int, moved: int, precision: str, *, attention: bool = False) -> None:
        """Count a GPU operation of ``flops`` that reads and writes ``moved`` bytes of GPU memory."""
        self._phase.flops += flops
        self._phase.attention += flops * attention
        self._phase.seconds += max(flops / self.gpu.flops.get(precision, 1e30), moved / self.gpu.memory)

    def add_copy(self, size: int, *, waits: bool) -> None:
        """Count a copy between host and GPU of ``size`` bytes; ``waits``: the host waited for it."""
        self._phase.seconds += size / self.gpu.host
        self._phase.syncs += waits

    def add_collective(self, group: str, size: int) -> None:
        """Count a collective that sends ``size`` bytes from this rank."""
        self._phase.sent[group] += size
        self._phase.calls[group] += 1

    def add_sync(self) -> None:
        """Count a wait of the host for the GPU."""
        self._phase.syncs += 1

    def track_storage(self, storage: Any) -> None:
        """Count the memory of a GPU ``storage`` until it is freed. Idempotent per storage."""
        key = storage._cdata
        if key in self._allocations:
            return
        self._allocations[key] = _Allocation(0, self._owner)
        self._set_storage_size(storage)
        weakref.finalize(storage, self._free, key)

    def update_size(self, storage: Any) -> None:
        """Account for a resized ``storage``."""
        if storage._cdata in self._allocations:
            self._set_storage_size(storage)

    def _set_storage_size(self, storage: Any) -> None:
        self._resize(self._allocations[storage._cdata], -(-storage.nbytes() // ROUNDING) * ROUNDING)

    def _free(self, key: int) -> None:
        self._resize(self._allocations.pop(key), 0)

    def _resize(self, allocation: _Allocation, size: int) -> None:
        self.allocated += size - allocation.size
        self._events.append((self.phase_name, allocation, size - allocation.size))
        allocation.size = size

    def assign_owner(self, owner: Owner, storages: Iterable[Any]) -> None:
        """Set the owner of ``storages``."""
        for storage in storages:
            if (allocation := self._allocations.get(storage._cdata)) is not None:
                allocation.owner = owner

    def assign_unowned(self, owner: Owner) -> None:
        """Set the owner of all current temporaries."""
        for allocation in self._allocations.values():
            if allocation.owner == "temporaries":
                allocation.owner = owner

    def peaks(self) -> dict[str, PeakMemory]:
        """Returns the peak of each phase. Owners are the final ones, also when assigned after the peak."""
        peaks: dict[str, PeakMemory] = {}
        owners: Counter[Owner] = Counter()
        total, highest = 0, dict.fromkeys(self.phases, -1) | {"": math.inf}
        for name, allocation, change in self._events:
            if allocation is not None:
                owners[allocation.owner] += change
                total += change
            if total > highest[name]:
                highest[name] = total
                peaks[name] = PeakMemory(total, {owner: size for owner, size in owners.items() if size})
        return peaks
