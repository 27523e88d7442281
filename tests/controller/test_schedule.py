from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.controller.task_order import TaskOrder, WeightedTasks, task_at
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
    order = TaskOrder({"": WeightedTasks(TASKS)}, 0)
    order.check(12)
    with pytest.raises(ConfigError, match="13 tasks per step need 13 of the train split, which has 12"):
        order.check(13)


def draws(weights: Sequence[float], count: int, sizes: Sequence[int] = (5, 3, 7)) -> list[str]:
    order = TaskOrder(
        {
            str(source): WeightedTasks([Task(f"{source}:{index}", "demo", {}) for index in range(size)], weight)
            for source, (weight, size) in enumerate(zip(weights, sizes, strict=False))
        },
        seed=1,
    )
    return [order.at(position).id for position in range(count)]


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=3), count=st.integers(1, 60))
def test_sources_are_drawn_in_the_proportions_of_their_weights(weights: list[float], count: int) -> None:
    drawn = Counter(task.partition(":")[0] for task in draws(weights, count))
    for source, weight in enumerate(weights):
        assert abs(drawn[str(source)] - count * weight / sum(weights)) < len(weights)


def test_each_source_has_epochs_of_its_own() -> None:
    drawn = draws((3, 1), 20)
    for source, size, epochs in (("0", 5, 3), ("1", 3, 1)):
        own = [task for task in drawn if task.startswith(source)]
        for epoch in range(epochs):
            assert len(set(own[epoch * size : (epoch + 1) * size])) == size


def test_a_later_position_can_be_drawn_first() -> None:
    sources = {"a": WeightedTasks(TASKS[:6], 2), "b": WeightedTasks(TASKS[6:])}
    forwards, backwards = TaskOrder(sources, 0), TaskOrder(sources, 0)
    assert [forwards.at(at) for at in range(30)] == [backwards.at(at) for at in reversed(range(30))][::-1]


def test_one_source_is_drawn_as_without_sources() -> None:
    order = TaskOrder({"": WeightedTasks(TASKS, 0.5)}, 3)
    assert [order.at(at) for at in range(30)] == [task_at(TASKS, at, 3) for at in range(30)]


def test_too_few_tasks_of_a_source_are_a_config_error() -> None:
    order = TaskOrder({"a": WeightedTasks(TASKS, 1), "b": WeightedTasks(TASKS[:2], 1)}, 0)
    order.check(4)
    with pytest.raises(ConfigError, match=r"6 tasks per step need 3 of train\.sources\.b, which has 2"):
        order.check(6)
