"""What a dry run checks before it starts, its skewed routes and its extrapolation. No rank runs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.dryrun_ranks import config_of, write_model
from support.family_models import write_model as write_family

from agent_rl.dryrun import run
from agent_rl.dryrun.batch import skewed_routes
from agent_rl.dryrun.job import PhaseRecord, RankJob, RankRecord
from agent_rl.dryrun.run import DryRunResult, check, dry_run, planned_figures
from agent_rl.errors import ConfigError, TrainerError, UserError
from agent_rl.models.spec import read_model_spec
from agent_rl.train.hf_index import check_checkpoint, expected_shapes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write_shard(directory: Path, shapes: dict[str, tuple[int, ...]], name: str = "model.safetensors") -> None:
    """A safetensors file's head; nobody reads further."""
    head = json.dumps({n: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for n, shape in shapes.items()})
    (directory / name).write_bytes(len(head).to_bytes(8, "little") + head.encode())


def test_a_wrong_or_incomplete_checkpoint_is_refused_in_one_line(model: Path) -> None:
    model_spec = read_model_spec(model)
    shapes = expected_shapes(model_spec)
    write_shard(model, shapes)
    check_checkpoint(model, model_spec)
    write_shard(model, shapes | {"model.norm.weight": (65,)})
    wrong = r"model\.norm\.weight is \[65\] in the checkpoint and \[64\] by config\.json$"
    with pytest.raises(ConfigError, match=wrong):
        check_checkpoint(model, model_spec)
    write_shard(model, {name: shape for name, shape in shapes.items() if name != "lm_head.weight"})
    with pytest.raises(ConfigError, match=r"no tensor lm_head\.weight, of shape \[512, 64\]$"):
        check_checkpoint(model, model_spec)
    index = {"weight_map": dict.fromkeys(shapes, "model-00002-of-00002.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"1 of 1 shards are missing, first model-00002-of-00002\.safetensors$"):
        check(config_of(model, world_size=1), ranks=(), skew=1.0)


@pytest.mark.parametrize(
    ("parallel", "ranks", "skew", "line"),
    [
        ({"world_size": 6, "tensor": 4}, (), 1.0, "world_size 6 is not a multiple"),
        ({"world_size": 3, "tensor": 3}, (), 1.0, "tensor=3 does not divide"),
        ({"world_size": 4, "expert": 2}, (4,), 1.0, "--rank 4: train.parallel.world_size is 4"),
        ({"world_size": 4, "expert": 2}, (), 3.0, "--skew 3: with train.parallel.expert=2 it is at most 2"),
    ],
)
def test_invalid_options_are_one_line(model: Path, parallel: Any, ranks: Any, skew: float, line: str) -> None:
    with pytest.raises((ConfigError, UserError)) as refused:
        check(config_of(model, **parallel), ranks=ranks, skew=skew)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_too_few_nodes_are_refused_in_one_line(model: Path) -> None:
    config = config_of(model, world_size=32, expert=8)
    config = config.model_copy(update={"hardware": config.hardware.model_copy(update={"trainer_nodes": 2})})
    with pytest.raises(ConfigError, match=r"world_size=32 is more than hardware\.trainer_nodes=2 times"):
        check(config, ranks=(), skew=1.0)


@pytest.mark.parametrize("skew", [1.0, 2.0, 3.5])
def test_skewed_routes_load_a_rank_as_requested(model: Path, skew: float) -> None:
    chosen = skewed_routes(read_model_spec(model), 1000, 4, 2, skew)
    assert chosen.shape == (1000, 2, 2)
    assert (np.diff(np.sort(chosen, axis=2), axis=2) > 0).all(), "different experts"
    own = np.isin(chosen, [4, 5]).mean()
    assert own == pytest.approx(skew / 4, abs=0.01)


def record(layers: int) -> RankRecord:
    """A record whose update takes 10 bytes and 3 syncs per layer; up to 10 layers the optimizer step has the peak."""
    phases = {"update": PhaseRecord(100 + 10 * layers, 0, {}, 3 * layers), "step": PhaseRecord(200, 0, {}, 0)}
    return RankRecord(0, layers, phases, 7 * layers, 0, 0, {}, 0.0)


def test_figures_are_extrapolated_from_two_depths() -> None:
    result = DryRunResult(0, 1.0, 48, (record(2), record(4)))
    assert result.extrapolate(lambda each: each.static) == 7 * 48
    assert result.per_layer(lambda each: each.phases["update"].syncs) == 3
    assert result.peak == 100 + 10 * 48, "the update's peak, although the step's is higher at both depths"
    assert DryRunResult(0, 1.0, 4, (record(4),)).peak == 200


def test_one_depth_is_compared_with_the_plan_of_that_depth(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(run, "_run", lambda job: record(job.rank))
    monkeypatch.setattr(run, "build_device_guard", lambda: model / "no-library.so")
    config = config_of(write_model(model, num_hidden_layers=48), world_size=1)
    depths = [dry_run(config, ranks=(), skew=1.0, layers=layers)[0].depth for layers in ("2", "2,4", "all")]
    assert depths == [2, 48, 48]
    first, whole = planned_figures(config, layers=2), planned_figures(config)
    assert first.rank == planned_figures(config_of(write_model(model, num_hidden_layers=2), world_size=1)).rank
    assert first.step.logprobs < whole.step.logprobs


def test_a_dry_run_timeout_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_SECONDS", 0.01)
    job = RankJob(config_of(model, world_size=1), model, 3, 1.0, model / "no-library.so")
    with pytest.raises(TrainerError, match=r"the dry run of rank 3 took more than 0\.01 s: simulate fewer layers"):
        run._run(job)


def test_a_model_with_fewer_layers_keeps_what_single_layers_are(tmp_path: Path) -> None:
    written = {kind: tmp_path / kind for kind in ("gpt_oss", "ernie4_5_moe", "nemotron_h")}
    for kind, directory in written.items():
        config = config_of(write_family(directory, kind, seed=0))
        spec = read_model_spec(run._write_model(config, 2, tmp_path / f"short-{kind}"))
        assert spec.num_layers == 2
        whole = read_model_spec(directory)
        assert (spec.windows, spec.mixers, spec.moe) == (whole.windows[:2], whole.mixers[:2], whole.moe[:2])
