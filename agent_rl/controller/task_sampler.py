"""Which task is drawn at which position of a run's data: shuffled epochs, a function of seed and position alone, so
that a resumed run draws the tasks an unkilled one would have drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_rl.errors import ConfigError
from envs import Task


def check_enough(tasks: Sequence[Task], per_step: int) -> None:
    """Raises ConfigError where there are fewer tasks than one step wants."""
    if len(tasks) < per_step:
        raise ConfigError(f"rollout.tasks_per_step: {per_step} tasks a step, but the train split has {len(tasks)}")


def task_at(tasks: Sequence[Task], position: int, seed: int) -> Task:
    """The task at ``position`` of the data (the first is 0); no task twice in an epoch."""
    epoch, offset = divmod(position, len(tasks))
    return tasks[int(np.random.default_rng([seed, epoch]).permutation(len(tasks))[offset])]
