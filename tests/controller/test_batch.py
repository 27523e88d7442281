"""Which tasks a step draws and which groups it keeps, however its episodes happen to finish."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.trajectories import trajectory

from agent_rl.config import RunConfig
from agent_rl.controller.advantages import build_samples
from agent_rl.controller.async_rollout.buffer import BufferRules, RolloutBuffer
from agent_rl.controller.async_rollout.producer import RolloutProducer
from agent_rl.controller.async_rollout.task_ledger import TaskLedger
from agent_rl.controller.batch import batch_metrics, build_batch, check_filled, goodput, rescore_values
from agent_rl.controller.journal import Journal
from agent_rl.controller.task_order import TaskOrder, WeightedTasks, task_at
from agent_rl.engine.types import Scores
from agent_rl.errors import RolloutFailed
from agent_rl.evaluation.quarantine import Quarantine, read_quarantine
from agent_rl.rollout.episode_recovery import TurnLog
from agent_rl.rollout.filters import masked_stops
from agent_rl.rollout.group import DroppedGroup, GroupSettings, Limiter, RolloutEvent
from agent_rl.rollout.rescore import Rescorer
from agent_rl.types import StopReason, Trajectory
from envs import Task

TASKS = [Task(f"task-{index}", "memory", {}) for index in range(40)]
SOLVED, UNSOLVED, MIXED, BROKEN, UNDECIDABLE = "all", "none", "some", "broken", "undecidable"


def config(*, wanted: int = 3, size: int = 2, train: dict[str, object] | None = None, **dynamic: object) -> RunConfig:
    rollout = {"tasks_per_step": wanted, "group_size": size, "sandbox_retries": 0, "dynamic_sampling": dynamic}
    return RunConfig.model_validate({"name": "n", "model": Path("m"), "rollout": rollout, "train": train or {}})


class Ends:
    """Episodes that end as ``outcomes`` say, by the position of their task, in any order of ``delays``."""

    def __init__(self, outcomes: Sequence[str], delays: Sequence[int] = (0,)) -> None:
        self._outcome = {task_at(TASKS, at, 0).id: outcomes[at % len(outcomes)] for at in range(len(TASKS))}
        self._delays = delays
        self.run: list[str] = []

    async def __call__(self, task: Task, log: TurnLog | None = None) -> Trajectory:
        outcome, number = self._outcome[task.id], len(self.run)
        self.run.append(task.id)
        for _ in range(self._delays[number % len(self._delays)]):
            await asyncio.sleep(0)
        if outcome in (BROKEN, UNDECIDABLE):
            stop = StopReason.SANDBOX_FAILURE if outcome == BROKEN else StopReason.UNDECIDABLE
            return replace(trajectory(0.0, task_id=task.id, stop=stop), reward=None, error=f"{outcome}: {task.id}")
        reward = {SOLVED: 1.0, UNSOLVED: 0.0, MIXED: float(self.run[:number].count(task.id) == 0)}[outcome]
        return trajectory(reward, task_id=task.id)


async def collect(chosen: RunConfig, ends: Ends, position: int = 0, **parts: Any) -> SimpleNamespace:
    """What the pump and the buffer of a run give its next step, from ``position`` of the data on."""
    rollout = chosen.rollout
    most = rollout.dynamic_sampling.max_draws * rollout.tasks_per_step
    rules = BufferRules(rollout.tasks_per_step, 0, 0, most, steps=1, dynamic=rollout.dynamic_sampling.enabled)
    buffer = RolloutBuffer(rules, TaskLedger(position))
    with tempfile.TemporaryDirectory() as directory:
        journal = Journal(Path(directory), "run")
        journal.recover(0, {0: "start"}, lambda position: True)
        await journal.begin(1, "start")
        uniform, masked = chosen.train.learns_from_equal_rewards, masked_stops(chosen.train.filter)
        groups = GroupSettings(rollout.group_size, retries=rollout.sandbox_retries, rescore_uniform=uniform)
        parts = {"masked": masked, "limiter": Limiter(64), **parts}
        order = TaskOrder({"": WeightedTasks(TASKS)}, chosen.seed)
        pump = RolloutProducer(groups, order, buffer, journal, ends, **parts)
        async with pump.running():
            outcomes = await buffer.take()
        journal.close()
    batch = build_batch(outcomes, await pump.hand_over(outcomes))
    assert not journal._delivered, "a run's journal must not remember all its episodes"
    check_filled(batch, rollout.tasks_per_step, rollout.dynamic_sampling)
    values = batch_metrics(batch, pump.seconds(), masked_stops(chosen.train.filter))
    return SimpleNamespace(batch=batch, groups=batch.groups, position=buffer.ledger.position, values=values)


def ids(first: int, stop: int) -> list[str]:
    return [task_at(TASKS, position, 0).id for position in range(first, stop)]


async def test_without_dynamic_sampling_every_group_is_kept() -> None:
    batch = await collect(config(), Ends([SOLVED, MIXED, UNSOLVED]), position=5)
    assert [group.task_id for group in batch.groups] == ids(5, 8)
    assert (batch.batch.discarded, batch.position, batch.values["filter/groups_discarded"]) == ((), 8, 0)
    assert batch.values["reward/mean"] == pytest.approx(0.5)


@settings(max_examples=40)
@example(outcomes=[MIXED] * 40, delays=[6, 6, 0, 0], wanted=2, first=0)  # the second group finishes first
@given(
    outcomes=st.lists(st.sampled_from([SOLVED, UNSOLVED, MIXED]), min_size=40, max_size=40),
    delays=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    wanted=st.integers(1, 4),
    first=st.integers(0, 20),
)
def test_a_step_draws_as_few_tasks_as_it_needs(outcomes: list[str], delays: list[int], wanted: int, first: int) -> None:
    chosen = config(wanted=wanted, enabled=True, max_draws=4)
    ends = Ends(outcomes, delays)
    batch = asyncio.run(collect(chosen, ends, first))
    stop = first + wanted
    while [outcomes[at % 40] for at in range(first, stop)].count(MIXED) < wanted and stop - first < 4 * wanted:
        stop += 1
    assert batch.position == stop
    assert set(ends.run) == set(ids(first, stop))
    mixed = [at for at in range(first, stop) if outcomes[at % 40] == MIXED]
    assert [group.task_id for group in batch.groups] == [task_at(TASKS, at, 0).id for at in mixed]
    assert len(batch.batch.discarded) == stop - first - len(mixed)
    assert batch.values["filter/groups_drawn"] == stop - first


@pytest.mark.parametrize("dynamic", [False, True])
async def test_an_undecidable_task_is_drawn_once_and_another_in_its_place(tmp_path: Path, dynamic: bool) -> None:
    outcomes = [MIXED, UNDECIDABLE, MIXED, MIXED, UNDECIDABLE] + [MIXED] * 35
    chosen, told = config(enabled=dynamic), list[str]()

    def learn(event: RolloutEvent) -> None:
        if line := quarantine.add_undecidable(event):
            told.append(line)

    async def collect_from(position: int, ends: Ends) -> SimpleNamespace:
        return await collect(chosen, ends, position, limiter=Limiter(1), left_out=quarantine, on_event=learn)

    quarantine = Quarantine(tmp_path / "quarantine.json")
    first = await collect_from(0, ends := Ends(outcomes))
    assert [group.task_id for group in first.groups] == [ids(0, 1)[0], *ids(2, 4)]
    assert first.position == 4
    second = await collect_from(first.position, ends)
    assert second.position == 8
    quarantine = Quarantine(tmp_path / "quarantine.json")  # another start of the run
    again = await collect_from(0, resumed := Ends(outcomes))
    assert [group.task_id for group in again.groups] == [group.task_id for group in first.groups]
    left_out = [ids(1, 2)[0], ids(4, 5)[0]]
    assert [ends.run.count(task) for task in left_out] == [1, 1]
    assert [resumed.run.count(task) for task in left_out] == [0, 0]
    assert told == [f"quarantined ({tmp_path}/quarantine.json): undecidable: {task}" for task in left_out]
    assert read_quarantine(tmp_path / "quarantine.json") == {task: [f"undecidable: {task}"] for task in left_out}


async def test_a_machine_that_has_graded_nothing_leaves_nothing_out(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "quarantine.json")
    quarantine.add_undecidable(RolloutEvent(dropped=DroppedGroup("a", ("no",), undecidable=True)))
    quarantine.add_undecidable(RolloutEvent(trajectory=trajectory(1.0)))
    quarantine.add_undecidable(RolloutEvent(dropped=DroppedGroup("b", ("SandboxLostError: gone",))))
    assert "a" not in quarantine
    assert "b" not in quarantine
    quarantine.add_undecidable(RolloutEvent(dropped=DroppedGroup("a", ("no",), undecidable=True)))
    assert "a" in quarantine


async def test_a_run_whose_tasks_are_all_left_out_ends(tmp_path: Path) -> None:
    with pytest.raises(RolloutFailed, match=r"no task can be graded: .*quarantine\.json"):
        await collect(config(), Ends([MIXED]), 7, left_out={task.id for task in TASKS})


async def test_discarded_groups_are_counted_with_their_lengths() -> None:
    batch = await collect(config(enabled=True), Ends([SOLVED, MIXED, UNSOLVED, MIXED, MIXED]))
    assert batch.values["filter/groups_discarded"] == 2
    assert (batch.values["filter/discarded_solved"], batch.values["filter/discarded_unsolved"]) == (1, 1)
    assert batch.values["filter/discarded_tokens_mean"] == 2
    assert batch.values["reward/mean"] == pytest.approx(0.5), "the policy's, over all that was sampled"
    assert len(batch.batch.sampled) == 5
    trained = build_samples(batch.batch.groups).samples
    assert goodput(trained, batch.batch.sampled, 2.0) == {"goodput/tokens_per_second": 6.0, "goodput/fraction": 0.6}


async def test_a_step_with_too_few_groups_continues_or_stops_by_policy() -> None:
    batch = await collect(config(enabled=True, max_draws=2), Ends([SOLVED, SOLVED, MIXED]))
    assert (len(batch.groups), batch.position) == (2, 6)
    with pytest.raises(RolloutFailed, match=r"2 of 3 groups have different rewards after 6 tasks: raise .*max_dr"):
        await collect(config(enabled=True, max_draws=2, when_short="stop"), Ends([SOLVED, SOLVED, MIXED]))


async def test_a_group_that_broke_is_replaced_and_never_kept() -> None:
    outcomes = [MIXED] * 4 + [BROKEN] + [MIXED] * 35
    batch = await collect(config(wanted=8, enabled=True), Ends(outcomes))
    assert len(batch.groups) == 8
    assert batch.position == 9
    assert ids(4, 5)[0] not in {group.task_id for group in batch.batch.sampled}
    assert batch.values["rollout/groups_dropped"] == 1


async def test_a_fully_masked_group_is_discarded() -> None:
    class OutOfTurns(Ends):
        async def __call__(self, task: Task, log: TurnLog | None = None) -> Trajectory:
            ended = await super().__call__(task)
            return replace(ended, stop=StopReason.MAX_TURNS) if task.id == ids(0, 1)[0] else ended

    batch = await collect(config(enabled=True, train={"filter": "compact"}), OutOfTurns([MIXED]))
    assert [group.task_id for group in batch.groups] == ids(1, 4)
    assert [group.task_id for group in batch.batch.discarded] == ids(0, 1)


async def test_only_trained_groups_are_rescored() -> None:
    scorer = SimpleNamespace(rescore=AsyncMock(side_effect=lambda tokens, session: Scores((-2.0,) * len(tokens), "0")))
    rescorer = Rescorer(scorer, n=3, limiter=Limiter(4))
    collected = await collect(config(enabled=True), Ends([MIXED, SOLVED, MIXED, MIXED]), rescore=rescorer)
    batch = collected.batch
    assert scorer.rescore.await_count == 3 * 2 * 3, "groups, trajectories, evaluations"
    assert all(t.rescored is not None for group in batch.groups for t in group.trajectories)
    assert all(t.rescored is None for group in batch.discarded for t in group.trajectories)
    values = rescore_values(batch.sampled, rescorer.failed, 0.5)
    assert (values["old_logprob/evaluations"], values["old_logprob/variance"]) == (3, 0.0)
    assert (values["old_logprob/rescore_failed"], values["time/rescore_tail"]) == (0, 0.5)
