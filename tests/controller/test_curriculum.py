"""Tasks drawn by their solve rates: the weights of pools, the draws of whole runs, and those of killed ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from support.pipeline_run import POINTS, TASKS, Deaths, Life, run_config

from agent_rl.config import RunConfig
from agent_rl.config.train import CurriculumConfig
from agent_rl.controller.async_rollout.task_ledger import read_ledger
from agent_rl.controller.task_order import DRAWS, Curriculum, TaskOrder, WeightedTasks
from agent_rl.monitoring.metrics_log import read_metrics
from envs import Task

UNSOLVED = {"pools": [{"up_to": 0.0, "weight": 0.0}, {"up_to": 1.0, "weight": 1.0}]}


def test_a_task_has_the_weight_of_the_pool_of_its_latest_rate(tmp_path: Path) -> None:
    curriculum = Curriculum(CurriculumConfig(), dict, tmp_path)
    rates = (None, 0.0, 0.25, 0.26, 0.75, 0.76, 1.0)
    assert [curriculum.weight(rate) for rate in rates] == [1.0, 0.2, 0.2, 1.0, 1.0, 0.2, 0.2]


def test_draws_follow_the_weights_and_the_sources(tmp_path: Path) -> None:
    rates = {"a:0": 0.0, "a:1": 0.5, "b:0": 1.0}
    sources = {name: WeightedTasks([Task(f"{name}:{at}", "demo", {}) for at in range(2)]) for name in "ab"}
    order = TaskOrder(sources, 3, Curriculum(CurriculumConfig(), lambda: rates, tmp_path))
    drawn = Counter(order.at(position).id for position in range(4000))
    assert drawn["a:0"] + drawn["a:1"] == 2000
    for task in ("a:0", "b:0"):
        assert drawn[task] / 2000 == pytest.approx(0.2 / 1.2, abs=0.04)
    nothing = Curriculum(
        CurriculumConfig.model_validate({"pools": [{"up_to": 1, "weight": 0}]}), lambda: rates, tmp_path
    )
    assert {nothing.draw(TASKS[:3], 5000 + at, 0).id for at in range(40)} == {task.id for task in TASKS[:3]}


def test_a_draw_is_kept_whatever_the_rates_become(tmp_path: Path) -> None:
    rates: dict[str, float] = {}
    settings = CurriculumConfig.model_validate(UNSOLVED)
    first = [Curriculum(settings, lambda: rates, tmp_path).draw(TASKS[:6], at, 0) for at in range(12)]
    rates |= {task.id: 0.0 for task in TASKS[:5]}
    with (tmp_path / DRAWS).open("ab") as file:
        file.write(b"[12, ")  # a kill cut the line off
    again = Curriculum(settings, lambda: rates, tmp_path)
    assert [again.draw(TASKS[:6], at, 0) for at in range(12)] == first
    assert [again.draw(TASKS[:6], at, 0) for at in range(12, 20)] == [TASKS[5]] * 8
    assert [Curriculum(settings, dict, tmp_path).draw(TASKS[:6], at, 0) for at in range(12, 20)] == [TASKS[5]] * 8


def curriculum_config(runs: Path, depth: int) -> RunConfig:
    config = run_config(runs, depth=depth, steps=5)
    settings = CurriculumConfig.model_validate(UNSOLVED)
    return config.model_copy(update={"train": config.train.model_copy(update={"curriculum": settings})})


async def lived(config: RunConfig, deaths: list[Deaths]) -> None:
    for death in (*deaths, Deaths()):
        if await Life(config, [], death, tasks=TASKS[:4]).live():
            return
    raise AssertionError("the last life did not end")


@pytest.mark.parametrize("seed", range(4))
async def test_a_killed_run_draws_the_tasks_of_an_unkilled_one(tmp_path: Path, seed: int) -> None:
    """Tasks 0 and 3 are solved by no episode: they are drawn until a step has measured that."""
    draw = random.Random(seed)
    deaths = [Deaths(draw.choice(POINTS), draw.randint(1, 6)) for _ in range(3)]
    whole, killed = (curriculum_config(tmp_path / name, 0) for name in ("whole", "killed"))
    await lived(whole, [])
    await lived(killed, deaths)
    rows = read_ledger(whole.run_dir)
    assert [row.tasks for row in rows] == [row.tasks for row in read_ledger(killed.run_dir)]
    rates: dict[str, float] = {}
    for row in rows:
        assert not {task for task in row.tasks if rates.get(task) == 0.0}
        rates |= dict(zip(row.tasks, row.solved, strict=True))
    last = read_metrics(whole.run_dir)[-1]
    assert last["curriculum/tasks_seen"] == len(rates)
    assert last["curriculum/solve_rate_mean"] == pytest.approx(sum(rates.values()) / len(rates))


async def test_a_run_that_samples_ahead_keeps_its_draws(tmp_path: Path) -> None:
    config = curriculum_config(tmp_path, 1)
    await lived(config, [Deaths("trained", 2), Deaths("episode", 5)])
    recorded = dict(json.loads(line) for line in (config.run_dir / DRAWS).read_text().splitlines())
    taken = [(position, row) for row in read_ledger(config.run_dir) for position in row.outcomes]
    for position, row in taken:
        assert recorded[position] in row.tasks


def test_pools_that_leave_rates_out_are_refused() -> None:
    for pools in ([], [{"up_to": 0.5, "weight": 1}], [{"up_to": 1, "weight": 1}, {"up_to": 0.5, "weight": 1}]):
        with pytest.raises(ValueError, match=r"up_to is|at least 1 item"):
            CurriculumConfig.model_validate({"pools": pools})
