"""``agent-rl export`` under kills."""

from __future__ import annotations

import itertools
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.kill_points import contents, ends_before
from support.moe_checkpoint import write_moe

pytest.importorskip("torch", reason="needs the trainer environment")

import torch
from safetensors.torch import load_file
from support.checkpoint_files import assert_same_tensors
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.config import LoraConfig, ParallelConfig, RunConfig
from agent_rl.controller.run_models import export, resolve_run
from agent_rl.errors import UserError
from agent_rl.models.cuts import Place
from agent_rl.models.spec import read_model_spec
from agent_rl.models.tensors import adapters, belongs_to, model_parameters
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.checkpoint.hf_export import _full_shape
from agent_rl.train.checkpoint.piece_files import FlatRange, write_pieces


def write_run(runs: Path, lora: LoraConfig | None, freeze: tuple[str, ...] = (), *, ema: bool = False) -> Path:
    """A run with a checkpoint of random weights of step 1. ``ema``: with an average, which is the negated weights."""
    model = write_moe(
        runs / "model", layers=1, hidden=16, heads=2, kv=1, head_dim=8, experts=4, inter=8, vocab=32
    )  # fmt: skip
    train = {"lora": None if lora is None else lora.model_dump(), "freeze": freeze or None}
    train |= {"ema": {"decay": 0.9}} if ema else {}
    config = RunConfig.model_validate({"name": "run", "model": str(model), "runs_dir": str(runs), "train": train})
    directory = config.run_dir / "checkpoints/step-000001"
    spec, place = read_model_spec(model), Place(experts=tuple(range(4)))
    parameters = [each for _, each in model_parameters(spec) if not (each.frozen or each.copied)]
    parameters = [each for each in parameters if not belongs_to(each.name, freeze)]
    if lora is not None:
        parameters = [half for each in parameters if each.adapted for half in adapters(each, lora.rank)]
    shards = [shard for each in parameters for shard in each.cut.shards(each.tensors, _full_shape(each), place)]
    ranges = [FlatRange(shard, 0, math.prod(shard.shape)) for shard in shards]
    values = np.random.default_rng(0).standard_normal(sum(each.size for each in ranges)).astype(np.float32)
    partial = checkpoint.begin(directory)
    with checkpoint.rank_file(partial, 0).open("wb") as file:
        slots = ("master", "ema") if ema else ("master",)
        pieces = [(each, slot) for slot in slots for each in ranges]
        checksum = write_pieces(file, pieces, np.concatenate((values, -values))[: len(slots) * len(values)])
    layout = ParallelConfig().model_dump()
    checkpoint.commit(directory, checkpoint.Manifest(checkpoint.FORMAT, 1, {}, layout, "float32", (checksum,), {}))
    (config.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (config.run_dir / "state.json").write_text("{}")
    return config.run_dir


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)])
def test_the_average_is_exported(tmp_path: Path, lora: LoraConfig | None) -> None:
    """A model may be named ``RUN@STEP+ema``. The product of two negated halves of an adapter is the product."""
    run = write_run(tmp_path, lora, ema=True)
    weights, average = (resolve_run(Path(f"{run}@1{kind}"), "model") for kind in ("", "+ema"))
    assert (weights.name, average.name) == ("step-000001", "step-000001-ema")
    one, other = (load_file(directory / "model.safetensors") for directory in (weights, average))
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    if lora is None:
        assert all(torch.equal(one[name], -other[name]) for name in changed)
        assert changed == set(one)
        CliRunner().invoke(app, ["export", f"{run}@1", str(tmp_path / "out"), "--ema"], catch_exceptions=False)
        assert_same_tensors(average / "model.safetensors", tmp_path / "out/model.safetensors")
    else:
        halves = [load_file(directory / "adapter/adapter_model.safetensors") for directory in (weights, average)]
        assert not changed
        assert all(torch.equal(halves[0][name], -halves[1][name]) for name in halves[0])


def test_a_run_without_an_average_has_none_to_export(tmp_path: Path) -> None:
    run = write_run(tmp_path, None)
    with pytest.raises(UserError, match=r"has no average of its weights: train with train\.ema"):
        resolve_run(Path(f"{run}@1+ema"), "model")


def test_frozen_weights_are_exported_from_the_starting_model(tmp_path: Path) -> None:
    run, out = write_run(tmp_path, None, ("router", "embeddings", "lm_head")), tmp_path / "out"
    export(run / "checkpoints/step-000001", run, out)
    start, found = (load_file(directory / "model.safetensors") for directory in (tmp_path / "model", out))
    assert start.keys() == found.keys()
    kept = {name for name, value in found.items() if value.equal(start[name])}
    assert kept == {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)], ids=["weights", "adapters"])
def test_export_killed_at_each_change_of_a_file_is_absent_or_complete(tmp_path: Path, lora: LoraConfig | None) -> None:
    run, out = write_run(tmp_path, lora), tmp_path / "out/model"
    source = run / "checkpoints/step-000001"
    export(source, run, out)
    origin, complete = contents(run), contents(out)
    assert {"config.json", "model.safetensors"} <= complete.keys()
    assert ("adapter/adapter_model.safetensors" in complete) == (lora is not None)
    for number in itertools.count(1):
        shutil.rmtree(out.parent)
        if ends_before(number, export, source, run, out):
            break
        assert contents(run) == origin
        if not out.exists():
            export(source, run, out)
        assert contents(out) == complete
        assert os.listdir(out.parent) == ["model"], "what a killed export left is removed"
    assert number > 5
    assert contents(out) == complete
