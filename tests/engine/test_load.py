"""The times of engines without a request, and their places, on a clock that the test sets."""

from __future__ import annotations

from contextlib import ExitStack

from agent_rl.engine.utilization import EngineUtilization


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_empty_and_busy_fractions_are_means_over_engines_and_time() -> None:
    clock = Clock()
    load = EngineUtilization(clock)
    load.add("a", 4)
    load.add("b", 4)
    with load.running("a"), load.running("a"):
        clock.now += 6.0
    with load.running("a"):
        clock.now += 2.0
    clock.now += 2.0
    # a: 2 of 10 s empty, 14 of 40 place-seconds taken; b: all empty
    assert load.metrics(("a", "b")) == {"engine/empty_fraction": 12 / 20, "engine/busy_fraction": 14 / 80}


def test_a_long_request_counts_for_each_step_in_part() -> None:
    clock = Clock()
    load = EngineUtilization(clock)
    load.add("a", 2)
    with ExitStack() as running:
        clock.now += 1.0
        running.enter_context(load.running("a"))
        clock.now += 3.0
        assert load.metrics(("a",)) == {"engine/empty_fraction": 1 / 4, "engine/busy_fraction": 3 / 8}
        clock.now += 5.0
    clock.now += 5.0
    assert load.metrics(("a",)) == {"engine/empty_fraction": 1 / 2, "engine/busy_fraction": 1 / 4}


def test_only_engines_in_use_with_known_slots_count() -> None:
    clock = Clock()
    load = EngineUtilization(clock)
    load.add("dead", 2)
    clock.now += 1.0
    load.add("new", 0)
    with load.running("new"):
        clock.now += 1.0
    assert load.metrics(("new",)) == {"engine/empty_fraction": 0.0}
    assert load.metrics(()) == {}
