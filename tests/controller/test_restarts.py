"""How often a trainer that dies is started again."""

from __future__ import annotations

import pytest

from agent_rl.controller.checkpoints import TrainerRestarts
from agent_rl.errors import TrainerDied

DEATH = TrainerDied("a trainer rank died")


def test_a_new_checkpoint_resets_the_count_of_restarts() -> None:
    restarts = TrainerRestarts(2)
    lines = [restarts.count(DEATH, step) for step in (0, 0, 4, 4, 8)]
    start = "a trainer rank died; starting the trainer again from the start: no checkpoint is complete yet"
    assert lines[:2] == [f"{start} (restart 1 of 2)", f"{start} (restart 2 of 2)"]
    again = "a trainer rank died; starting the trainer again from the checkpoint of step"
    assert lines[2:] == [f"{again} {step} (restart {number} of 2)" for step, number in ((4, 1), (4, 2), (8, 1))]
    restarts.count(DEATH, 8)
    with pytest.raises(TrainerDied, match=r"giving up: 2 restart\(s\) from the checkpoint of step 8\. The same"):
        restarts.count(DEATH, 8)


def test_without_restarts_the_first_death_ends_the_run() -> None:
    with pytest.raises(TrainerDied, match=r"giving up: train\.restarts is 0\. The same command continues from there"):
        TrainerRestarts(0).count(DEATH, 3)
