"""How far sampling may run ahead, and which positions make a batch: by construction no trained token is too old.

S is ``async_rollout.depth``, K ``max_staleness``, P ``tasks_per_step``; ``released`` batches are trained and
published::

    admit    while the batch that the next position would fall into, were all that run kept, is at most released + S + 1
    take     the oldest that ended, until P are filled; a position that still runs is overtaken by (K - S) P at most

So a position is admitted at most S batches before its own, and overtaking adds K - S. With K = S batches are stretches
of the data, and which those are depends on how groups end and not on when. A position fills a place of its batch if
its group is kept; for one left out another is drawn, with dynamic sampling also for one discarded or dropped, up to
``most_draws`` a batch. Without it a dropped group leaves its place empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agent_rl.controller.async_rollout.task_ledger import Ledger, Outcome
from agent_rl.utils.concurrency import Pulse


@dataclass(frozen=True, slots=True)
class BufferRules:
    """``width``: the places P of a batch; ``depth`` S and ``staleness`` K of the pipeline; ``most_draws``: positions
    that a batch may use up, but for those left out; ``dynamic``: dynamic sampling; ``steps``: the run's last, past
    whose batch nothing is drawn."""

    width: int
    depth: int
    staleness: int
    most_draws: int
    steps: int
    dynamic: bool = False

    def fills(self, outcome: Outcome) -> bool:
        """Whether a position takes up a place of its batch."""
        return outcome in (Outcome.RUNNING, Outcome.KEPT) or (outcome is Outcome.DROPPED and not self.dynamic)

    @property
    def window(self) -> int:
        """Positions from the oldest running one on, itself included, that may be taken."""
        return (self.staleness - self.depth) * self.width + 1


class _Counted:
    """The places and draws of one batch while it is made up."""

    def __init__(self, rules: BufferRules) -> None:
        self._rules, self._filled, self._drawn = rules, 0, 0

    def add(self, outcome: Outcome) -> None:
        self._filled += self._rules.fills(outcome)
        self._drawn += outcome is not Outcome.LEFT_OUT

    @property
    def full(self) -> bool:
        return self._filled == self._rules.width

    @property
    def complete(self) -> bool:
        return self.full or self._drawn >= self._rules.most_draws


def batches_ahead(ledger: Ledger, rules: BufferRules, before: int | None = None) -> int:
    """How many whole batches the open positions make, or those ``before`` one, if all that run are kept."""
    whole, counted = 0, _Counted(rules)
    for position, outcome in ledger.open.items():
        if position == before:
            break
        counted.add(outcome)
        if counted.complete:
            whole, counted = whole + 1, _Counted(rules)
    return whole


def next_batch(ledger: Ledger, rules: BufferRules) -> tuple[int, ...]:
    """The positions of the next batch, those discarded on the way included; none while it cannot be told yet."""
    taken, counted, oldest_running = list[int](), _Counted(rules), None
    for position, outcome in ledger.open.items():
        if outcome is Outcome.RUNNING:
            oldest_running = position if oldest_running is None else oldest_running
        elif oldest_running is not None and position >= oldest_running + rules.window:
            return ()
        else:
            taken.append(position)
            counted.add(outcome)
            if counted.full or (counted.complete and oldest_running is None):
                return tuple(taken)
    return ()


class RolloutBuffer:
    """The open positions of a run whose first ``done`` batches are trained and published."""

    def __init__(self, rules: BufferRules, ledger: Ledger, done: int = 0) -> None:
        self.ledger = ledger
        self._rules, self._taken, self._released = rules, done, done
        self._recorded: Collection[int] = ()
        self._changed = Pulse()

    async def admit(self) -> int:
        """The next position, as soon as there is room for it."""
        while not self.has_room:
            await self._changed.wait()
        return self.ledger.admit()

    @property
    def has_room(self) -> bool:
        """Whether a further position may be admitted."""
        if self.ledger.next <= max(self._recorded, default=-1):
            return True
        ahead = self._taken + batches_ahead(self.ledger, self._rules)
        return ahead < min(self._released + self._rules.depth + 1, self._rules.steps)

    def oldest(self, position: int) -> int:
        """The oldest weights that tokens of ``position``, which is open, may be of: whatever the batch is that takes
        it, they are not too old for that. A position that is admitted in its turn samples no older ones; one whose
        sampling an earlier start of the run began may have."""
        return max(0, self._taken + batches_ahead(self.ledger, self._rules, position) - self._rules.depth)

    @property
    def ready(self) -> Sequence[int]:
        """The positions of the next batch; none while it is not there."""
        if not self._recorded:
            return next_batch(self.ledger, self._rules)
        outcomes = [self.ledger.open.get(position, Outcome.RUNNING) for position in self._recorded]
        return () if Outcome.RUNNING in outcomes else sorted(self._recorded)

    def end(self, position: int, outcome: Outcome) -> None:
        """The group of ``position`` ended."""
        self.ledger.end(position, outcome)
        self._changed.give()

    async def take(self, recorded: Collection[int] = ()) -> dict[int, Outcome]:
        """The next batch, as soon as it is there: its positions, in order, and what became of each. ``recorded``: those
        that it had in an earlier start of the run, which it is made of again."""
        self._recorded = recorded
        self._changed.give()
        while not (positions := self.ready):
            await self._changed.wait()
        batch = {position: self.ledger.open[position] for position in positions}
        self.ledger.close(positions)
        self.ledger.check()
        self._taken, self._recorded = self._taken + 1, ()
        return batch

    def release(self) -> None:
        """The batch taken last is trained, and its weights are published."""
        self._released = self._taken
        self._changed.give()
