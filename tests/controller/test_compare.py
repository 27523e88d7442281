"""``agent-rl r3 compare``: reports of passes, rejected inputs, and one run with the real engine and trainer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dense_models import dense_model
from support.routed_trajectories import routed

from agent_rl.commands import compare as command
from agent_rl.config.loader import install_model
from agent_rl.errors import ConfigError
from agent_rl.types import Trajectory, Turn
from agent_rl.utils.run_files import write_json

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = 6


def turns_of(seed: int, turns: int = 2) -> Trajectory:
    """Turns of 3 prompt or observation tokens and 2 sampled ones, with random log-probs and experts."""
    tokens = 5 * turns
    made = routed(seed, f"task-{seed}", sampled=tokens - 3, experts=EXPERTS)
    mask = np.tile(np.array([0, 0, 0, 1, 1], bool), turns)
    logprobs = np.where(mask, made.logprobs, 0).astype(np.float32)
    turn = [Turn("", None, {}, None, "", 5 * at + 3, 2, 3, 0, "0", 0.0, 0.0) for at in range(turns)]
    return replace(made, loss_mask=mask, logprobs=logprobs, turns=tuple(turn))


def of(trajectories: list[Trajectory], *, off: float = 0.0, exchanged_layer: int | None = None) -> command.TrainerPass:
    """A pass whose log-probs are ``off`` the engine's; in ``exchanged_layer`` it took other experts."""
    logprobs, routes = [], []
    for item in trajectories:
        experts = item.routing.experts.copy()
        if exchanged_layer is not None:
            experts[:, exchanged_layer] = (experts[:, exchanged_layer] + 1) % EXPERTS
        logprobs.append((item.logprobs + off).astype(np.float32))
        routes.append(replace(item.routing, experts=experts))
    return command.TrainerPass(logprobs, routes)


def test_each_pass_is_compared_with_its_reference() -> None:
    data = [turns_of(seed, turns=2 + seed % 2) for seed in range(5)]
    other = of(data, off=0.3, exchanged_layer=1)
    comparison = command.compare(data, of(data, off=0.1), other, other)
    replay, without, noise = comparison.replay.total, comparison.without_replay.total, comparison.noise.total
    assert replay.logprobs.metrics["logprob_abs_diff"].value == pytest.approx(0.1, rel=1e-5)
    assert without.logprobs.metrics["logprob_abs_diff"].value == pytest.approx(0.3, rel=1e-5)
    assert noise.logprobs.metrics["logprob_abs_diff"].value == 0
    ratio = comparison.without_over_with_replay["logprob_abs_diff"]
    assert (ratio.value, ratio.low) == pytest.approx((3, 3), rel=1e-5), "the estimate is paired"
    assert replay.routes.router == noise.routes.router == 0
    assert without.routes.by_layer.tolist() == [0, 1]
    assert list(without.routes.layers) == [0, sum(len(item.tokens) - 1 for item in data), 0]
    turns = comparison.without_replay.by_turn.items()
    assert {turn: part.logprobs and part.logprobs.tokens for turn, part in turns} == {1: 10, 2: 10, 3: 4}
    assert list(comparison.without_replay.by_weight_version) == ["0"]


def test_observation_tokens_belong_to_the_next_turn() -> None:
    assert command.turn_numbers(turns_of(0)).tolist() == [1] * 5 + [2] * 5


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 80))
def test_chunks_are_all_sequences_in_order_within_the_budget(lengths: list[int], budget: int) -> None:
    found = command.token_chunks(lengths, budget)
    assert [index for chunk in found for index in range(len(lengths))[chunk]] == list(range(len(lengths)))
    for chunk in found:
        assert sum(lengths[chunk]) <= budget or len(lengths[chunk]) == 1


def test_incomparable_inputs_are_rejected(tmp_path: Path) -> None:
    data = [turns_of(0), turns_of(1)]
    silent = replace(data[0], loss_mask=np.zeros(10, bool))
    assert command.comparable_trajectories([silent, data[1]]) == [data[1]]
    with pytest.raises(ConfigError, match="none of 1 trajectories has a sampled token"):
        command.comparable_trajectories([silent])
    with pytest.raises(ConfigError, match="task-0 has no routes"):
        command.comparable_trajectories([replace(data[0], routing=None)])
    with pytest.raises(ConfigError, match="no trajectories found"):
        command.read_groups(tmp_path)
    (tmp_path / "config.yaml").write_text("name: half\nmodel: there\n")
    with pytest.raises(ConfigError, match="the run has not finished"):
        command.load_source(tmp_path, ())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert command.load_source(tmp_path, ("seed=3",)).model == tmp_path / "model"


async def test_rescore_requires_temperature_1(tmp_path: Path) -> None:
    """SGLang gives a prompt's log-probs at temperature 1, and the trainer would compute its own at 0.7."""
    config = tmp_path / "config.yaml"
    config.write_text("name: cool\nmodel: there\nrollout: {temperature: 0.7}\n")
    with pytest.raises(ConfigError, match=r"rollout\.temperature is 0\.7"):
        await command.run_compare(config, (), tasks=1, split="train", out=tmp_path, trajectories=tmp_path, rescore=True)


def test_a_dense_model_has_no_replay_and_stands_beside_one_with_experts(tmp_path: Path) -> None:
    data = [turns_of(seed) for seed in range(4)]
    routeless = [replace(item, routing=None) for item in data]
    assert command.comparable_trajectories(routeless, routes=False) == routeless
    own = command.engine_pass(routeless)
    assert [one.moe_layers for one in own.routes] == [0] * 4
    passed = command.TrainerPass([(values + 0.2).astype(np.float32) for values in own.logprobs], own.routes)
    dense = command.compare(routeless, None, passed, passed)
    assert (dense.replay, dense.without_over_with_replay, dense.without_replay.total.routes) == (None, {}, None)
    assert list(dense.without_replay.by_weight_version) == ["0"]
    assert {turn: part.logprobs and part.logprobs.tokens for turn, part in dense.without_replay.by_turn.items()} == {
        1: 8, 2: 8
    }  # fmt: skip
    write_json(tmp_path / "compare.json", command.comparison_json(dense))
    beside = command.read_dense(tmp_path)
    without = of(data, exchanged_layer=1)
    both = replace(command.compare(data, of(data), without, without), dense=beside)
    alone, table = command.tables(dense)[0], command.tables(both)[0]
    assert [column.header for column in alone.columns] == [
        "against the engine",
        "without replay",
        "noise of the trainer",
    ]
    (column,) = [column for column in table.columns if column.header == "dense model"]
    rows = list(table.columns[0].cells)
    assert list(column.cells)[rows.index("logprob_abs_diff")].startswith("0.2\n")
    write_json(tmp_path / "compare.json", command.comparison_json(both))
    with pytest.raises(ConfigError, match="this is the comparison of a model with experts"):
        command.read_dense(tmp_path)
    with pytest.raises(ConfigError, match=r"--dense .*nowhere: no compare\.json"):
        command.read_dense(tmp_path / "nowhere")


@pytest.mark.sglang
@pytest.mark.megatron
@pytest.mark.bubblewrap
@pytest.mark.exhaustive
async def test_a_dense_model_on_the_real_engine_and_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    install_model(tmp_path / "model")
    options = f"env.options={{train_tasks: 16, heldout_tasks: 8, cache_dir: {ROOT}/.cache/tasks}}"
    overrides = [f"model={dense_model(tmp_path / 'model')}", options, "rollout.group_size=2", "train.device=cpu"]
    out, config = tmp_path / "out", ROOT / "configs" / "quickstart.yaml"
    await command.run_compare(config, overrides, tasks=2, split="train", out=out, trajectories=None, rescore=True)
    found = json.loads((out / "compare.json").read_text())
    assert "replay" not in found
    assert 0 < found["without_replay"]["total"]["logprobs"]["metrics"]["k3_kl"]["value"] < 1e-2
    assert found["without_replay_again"]["total"]["logprobs"]["metrics"]["k3_kl"]["value"] < 1e-8
    assert command.read_dense(out).tokens == found["sampled_tokens"]
    assert not (out / "routers.png").exists()


@pytest.mark.long
@pytest.mark.sglang
@pytest.mark.megatron
@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_on_the_real_engine_and_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    install_model(tmp_path / "model")
    options = f"env.options={{train_tasks: 16, heldout_tasks: 8, cache_dir: {ROOT}/.cache/tasks}}"
    overrides = [f"model={tmp_path}/model", options, "rollout.group_size=2", "train.device=cpu"]
    out = tmp_path / "out"
    config = ROOT / "configs" / "quickstart.yaml"
    await command.run_compare(config, overrides, tasks=2, split="train", out=out, trajectories=None, rescore=True)
    found = json.loads((out / "compare.json").read_text())
    without, replay = (found[name]["total"] for name in ("without_replay", "replay"))
    assert found["trajectories"] == 4
    assert without["logprobs"]["tokens"] == found["sampled_tokens"] > 40
    assert without["routes"]["tokens"] == found["tokens"] - 4, "every row but each trajectory's last"
    assert replay["routes"]["router"] == 0
    assert 0 < without["logprobs"]["metrics"]["logprob_abs_diff"]["value"] < 0.3, "bfloat16 against float32"
    assert found["without_replay_again"]["total"]["logprobs"]["metrics"]["logprob_abs_diff"]["value"] < 1e-4
    assert (out / "trajectories" / "step-000000.jsonl.zst").exists()
    engine = found["engine_again"]["total"]
    assert engine["routes"]["tokens"] == without["routes"]["tokens"]
    assert engine["routes"]["router"] < 0.1, "a prefill and a decode of the same tokens differ by rounding"
    assert engine["logprobs"]["metrics"]["logprob_abs_diff"]["value"] < 0.3
    for name in ("probabilities", "f_tau", "routers"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
