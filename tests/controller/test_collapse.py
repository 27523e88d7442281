"""A run that the guard stops goes on in a fork."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pipeline_run import Life, run_config

from agent_rl.config import RunConfig
from agent_rl.controller.fork import train_with_forks
from agent_rl.errors import GuardStop


async def collapsing(runs: Path, forks: int) -> RunConfig:
    """A run of 6 steps with checkpoints of steps 3 and 6."""
    config = run_config(runs, depth=0, steps=6)
    guard = config.guard.model_copy(
        update={"on_collapse": config.guard.on_collapse.model_copy(update={"forks": forks})}
    )
    config = config.model_copy(update={"guard": guard})
    assert await Life(config, []).live()
    return config


class Trainer:
    """Runs that the guard stops, until one has a learning rate of ``stable`` or less."""

    def __init__(self, stable: float, *, good: bool = True) -> None:
        self.stable, self.good = stable, good
        self.started = list[tuple[str, float]]()

    def __call__(self, config: RunConfig) -> None:
        self.started.append((config.name, config.train.lr))
        if config.train.lr > self.stable:
            raise GuardStop("collapsed", config.run_dir / "checkpoints/step-000003" if self.good else None)


async def test_each_collapse_forks_at_a_lower_rate(tmp_path: Path) -> None:
    config, trainer, notes = await collapsing(tmp_path, 2), Trainer(1e-6), list[str]()
    train_with_forks(config, trainer, notes.append)
    assert trainer.started == [("run", 2e-6), ("run-collapse-1", pytest.approx(6e-7))]
    assert notes[-1] == f"guard.on_collapse: continuing with {tmp_path}/run-collapse-1, train.lr 6e-07"
    resumed = Trainer(1e-6)
    train_with_forks(config, resumed, notes.append)
    assert [name for name, _ in resumed.started] == ["run-collapse-1"], "a start continues with the newest fork"


async def test_forks_are_bounded(tmp_path: Path) -> None:
    config, trainer = await collapsing(tmp_path, 2), Trainer(0.0)
    with pytest.raises(GuardStop):
        train_with_forks(config, trainer, lambda _: None)
    assert [name for name, _ in trainer.started] == ["run", "run-collapse-1", "run-collapse-2"]


@pytest.mark.parametrize(("forks", "good"), [(0, True), (2, False)])
async def test_a_stop_stays_a_stop(tmp_path: Path, forks: int, good: bool) -> None:
    trainer = Trainer(0.0, good=good)
    with pytest.raises(GuardStop):
        train_with_forks(await collapsing(tmp_path, forks), trainer, lambda _: None)
    assert [name for name, _ in trainer.started] == ["run"]
