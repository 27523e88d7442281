"""Evaluations between the epochs of ``agent-rl sft``: which weights, the best checkpoint, and kills in one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.evaluations import eval_report
from support.pipeline_run import Deaths, Died, HashTrainer

from agent_rl.config import RunConfig
from agent_rl.controller.run_state import RunState
from agent_rl.controller.sft import SftData, SftRun
from agent_rl.monitoring.console import Display
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.train.checkpoint.directory import checkpoint_step, complete_checkpoints

CLOCK = re.compile("^time/|per_second")
RATES = {0: 0.2, 6: 0.7, 12: 0.4, 18: 0.7}


class SupervisedTrainer(HashTrainer):
    """Weights are a hash of the sequences that they were trained on."""

    async def supervise(self, sequences: Sequence[Any], *, spike_norm: float | None = None) -> dict[str, float]:
        digest = hashlib.sha256(self.weights.encode())
        for tokens, _ in sequences:
            digest.update(tokens.tobytes())
        self.weights = digest.hexdigest()
        return {"sft/loss": int(self.weights[:8], 16) / 2**32, "train/sampled_tokens": 4.0}


class Evaluator:
    """Records the weights that it evaluates; dies once before it reports on a step in ``deadly``."""

    def __init__(self, state: RunState, trainer: SupervisedTrainer, deadly: set[int], seen: list[Any]) -> None:
        self._state, self._trainer, self._deadly, self._seen = state, trainer, deadly, seen

    async def evaluate(self, step: int) -> None:
        if f"step-{step}/sampled" in self._state.evaluations:
            return
        self._seen.append((step, self._trainer.weights))
        if step in self._deadly:
            self._deadly.remove(step)
            raise Died
        self._state.record_evaluation(f"step-{step}/sampled", eval_report(RATES[step]))


async def lived(runs: Path, deadly: set[int]) -> tuple[RunConfig, dict[str, object], list[Any]]:
    """The run over all its lives: its config, summary, and the evaluations that began."""
    data = SftData([(np.full(4, at, np.int32), np.ones(4, np.float32)) for at in range(41)], [], [])
    sft = {"data": [{"path": "x"}], "batch_rows": 8, "epochs": 3, "eval_every": 1}
    train = {"steps": 18, "checkpoint_every": 4, "keep_checkpoints": 1}
    config = RunConfig.model_validate(
        {"name": "run", "runs_dir": runs, "model": "m", "sft": sft, "train": train, "guard": {"action": "off"}}
    )
    seen: list[Any] = []
    while True:
        state, trainer = RunState(config), SupervisedTrainer(Deaths())
        display = Display(config.name, Console(quiet=True))
        evaluator: Any = Evaluator(state, trainer, deadly, seen)
        run = SftRun(config, state, display, trainer, data, evaluator)  # type: ignore[arg-type]
        try:
            return config, await run.run(), seen
        except Died:
            continue
        finally:
            await run.close()


async def test_the_weights_of_every_epoch_are_evaluated_and_the_best_are_kept(tmp_path: Path) -> None:
    config, summary, seen = await lived(tmp_path, set())
    assert [step for step, _ in seen] == [0, 6, 12, 18]
    assert (summary["best_step"], summary["best_pass_at_1"]) == (6, 0.7)
    kept = [checkpoint_step(path) for path in complete_checkpoints(config.run_dir / "checkpoints")]
    assert kept == [6, 18]


@pytest.mark.parametrize("deadly", [{0}, {6, 18}, {12}])
async def test_a_kill_in_an_evaluation_repeats_it_with_the_same_weights(tmp_path: Path, deadly: set[int]) -> None:
    whole, summary, seen = await lived(tmp_path / "whole", set())
    killed, again, repeated = await lived(tmp_path / "killed", set(deadly))
    assert [step for step, _ in repeated] == sorted([*RATES, *deadly])
    assert set(repeated) == set(seen), "a step was evaluated with other weights"
    rows = [
        [
            {name: value for name, value in row.items() if "time" not in name and "per_second" not in name}
            for row in each
        ]
        for each in (read_metrics(whole.run_dir), read_metrics(killed.run_dir))
    ]
    assert rows[0] == rows[1]
    assert {**again, "seconds": 0} == {**summary, "seconds": 0}
