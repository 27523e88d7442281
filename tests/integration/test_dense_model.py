"""A dense model in the loop of the others: rolled out by real SGLang without capture, trained by real Megatron."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from integration_run import Run
from support.dense_models import EXPERTS, TINY, dense_model

from agent_rl.config import Replay, TrainConfig
from agent_rl.controller.preflight import check_replay
from agent_rl.errors import UserError
from agent_rl.models.spec import read_model_spec
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.rollout.records import read_trajectories

LUCKY = ("env.name=lucky_env:Lucky", "env.options={}", "eval.tasks=0", "train.steps=1", "train.checkpoint_every=0")
SHORT = ("rollout.max_turns=2", "rollout.max_new_tokens=24")


@pytest.mark.long
@pytest.mark.sglang
@pytest.mark.megatron
@pytest.mark.bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_dense_model_is_rolled_out_and_trained(start: Callable[..., Run], tmp_path: Path) -> None:
    model = dense_model(tmp_path / "model")
    run = start(f"model={model}", "train.replay=off", *LUCKY, *SHORT)
    assert run.finish() == 0, run.text
    (row,) = read_metrics(tmp_path / "small")
    assert row["train/updates"] == 1
    assert row["train/grad_norm"] > 0
    assert row["mismatch/logprob_abs_diff"] < 0.3, "trainer and engine compute the same model, bf16 and float32"
    assert (row["weight_sync/verified"], row["weight_sync/retries"]) == (1, 0)
    assert row["weight_sync/logprob_abs_diff"] < 0.3
    assert "r3/router_mismatch" not in row
    trajectories = [t for group in read_trajectories(tmp_path / "small", 1) for t in group.trajectories]
    assert all(trajectory.routing is None for trajectory in trajectories)
    assert (tmp_path / "small" / "model" / "config.json").read_text().count("qwen3")
    log = (tmp_path / "small" / "logs" / "engine-0.log").read_text()
    assert "enable_return_routed_experts=True" not in log


@pytest.mark.parametrize("replay", ["r3", "r2"])
def test_replay_of_a_dense_model_is_refused(tmp_path: Path, replay: Replay) -> None:
    model = tmp_path / "dense"
    model.mkdir()
    config = {key: value for key, value in TINY.items() if key not in EXPERTS} | {"model_type": "qwen3"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        check_replay(TrainConfig(replay=replay), model, read_model_spec(model))
    assert str(refused.value) == (
        f"train.replay is {replay} and {model} has no MoE layer (model_type qwen3), so it has no routes to replay: "
        "set train.replay to off"
    )
    check_replay(TrainConfig(replay="off"), model, read_model_spec(model))
