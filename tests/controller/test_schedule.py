from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.controller.async_rollout.producer import check_enough, task_at
from agent_rl.errors import ConfigError
from envs import Task

TASKS = [Task(str(index), "demo", {}) for index in range(12)]


@given(seed=st.integers(0, 5), epoch=st.integers(0, 4))
def test_an_epoch_takes_every_task_once(seed: int, epoch: int) -> None:
    taken = [task_at(TASKS, position, seed).id for position in range(12 * epoch, 12 * (epoch + 1))]
    assert Counter(taken) == Counter(task.id for task in TASKS)


def test_epochs_and_seeds_have_different_orders() -> None:
    starts = [(seed, 12 * epoch) for seed in range(3) for epoch in range(3)]
    orders = {tuple(task_at(TASKS, start + at, seed).id for at in range(12)) for seed, start in starts}
    assert len(orders) == 9


def test_too_few_tasks_are_a_config_error() -> None:
    check_enough(TASKS, 12)
    with pytest.raises(ConfigError, match="13 tasks a step, but the train split has 12"):
        check_enough(TASKS, 13)
