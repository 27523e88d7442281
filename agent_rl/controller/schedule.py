"""Which tasks a global step takes: shuffled epochs, a function of the seed and the step alone, so that a resumed run
takes the tasks an unkilled one would have taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_rl.errors import ConfigError
from envs import Task


def tasks_of_step(tasks: Sequence[Task], step: int, per_step: int, seed: int) -> list[Task]:
    """The ``per_step`` tasks of global step ``step`` (the first is 1); no task twice in an epoch.

    Raises ConfigError where there are fewer tasks than one step wants.
    """
    if len(tasks) < per_step:
        raise ConfigError(f"rollout.tasks_per_step: {per_step} tasks a step, but the train split has {len(tasks)}")
    first = (step - 1) * per_step
    return [tasks[_index(first + offset, len(tasks), seed)] for offset in range(per_step)]


def _index(position: int, count: int, seed: int) -> int:
    epoch, offset = divmod(position, count)
    return int(np.random.default_rng([seed, epoch]).permutation(count)[offset])
