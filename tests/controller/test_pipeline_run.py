"""Whole runs at every depth, killed anywhere and started again: nothing twice, nothing lost, and the same metrics."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pipeline_run import POINTS, TURN_POINTS, Deaths, Life, run_config

from agent_rl.config import RunConfig
from agent_rl.controller.pipeline.history import faults, gaps, read_history
from agent_rl.controller.restarts import Restarts
from agent_rl.controller.train import TrainingRun, run_to_the_end
from agent_rl.errors import TrainerDied, UserError
from agent_rl.observe.metrics_log import read_metrics

BY_TIME = re.compile(r"^time/|seconds|per_second|^staleness/|^off_policy/|^pipeline/|^recover/")
SHAPES = [(0, 0, False), (0, 0, True), (1, 1, True), (1, 3, False)]
ALL_SHAPES = [(*shape, dynamic) for shape in ((0, 0), (1, 1), (3, 3), (1, 3), (3, 5)) for dynamic in (False, True)]


def exact(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not BY_TIME.search(name)}


async def lived(
    config: RunConfig, deaths: list[Deaths], sampled: list[tuple[str, int, int]] | None = None
) -> list[tuple[str, int]]:
    """Run to the end, through a life for each of ``deaths`` and one more; every episode that ended in any of them, and
    in ``sampled`` every turn."""
    given, most = list[tuple[str, int]](), config.pipeline.staleness
    for death in (*deaths, Deaths()):
        life = Life(config, given, death, sampled)
        ended = await life.live()
        assert all(lag <= most for lag in life.trainer.lags)
        if ended:
            break
    assert ended
    return given


def check_whole(run: Path, steps: int = 8) -> None:
    rows = read_history(run)
    assert faults(run, rows) == []
    assert gaps(rows) == [], "a position was lost"
    assert [row.step for row in rows] == list(range(1, steps + 1))
    assert not list((run / "journal").iterdir())


async def check_kills(
    runs: Path, depth: int, staleness: int, dynamic: bool, kills: int, seed: int = 0, recover: str = "off"
) -> None:
    draw, points, turns = random.Random(seed), POINTS if recover == "off" else TURN_POINTS, list[tuple[str, int, int]]()
    shape: Any = {"depth": depth, "staleness": staleness, "dynamic_sampling": {"enabled": dynamic}, "recover": recover}
    unkilled, killed = run_config(runs / "unkilled", **shape), run_config(runs / "killed", **shape)
    await lived(unkilled, [])
    check_whole(unkilled.run_dir)
    given = await lived(killed, [Deaths(draw.choice(points), draw.randint(1, 9)) for _ in range(kills)], turns)
    check_whole(killed.run_dir)
    assert len(given) - len(set(given)) <= kills * killed.rollout.concurrency, "a finished episode was sampled again"
    if recover == "turns":
        assert len(turns) - len(set(turns)) <= kills * killed.rollout.concurrency, "a whole turn was sampled again"
    if staleness == depth:  # else which groups a batch has is a matter of time
        assert [exact(row) for row in read_metrics(killed.run_dir)] == [
            exact(row) for row in read_metrics(unkilled.run_dir)
        ]


@pytest.mark.parametrize(("depth", "staleness", "dynamic"), SHAPES)
async def test_killed_anywhere_it_goes_on_as_if_it_never_had_been(
    tmp_path: Path, depth: int, staleness: int, dynamic: bool
) -> None:
    await check_kills(tmp_path, depth, staleness, dynamic, kills=4)


@pytest.mark.parametrize(("depth", "staleness", "dynamic"), [(0, 0, True), (1, 1, False), (1, 3, True)])
async def test_with_turns_kept_an_episode_goes_on_from_its_last_one(
    tmp_path: Path, depth: int, staleness: int, dynamic: bool
) -> None:
    await check_kills(tmp_path, depth, staleness, dynamic, kills=6, recover="turns")
    rows = read_metrics(tmp_path / "killed" / "run")
    assert sum(row["recover/turns"] for row in rows) > 0
    assert sum(row["recover/differed"] + row["recover/too_old"] for row in rows) == 0


@pytest.mark.parametrize("point", POINTS)
async def test_ctrl_c_at_any_point_leaves_no_episode_and_loses_nothing(tmp_path: Path, point: str) -> None:
    config, given = run_config(tmp_path, depth=1), list[tuple[str, int]]()
    life = Life(config, given)
    living = asyncio.create_task(life.live())
    life.deaths.point, life.deaths.nth, life.deaths.die = point, 3, living.cancel
    with pytest.raises(asyncio.CancelledError):
        await living
    await lived(config, [])
    check_whole(config.run_dir)


async def test_a_trainer_that_dies_with_work_buffered_is_started_again_and_nothing_is_sampled_twice(
    tmp_path: Path,
) -> None:
    config, given = run_config(tmp_path, depth=2), list[tuple[str, int]]()
    deaths = [Deaths("trained", 4, lambda: (_ for _ in ()).throw(TrainerDied("rank 0 died"))), Deaths()]
    lives: list[Life] = []

    def begin() -> TrainingRun:
        lives.append(Life(config, given, deaths[len(lives)]))
        lives[-1].trainer.restart = _nothing  # type: ignore[attr-defined]
        return lives[-1].run

    await run_to_the_end(begin, Restarts(3))
    check_whole(config.run_dir)
    assert len(lives) == 2
    assert len(given) - len(set(given)) <= config.rollout.concurrency


async def _nothing() -> None:
    """The ranks are back."""


async def test_a_full_disk_ends_the_run_in_one_line(tmp_path: Path) -> None:
    life = Life(run_config(tmp_path, depth=1), [])
    full = os.fdopen(os.open("/dev/full", os.O_RDWR), "r+b", buffering=0)
    life.deaths.point, life.deaths.die = "episode", lambda: setattr(life.run.journal, "_file", full)
    with pytest.raises(UserError, match="no room on the disk"):
        await life.live()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("recover", ["off", "turns"])
@pytest.mark.parametrize(("depth", "staleness", "dynamic"), ALL_SHAPES)
async def test_killed_anywhere_again_and_again(
    tmp_path: Path, depth: int, staleness: int, dynamic: bool, recover: str, seed: int
) -> None:
    await check_kills(tmp_path, depth, staleness, dynamic, kills=12, seed=seed, recover=recover)
