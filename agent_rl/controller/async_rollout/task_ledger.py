"""Records the outcome of every position of the data. Pure bookkeeping; it refuses to count a position twice.

::

    admitted ─▶ running ─┬─▶ kept ───────┐
                         ├─▶ discarded ──┤ taken by a batch: closed
                         ├─▶ dropped ────┤
                         └─▶ left out ───┘

Positions are admitted in order without gaps; they may be closed in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType

from agent_rl.errors import AgentRlError


class Outcome(StrEnum):
    """The outcome of an admitted position."""

    RUNNING = "running"  # its episodes run
    KEPT = "kept"  # its group is trained on
    DISCARDED = "discarded"  # all rewards of its group are equal; dynamic sampling draws another
    DROPPED = "dropped"  # infrastructure failures exceeded its budget
    LEFT_OUT = "left_out"  # its task cannot be graded; another is drawn in its place


class TaskLedger:
    """The positions from ``position`` on; an earlier start of the run closed those in ``ahead``."""

    def __init__(self, position: int = 0, ahead: Iterable[int] = ()) -> None:
        self._lowest = self._next = position
        self._ahead = set(ahead)
        self._open: dict[int, Outcome] = {}
        self._closed: Counter[Outcome] = Counter()
        self._admitted = 0
        self._pass_closed()

    @property
    def position(self) -> int:
        """The lowest position that is not closed."""
        return self._lowest

    @property
    def ahead(self) -> tuple[int, ...]:
        """The closed positions after :attr:`position`, in order."""
        return tuple(sorted(self._ahead))

    @property
    def next(self) -> int:
        """The next position to admit."""
        return self._next

    @property
    def open(self) -> Mapping[int, Outcome]:
        """The positions that were admitted and not closed, in order."""
        return MappingProxyType(self._open)

    def count(self, outcome: Outcome) -> int:
        """Number of open positions with this outcome."""
        return sum(each is outcome for each in self._open.values())

    def admit(self) -> int:
        """Admit the next position; its episodes may start."""
        position = self._next
        self._open[position] = Outcome.RUNNING
        self._admitted += 1
        self._next += 1
        self._pass_closed()
        return position

    def end(self, position: int, outcome: Outcome) -> None:
        """Record the outcome of ``position``. Raises AgentRlError unless it was running."""
        if outcome is Outcome.RUNNING or self._open.get(position) is not Outcome.RUNNING:
            raise AgentRlError(
                f"position {position} of the data ended as {outcome} while it was {self._open.get(position)}"
            )
        self._open[position] = outcome

    def close(self, positions: Iterable[int]) -> None:
        """A batch took ``positions``. Raises AgentRlError unless each of them is open and ended."""
        for position in positions:
            outcome = self._open.pop(position, Outcome.RUNNING)
            if outcome is Outcome.RUNNING:
                raise AgentRlError(f"position {position} of the data was taken by a batch before it ended")
            self._closed[outcome] += 1
            self._ahead.add(position)
        while self._lowest in self._ahead:
            self._ahead.remove(self._lowest)
            self._lowest += 1

    def check(self) -> None:
        """Raises AgentRlError unless every admitted position is closed once, or open."""
        if self._closed.total() + len(self._open) != self._admitted:
            raise AgentRlError(
                f"{self._admitted} positions of the data were admitted, {self._closed.total()} closed, and "
                f"{len(self._open)} are open"
            )

    def _pass_closed(self) -> None:
        while self._next in self._ahead:
            self._next += 1
