"""The rules of the pipeline over any schedule: no token too old, every position once, no deadlock."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agent_rl.controller.async_rollout.buffer import BufferRules, RolloutBuffer
from agent_rl.controller.async_rollout.task_ledger import Outcome, TaskLedger
from agent_rl.errors import AgentRlError

ENDS = (Outcome.KEPT, Outcome.KEPT, Outcome.KEPT, Outcome.DISCARDED, Outcome.DROPPED, Outcome.LEFT_OUT)


@dataclass
class Schedule:
    """How the groups of a run end (by position, over and over), and in which order things happen."""

    rules: BufferRules
    ends: list[Outcome]
    choices: list[int]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    width, depth = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    rules = BufferRules(
        width=width, depth=depth, staleness=draw(st.integers(depth, 6)),
        max_draws=width * draw(st.integers(1, 4)), steps=draw(st.integers(1, 8)), dynamic=draw(st.booleans()),
    )  # fmt: skip
    ends = st.lists(st.sampled_from(ENDS), min_size=1, max_size=24).filter(lambda ends: {*ends} != {Outcome.LEFT_OUT})
    return Schedule(rules, draw(ends), draw(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=64)))


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that does not wait."""
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    return ended.value.value


def play(schedule: Schedule) -> list[dict[int, Outcome]]:
    """The batches of a run, each checked as it is taken. Nothing that can happen is put off for ever."""
    rules, buffer = schedule.rules, RolloutBuffer(schedule.rules, TaskLedger())
    admitted_at, running, batches, training = dict[int, int](), list[int](), list[dict[int, Outcome]](), False
    at = 0
    while len(batches) < rules.steps or training:
        can = ["admit"] * buffer.has_capacity + ["end"] * bool(running) + ["release"] * training
        can += ["take"] * (bool(buffer.ready) and not training)
        assert can, f"nothing can happen any more: {buffer.ledger.open}"
        choice, at = schedule.choices[at % len(schedule.choices)] + at // len(schedule.choices), at + 1
        what = can[choice % len(can)]
        if what == "admit":
            position = now(buffer.admit())
            admitted_at[position] = len(batches) - training
            running.append(position)
        elif what == "end":
            position = running.pop(choice // 4 % len(running))
            buffer.end(position, schedule.ends[position % len(schedule.ends)])
        elif what == "take":
            batches.append(now(buffer.take()))
            training = True
            check_batch(batches, admitted_at, rules)
        else:
            buffer.release()
            training = False
    return batches


def check_batch(batches: list[dict[int, Outcome]], admitted_at: dict[int, int], rules: BufferRules) -> None:
    step, batch = len(batches), batches[-1]
    assert all(step - 1 - admitted_at[position] <= rules.staleness for position in batch), "a token is too old"
    assert Outcome.RUNNING not in batch.values()
    restore = sum(rules.fills(outcome) for outcome in batch.values())
    drawn = sum(outcome is not Outcome.LEFT_OUT for outcome in batch.values())
    assert restore == rules.width or drawn >= rules.max_draws


def check_run(schedule: Schedule) -> None:
    batches = play(schedule)
    taken = [position for batch in batches for position in batch]
    assert len(taken) == len(set(taken)), "a position was taken twice"
    if schedule.rules.window > 1:
        return
    assert taken == list(range(len(taken))), "K = S takes the data in order, whatever finishes first"
    other = Schedule(schedule.rules, schedule.ends, [0])
    assert play(other) == batches, "what a batch has depends on time"


@settings(max_examples=300)
@given(schedules())
def test_no_schedule_breaks_the_rules(schedule: Schedule) -> None:
    check_run(schedule)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@settings(
    max_examples=100_000, phases=[Phase.generate], suppress_health_check=list(HealthCheck), deadline=None, database=None
)
@given(schedules())
def test_no_schedule_of_a_hundred_thousand_breaks_the_rules(schedule: Schedule) -> None:
    check_run(schedule)


def test_at_depth_0_nothing_is_drawn_beyond_the_batch() -> None:
    rules = BufferRules(width=2, depth=0, staleness=0, max_draws=4, steps=9)
    buffer = RolloutBuffer(rules, TaskLedger())
    assert [now(buffer.admit()) for _ in range(2)] == [0, 1]
    assert not buffer.has_capacity
    buffer.end(1, Outcome.DISCARDED)
    assert now(buffer.admit()) == 2
    for position in (0, 2):
        buffer.end(position, Outcome.KEPT)
    assert not buffer.has_capacity
    assert list(now(buffer.take())) == [0, 1, 2]
    assert not buffer.has_capacity
    buffer.release()
    assert buffer.has_capacity


def test_a_batch_done_again_has_the_positions_that_it_had() -> None:
    buffer = RolloutBuffer(BufferRules(2, 1, 2, 8, steps=9), TaskLedger(position=3, ahead=(5,)), done=4)
    assert [now(buffer.admit()) for _ in range(3)] == [3, 4, 6], "position 5 was taken before"
    for position in (3, 4, 6):
        buffer.end(position, Outcome.KEPT)
    assert list(now(buffer.take([6, 4]))) == [4, 6]
    assert (buffer.ledger.position, buffer.ledger.ahead) == (3, (4, 5, 6))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ledger: ledger.end(7, Outcome.KEPT),
        lambda ledger: (ledger.end(0, Outcome.KEPT), ledger.end(0, Outcome.KEPT)),
        lambda ledger: ledger.close([0]),
        lambda ledger: (ledger.end(0, Outcome.KEPT), ledger.close([0]), ledger.close([0])),
    ],
)
def test_nothing_is_counted_twice(wrong: Callable[[TaskLedger], object]) -> None:
    ledger = TaskLedger()
    ledger.admit()
    with pytest.raises(AgentRlError, match="of the data"):
        wrong(ledger)
