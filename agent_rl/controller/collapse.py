"""Continues a run that the guard stopped: from a fork of its last good checkpoint, at a lower learning rate."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_recorded
from agent_rl.controller.fork import fork
from agent_rl.errors import GuardStop
from agent_rl.train.checkpoint.directory import checkpoint_step

_FORK = "-collapse-"


def train_with_forks(config: RunConfig, train: Callable[[RunConfig], None], note: Callable[[str], None]) -> None:
    """Call ``train``; where it raises GuardStop, fork the run and go on, at most ``guard.on_collapse.forks`` times.

    The forks of a run NAME are NAME-collapse-1, NAME-collapse-2 and so on. If one exists, training continues with the
    newest. Raises GuardStop when no fork is left, or no checkpoint is from before the collapse.
    """
    limit, lr_factor = config.guard.on_collapse.forks, config.guard.on_collapse.lr_factor
    name, made = config.name, 0
    while made < limit and (config.runs_dir / _name(name, made + 1)).is_dir():
        made += 1
    if made:
        config = _load(config.runs_dir / _name(name, made), note)
    while True:
        try:
            return train(config)
        except GuardStop as stop:
            if made == limit or stop.last_good is None:
                raise
            note(f"stopped by the guard: {stop}")
            made += 1
            step, lr = checkpoint_step(stop.last_good), config.train.lr * lr_factor
            config = _load(fork(config.run_dir, str(step), _name(name, made), [f"train.lr={lr!r}"]), note)


def _name(name: str, number: int) -> str:
    return f"{re.sub(rf'{_FORK}[0-9]+$', '', name)}{_FORK}{number}"


def _load(run: Path, note: Callable[[str], None]) -> RunConfig:
    config = load_recorded(run / "config.yaml")
    note(f"guard.on_collapse: continuing with {run}, train.lr {config.train.lr:g}")
    return config
