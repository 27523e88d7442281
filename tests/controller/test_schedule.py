from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.controller.schedule import tasks_of_step
from agent_rl.errors import ConfigError
from envs import Task

TASKS = [Task(str(index), "demo", {}) for index in range(12)]


@given(per_step=st.integers(1, 12), seed=st.integers(0, 5))
def test_an_epoch_takes_every_task_once(per_step: int, seed: int) -> None:
    taken = [task.id for step in range(1, 13) for task in tasks_of_step(TASKS, step, per_step, seed)]
    for epoch in range(len(taken) // 12):
        assert Counter(taken[12 * epoch : 12 * (epoch + 1)]) == Counter(task.id for task in TASKS)


def test_the_schedule_is_a_function_of_seed_and_step() -> None:
    assert tasks_of_step(TASKS, 7, 5, 3) == tasks_of_step(TASKS, 7, 5, 3)
    assert [t.id for t in tasks_of_step(TASKS, 1, 12, 0)] != [t.id for t in tasks_of_step(TASKS, 1, 12, 1)]


def test_too_few_tasks_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="13 tasks a step, but the train split has 12"):
        tasks_of_step(TASKS, 1, 13, 0)
