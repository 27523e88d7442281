"""Limits how far sampling runs ahead and selects the positions of each batch, so that no trained token is too old.

With S = ``async_rollout.depth``, K = ``max_staleness``, P = ``tasks_per_step`` and ``released`` batches trained and
published::

    admit    a position if the batch that it would fall into, were all running groups kept, is at most released + S + 1
    take     the oldest ended positions until P are filled; a running position is overtaken by at most (K - S) P

So a position is admitted at most S batches before its own, and overtaking adds K - S. With K = S batches are ranges of
the data that depend on how groups end, not on when. A position fills a slot of its batch if its group is kept. For a
position left out another is drawn, with dynamic sampling also for a discarded or dropped one, up to ``max_draws`` per
batch. Without dynamic sampling a dropped group leaves its slot empty.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agent_rl.controller.async_rollout.task_ledger import Outcome, TaskLedger
from agent_rl.utils.concurrency import Notifier


@dataclass(frozen=True, slots=True)
class BufferRules:
    """``width``: slots P per batch. ``depth`` S and ``staleness`` K of the pipeline. ``max_draws``: maximum
    positions per batch, without those left out. ``dynamic``: dynamic sampling. ``steps``: the run's last step; no
    position is drawn after its batch."""

    width: int
    depth: int
    staleness: int
    max_draws: int
    steps: int
    dynamic: bool = False

    def fills(self, outcome: Outcome) -> bool:
        """Whether a position with this outcome fills a slot of its batch."""
        return outcome in (Outcome.RUNNING, Outcome.KEPT) or (outcome is Outcome.DROPPED and not self.dynamic)

    @property
    def window(self) -> int:
        """Number of positions, from the oldest running one on, that may be taken."""
        return (self.staleness - self.depth) * self.width + 1


class _BatchFill:
    """The filled slots and draws of one batch while it is assembled."""

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
        return self.full or self._drawn >= self._rules.max_draws


def batches_ahead(ledger: TaskLedger, rules: BufferRules, before: int | None = None) -> int:
    """Number of complete batches that the open positions make (up to position ``before``), if all running groups are
    kept."""
    complete, fill = 0, _BatchFill(rules)
    for position, outcome in ledger.open.items():
        if position == before:
            break
        fill.add(outcome)
        if fill.complete:
            complete, fill = complete + 1, _BatchFill(rules)
    return complete


def next_batch(ledger: TaskLedger, rules: BufferRules) -> tuple[int, ...]:
    """The positions of the next batch, including those discarded on the way; empty while it is undetermined."""
    taken, fill, oldest_running = list[int](), _BatchFill(rules), None
    for position, outcome in ledger.open.items():
        if outcome is Outcome.RUNNING:
            oldest_running = position if oldest_running is None else oldest_running
        elif oldest_running is not None and position >= oldest_running + rules.window:
            return ()
        else:
            taken.append(position)
            fill.add(outcome)
            if fill.full or (fill.complete and oldest_running is None):
                return tuple(taken)
    return ()


class RolloutBuffer:
    """The open positions of a run whose first ``done`` batches are trained and published."""

    def __init__(self, rules: BufferRules, ledger: TaskLedger, done: int = 0) -> None:
        self.ledger = ledger
        self.rules, self._taken, self._released = rules, done, done
        self._recorded: Collection[int] = ()
        self._changed = Notifier()

    async def admit(self) -> int:
        """The next position, as soon as the buffer has capacity."""
        while not self.has_capacity:
            await self._changed.wait()
        return self.ledger.admit()

    @property
    def has_capacity(self) -> bool:
        """Whether another position may be admitted."""
        if self.ledger.next <= max(self._recorded, default=-1):
            return True
        ahead = self._taken + batches_ahead(self.ledger, self.rules)
        return ahead < min(self._released + self.rules.depth + 1, self.rules.steps)

    def oldest(self, position: int) -> int:
        """The oldest weight version allowed for tokens of the open ``position``, whichever batch takes it. Matters
        for positions whose sampling an earlier start of the run began."""
        return max(0, self._taken + batches_ahead(self.ledger, self.rules, position) - self.rules.depth)

    @property
    def ready(self) -> Sequence[int]:
        """The positions of the next batch; empty while it is incomplete."""
        if not self._recorded:
            return next_batch(self.ledger, self.rules)
        outcomes = [self.ledger.open.get(position, Outcome.RUNNING) for position in self._recorded]
        return () if Outcome.RUNNING in outcomes else sorted(self._recorded)

    def end(self, position: int, outcome: Outcome) -> None:
        """Record the outcome of the group of ``position``."""
        self.ledger.end(position, outcome)
        self._changed.notify()

    async def take(self, recorded: Collection[int] = ()) -> dict[int, Outcome]:
        """Wait for the next batch; returns its positions in order, with their outcomes. ``recorded``: its positions
        in an earlier start of the run, which are used again."""
        self._recorded = recorded
        self._changed.notify()
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
        self._changed.notify()
