"""A trainer's rank dies and the run goes on by itself: ranks are started anew and the last checkpoint is loaded.

Engines, sandboxes and the controller stay. From the checkpoint on the steps are done again as after a kill of the whole
run, with the episodes that the journal holds.
"""

from __future__ import annotations

from agent_rl.errors import TrainerDied


class Restarts:
    """Counts deaths of the trainer: at most ``limit`` in a row without a new checkpoint between them."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._step = limit, 0, 0

    def count(self, death: TrainerDied, step: int) -> str:
        """Count a ``death`` while the newest checkpoint is that of ``step`` (0: there is none). Returns what is done
        now, in one line; raises TrainerDied where that was one too many."""
        if step != self._step:
            self._step, self._used = step, 0
        where = f"the checkpoint of step {step}" if step else "the start: no checkpoint is complete yet"
        if self._used == self._limit:
            often = f"{self._used} restart(s) from {where}" if self._limit else "train.restarts is 0"
            raise TrainerDied(f"{death}; given up: {often}. The same command goes on from there") from death
        self._used += 1
        return f"{death}; starting the trainer again from {where} (restart {self._used} of {self._limit})"
