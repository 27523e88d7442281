"""Runs on quantized checkpoints: each is converted once, into the directory of the runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent_rl.config import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.models.spec import read_model_spec
from agent_rl.train.hf_index import check_checkpoint
from agent_rl.train.quantized.copies import DIRECTORY, bfloat16_copy, local_models

torch = pytest.importorskip("torch", reason="torch is not installed (the train extra)")
from safetensors.torch import load_file  # noqa: E402
from support.quantized_model import write_float8_model  # noqa: E402

from agent_rl.train.hf_index import LoadProgress  # noqa: E402
from agent_rl.train.quantized.convert import Conversion  # noqa: E402


def test_policy_and_reference_are_converted_once(tmp_path: Path) -> None:
    model, lines = write_float8_model(tmp_path / "model", "deepseek_v3"), []
    train = {"kl": {"reference": model, "coefficient": 0.1}}
    config = RunConfig.model_validate({"name": "x", "runs_dir": tmp_path / "runs", "model": model, "train": train})
    found = local_models(config, lines.append)
    assert found.model == found.train.kl.reference
    assert found.model.parent == tmp_path / "runs" / DIRECTORY
    assert len(lines) == 2, "one conversion: its start and its end"
    check_checkpoint(found.model, read_model_spec(found.model))
    Conversion.plan(model, tmp_path / "out").run(LoadProgress(), lambda: None)
    converted, expected = (load_file(path / "model.safetensors") for path in (found.model, tmp_path / "out"))
    assert converted.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in converted.items())
    assert local_models(config, lines.append) == found
    assert len(lines) == 2


def test_a_changed_checkpoint_gets_another_copy(tmp_path: Path) -> None:
    model = write_float8_model(tmp_path / "model", "deepseek_v3")
    first = bfloat16_copy(model, tmp_path / "copies", lambda _: None)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert bfloat16_copy(model, tmp_path / "copies", lambda _: None) != first
    assert bfloat16_copy(first, tmp_path / "copies", pytest.fail) == first, "not quantized"


def test_a_model_that_is_not_supported_is_refused_before_its_conversion(tmp_path: Path) -> None:
    model = write_float8_model(tmp_path / "model", "deepseek_v3")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"logit_softcapping": 30.0}))
    with pytest.raises(ConfigError, match=r"logit_softcapping=30\.0 is not supported"):
        bfloat16_copy(model, tmp_path / "copies", pytest.fail)
    assert not (tmp_path / "copies").exists()
