"""``agent-rl train`` end to end on a tiny random model of each family: real SGLang, real Megatron under Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from integration_run import REAL, Run
from support.family_models import write_model

from agent_rl.models.spec import read_model_spec
from agent_rl.monitoring.metrics_log import read_metrics

pytestmark = [*REAL, pytest.mark.timeout(300)]

Start = Callable[..., Run]

SETTINGS = (
    *("env.name=lucky_env:Lucky", "env.options={}", "eval.tasks=0", "train.steps=3", "train.checkpoint_every=0"),
    *("rollout.max_turns=2", "rollout.max_new_tokens=24", "rollout.tasks_per_step=2"),
    *("engine.dtype=float32", "train.dtype=float32"),
)
TOKENS = 1024
"""The vocabulary of the shipped model, whose tokenizer the models have."""


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_5_moe"])
def test_a_family_trains_three_steps(model_type: str, start: Start, tmp_path: Path) -> None:
    train_three_steps(model_type, start, tmp_path)


def train_three_steps(model_type: str, start: Start, directory: Path, *, gap: float = 2e-5) -> None:
    """Train the family's model with replay: every update is verified in the engine, no router differs between trainer
    and engine, log-probs differ by less than ``gap`` on average, and the export has the config of the start."""
    model = write_model(directory / "model", model_type, seed=0, vocab_size=TOKENS)
    published = (model / "config.json").read_bytes()
    run = start(*SETTINGS)
    assert run.finish() == 0, run.text
    rows = read_metrics(directory / "small")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["train/updates"] == 1
        assert row["train/grad_norm"] > 0
        assert row["mismatch/logprob_abs_diff"] < gap
        assert row["r3/router_mismatch"] == 0
        assert (row["weight_sync/verified"], row["weight_sync/retries"]) == (1, 0)
    assert (directory / "small/model/config.json").read_bytes() == published
    assert read_model_spec(directory / "small/model") == read_model_spec(model)
