"""Whole runs at every depth, killed anywhere and started again: nothing twice, nothing lost, and the same metrics."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.pipeline_run import POINTS, TASKS, TURN_POINTS, Deaths, Life, run_config

from agent_rl.config import RunConfig
from agent_rl.controller.async_rollout.task_ledger import Outcome, faults, gaps, read_ledger
from agent_rl.controller.checkpoints import TrainerRestarts
from agent_rl.controller.task_order import task_at
from agent_rl.controller.train import TrainingRun, run_to_last_step
from agent_rl.errors import TrainerDied, UserError
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.records import read_trajectories
from agent_rl.types import StopReason, Trajectory
from envs import Grade, GradedEpisode, Task

BY_TIME = re.compile(r"^time/|seconds|per_second|^staleness/|^off_policy/|^async_rollout/|^recover/|^loop/")
SHAPES = [(0, 0, False), (0, 0, True), (1, 1, True), (1, 3, False)]
ALL_SHAPES = [(*shape, dynamic) for shape in ((0, 0), (1, 1), (3, 3), (1, 3), (3, 5)) for dynamic in (False, True)]


def exact(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not BY_TIME.search(name)}


async def lived(config: RunConfig, deaths: list[Deaths], sampled: Any = None) -> list[tuple[str, int]]:
    """Run to the end, through a life for each of ``deaths`` and one more; every episode that ended in any of them, and
    in ``sampled`` every turn."""
    given, most = list[tuple[str, int]](), config.async_rollout.staleness
    for death in (*deaths, Deaths()):
        life = Life(config, given, death, sampled)
        ended = await life.live()
        assert all(lag <= most for lag in life.trainer.lags)
        if ended:
            break
    assert ended
    return given


def check_whole(run: Path, steps: int = 8) -> None:
    rows = read_ledger(run)
    assert faults(run, rows) == []
    assert gaps(rows) == [], "a position was lost"
    assert [row.step for row in rows] == list(range(1, steps + 1))
    assert not list((run / "journal").iterdir())


async def check_kills(runs: Path, *shape: Any, kills: int, seed: int = 0, recover: str = "off") -> None:
    draw, points, turns = random.Random(seed), POINTS if recover == "off" else TURN_POINTS, list[tuple[str, int, int]]()
    depth, staleness, dynamic = shape
    options = {"depth": depth, "staleness": staleness, "dynamic_sampling": {"enabled": dynamic}, "recover": recover}
    unkilled, killed = run_config(runs / "unkilled", **options), run_config(runs / "killed", **options)
    await lived(unkilled, [])
    check_whole(unkilled.run_dir)
    given = await lived(killed, [Deaths(draw.choice(points), draw.randint(1, 9)) for _ in range(kills)], turns)
    check_whole(killed.run_dir)
    assert len(given) - len(set(given)) <= kills * killed.rollout.concurrency, "a finished episode was sampled again"
    if recover == "turns":
        assert len(turns) - len(set(turns)) <= kills * killed.rollout.concurrency, "a whole turn was sampled again"
    if staleness == depth:  # else which groups a batch has is a matter of time
        rows = [[exact(row) for row in read_metrics(config.run_dir)] for config in (killed, unkilled)]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_killed_run_equals_an_unkilled_one(tmp_path: Path, shape: Any) -> None:
    await check_kills(tmp_path, *shape, kills=4)


@pytest.mark.parametrize("shape", [(0, 0, True), (1, 1, False), (1, 3, True)])
async def test_a_killed_episode_keeps_its_turns(tmp_path: Path, shape: Any) -> None:
    await check_kills(tmp_path, *shape, kills=6, recover="turns")
    rows = read_metrics(tmp_path / "killed" / "run")
    assert sum(row["recover/turns"] for row in rows) > 0
    assert sum(row["recover/differed"] + row["recover/too_old"] for row in rows) == 0


@pytest.mark.parametrize("point", [*POINTS, "checkpoint", "evaluation"])
async def test_ctrl_c_at_any_point_leaves_no_episode_and_loses_nothing(tmp_path: Path, point: str) -> None:
    config, given = run_config(tmp_path, depth=1, evaluate_every=2), list[tuple[str, int]]()
    life = Life(config, given)
    living = asyncio.create_task(life.live())
    life.deaths.point, life.deaths.nth, life.deaths.die = point, 2, living.cancel
    with pytest.raises(asyncio.CancelledError):
        await living
    await lived(config, [])
    check_whole(config.run_dir)


async def test_a_trainer_that_dies_restarts_and_no_buffered_episode_is_sampled_twice(tmp_path: Path) -> None:
    config, given = run_config(tmp_path, depth=2), list[tuple[str, int]]()
    deaths = [Deaths("trained", 4, lambda: (_ for _ in ()).throw(TrainerDied("rank 0 died"))), Deaths()]
    lives: list[Life] = []

    def begin() -> TrainingRun:
        lives.append(Life(config, given, deaths[len(lives)]))
        lives[-1].trainer.restart = _nothing
        return lives[-1].run

    await run_to_last_step(begin, TrainerRestarts(3))
    check_whole(config.run_dir)
    assert len(lives) == 2
    assert len(given) - len(set(given)) <= config.rollout.concurrency


@pytest.mark.parametrize("depth", [0, 2])
async def test_grades_of_whole_groups_reach_training_and_records(tmp_path: Path, depth: int) -> None:
    config = run_config(tmp_path, depth=depth, steps=3)
    life, lengths = Life(config, []), list[int]()

    async def grade_group(task: Task, episodes: Sequence[GradedEpisode]) -> list[Grade]:
        lengths.append(len(episodes))
        numbers = [int(episode.messages[0]["content"]) for episode in episodes]
        return [Grade(float(number), number == 0, parts={"number": number}) for number in numbers]

    life.runtime.task_runtime.env.grade_group = grade_group
    assert await life.live()
    assert set(lengths) == {config.rollout.group_size}
    for step in (1, 2, 3):
        for trajectory in (t for group in read_trajectories(config.run_dir, step) for t in group.trajectories):
            assert trajectory.reward == trajectory.parts["number"] == float(trajectory.messages[0]["content"])
    assert all("reward/number" in row for row in read_metrics(config.run_dir))


async def _nothing() -> None:
    """The ranks are back."""


@pytest.mark.parametrize(("staleness", "overtaken", "groups"), [(1, 0, 4), (3, 2, 8)])
async def test_a_full_window_waits_for_a_straggler(tmp_path: Path, staleness: int, overtaken: int, groups: int) -> None:
    """An episode of the first position ends only when nothing else goes on, however many means of them that takes: when
    all others have ended of the ``groups`` that there is room for."""
    config, given = run_config(tmp_path, depth=1, staleness=staleness), list[tuple[str, int]]()
    life, ends = Life(config, given), asyncio.Event()
    life.runtime.held[task_at(TASKS, 0, config.seed).id, 2] = ends
    living = asyncio.create_task(life.live())
    others = groups * config.rollout.group_size - 1
    while len(given) < others or life.run.progress.step < overtaken:  # noqa: ASYNC110  (no event tells it)
        await asyncio.sleep(0)
    for _ in range(500):
        await asyncio.sleep(0)
    assert (len(given), life.run.progress.step, life.runtime.running) == (others, overtaken, 1)
    ends.set()
    assert await living
    assert max(life.trainer.lags) <= staleness
    assert 0 in read_ledger(config.run_dir)[overtaken].outcomes
    check_whole(config.run_dir)


@pytest.mark.parametrize("dynamic", [False, True])
async def test_uniform_groups_make_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    """With dynamic sampling each step draws its maximum of tasks and keeps no group."""
    monkeypatch.setattr("support.pipeline_run._reward", lambda task, number: 0.0)
    config = run_config(tmp_path, depth=1, steps=4, dynamic_sampling={"enabled": dynamic, "max_draws": 2})
    await lived(config, [Deaths("episode", 5), Deaths("begun", 3)])
    check_whole(config.run_dir, steps=4)
    rows = read_ledger(config.run_dir)
    outcome = Outcome.DISCARDED if dynamic else Outcome.KEPT
    assert [list(row.outcomes.values()) for row in rows] == [[outcome] * (4 if dynamic else 2)] * 4
    assert all(row.get("train/updates", 0) == 0 for row in read_metrics(config.run_dir))


@pytest.mark.parametrize("recover", ["off", "turns"])
async def test_all_tasks_of_an_epoch_s_edge_in_flight_twice_end_once_each(tmp_path: Path, recover: str) -> None:
    """Two epochs of four tasks are alive at once: no episode ends before all of both are in flight. The run is killed
    and goes on."""
    config, given, twice = run_config(tmp_path, depth=3, concurrency=24, recover=recover), [], asyncio.Event()
    first = Life(config, given, Deaths("episode", 9), tasks=TASKS[:4])
    first.runtime.held |= {(task.id, number): twice for task in TASKS[:4] for number in range(6)}
    living = asyncio.create_task(first.live())
    alike = first.runtime.alike
    while min(alike[task.id] for task in TASKS[:4]) < 2 * config.rollout.group_size:  # noqa: ASYNC110  (as above)
        await asyncio.sleep(0)
    twice.set()
    assert not await living
    assert not await Life(config, given, Deaths("trained", 2), tasks=TASKS[:4]).live()
    assert await Life(config, given, tasks=TASKS[:4]).live()
    check_whole(config.run_dir)


async def test_engine_failures_within_an_evaluation_run_again_with_one_version(tmp_path: Path) -> None:
    """The engine of two episodes dies. Training continues during the evaluation and publishes after it."""
    config = run_config(tmp_path, depth=2, evaluate_every=2)
    life, evaluated, failed = Life(config, []), list[tuple[str, ...]](), list[str]()
    whole = life.runtime.evaluated

    async def dying(task: Task) -> Trajectory:
        ended = await whole(task)
        if len(failed) < 2:
            failed.append(task.id)
            return replace(ended, stop=StopReason.ENGINE_FAILURE, reward=None, resolved=False, error="the engine died")
        evaluated.append(ended.weight_versions)
        return ended

    life.runtime.evaluated = dying
    assert await life.live()
    check_whole(config.run_dir)
    assert len(failed) == 2
    assert evaluated == [(str(step),) for step in (0, 2, 4, 6, 8) for _ in range(4)]
    assert {report["graded"] for report in life.run.state.evaluations.values()} == {4}


async def test_sampling_and_the_next_step_continue_during_an_evaluation(tmp_path: Path) -> None:
    """Its episodes end only once the next step is trained and a group of the step after that has an episode."""
    config, given, trained = run_config(tmp_path, depth=1, evaluate_every=4), list[tuple[str, int]](), asyncio.Event()
    life, versions = Life(config, given, Deaths("trained", 5, trained.set)), list[tuple[str, ...]]()
    whole, later = life.runtime.evaluated, task_at(TASKS, 10, config.seed).id

    async def held(task: Task) -> Trajectory:
        if life.runtime.version == "4":
            await trained.wait()
            while later not in dict(given):  # noqa: ASYNC110  (no event tells it)
                await asyncio.sleep(0)
        ended = await whole(task)
        versions.append((*ended.weight_versions, life.runtime.version))
        return ended

    life.runtime.evaluated = held
    assert await life.live()
    assert versions == [(step, step) for step in ("0", "4", "8") for _ in range(4)]


async def test_a_full_disk_ends_the_run_in_one_line(tmp_path: Path) -> None:
    life = Life(run_config(tmp_path, depth=1), [])
    full = os.fdopen(os.open("/dev/full", os.O_RDWR), "r+b", buffering=0)
    life.deaths.point, life.deaths.die = "episode", lambda: setattr(life.run.journal, "_file", full)
    with pytest.raises(UserError, match="the disk is full"):
        await life.live()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("recover", ["off", "turns"])
@pytest.mark.parametrize("shape", ALL_SHAPES)
async def test_killed_often(tmp_path: Path, shape: Any, recover: str, seed: int) -> None:
    await check_kills(tmp_path, *shape, kills=12, seed=seed, recover=recover)
