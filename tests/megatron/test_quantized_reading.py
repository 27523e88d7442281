"""Quantized checkpoints are read as their bfloat16 conversions, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import megatron_tiny as tiny
import torch
from safetensors.torch import load_file, save_file
from support.quantized_model import write_float8_model, write_mxfp4_model
from test_cuts import CASES, places, slices, tensors_of

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.controller import preflight
from agent_rl.errors import ConfigError
from agent_rl.models.spec import difference, read_model_spec
from agent_rl.train.hf_index import LoadProgress, check_checkpoint
from agent_rl.train.hf_writer import write_checkpoint
from agent_rl.train.megatron.packed_batch import PackedBatch
from agent_rl.train.megatron.safetensors_slices import SliceReader
from agent_rl.train.parallel_checks import adapter_problems
from agent_rl.train.quantized.convert import Conversion

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(("write", "kind"), [(write_float8_model, "deepseek_v3"), (write_mxfp4_model, "gpt_oss")])
def test_a_quantized_model_computes_and_is_exported_as_its_conversion(
    write: Callable[..., Path], kind: str, tmp_path: Path, build: Callable[..., Any]
) -> None:
    model, converted = write(tmp_path / "model", kind), tmp_path / "converted"
    Conversion.plan(model, converted).run(LoadProgress(), lambda: None)
    spec = read_model_spec(model)
    assert spec.quantized
    assert difference(read_model_spec(converted), spec) is None
    check_checkpoint(model, spec)
    batch = PackedBatch.from_sequences(tiny.sequences(lengths=(17, 60)))
    quantized = build(model)
    first, second = (each.forward_logprobs([batch], None)[0].logprobs for each in (quantized, build(converted)))
    assert torch.equal(first, second)
    write_checkpoint(quantized.export_weights(), model, tmp_path / "export", torch.bfloat16)
    exported, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "export", converted))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name].bfloat16(), tensor.bfloat16()) for name, tensor in expected.items())
    assert (tmp_path / "export/config.json").read_bytes() == (converted / "config.json").read_bytes()


def test_missing_scales_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model = write_float8_model(tmp_path, "deepseek_v3")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight_scale_inv"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ConfigError, match=r"0\.mlp\.down_proj\.weight is float8_e4m3fn and has no .*weight_scale_inv"):
        check_checkpoint(model, read_model_spec(model))


def test_engines_without_a_trainer_and_adapters_refuse_a_quantized_model(tmp_path: Path) -> None:
    model = write_float8_model(tmp_path, "deepseek_v3")
    with pytest.raises(ConfigError, match=r"is quantized, which only .* read: convert it .* `agent-rl convert`"):
        preflight.run(RunConfig.model_validate({"name": "x", "model": model}))
    train = TrainConfig.model_validate({"lora": {"rank": 8}})
    assert "`agent-rl convert`" in adapter_problems(train, read_model_spec(model))[0]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if all(len(s) == 2 for s in case.shapes)])
def test_every_cut_of_a_float8_tensor_is_multiplied_by_its_scales(name: str, rows: bool, tmp_path: Path) -> None:
    """Blocks of 3 x 2 do not divide the parts."""
    case, generator = CASES[name], torch.Generator().manual_seed(0)
    described, full = tensors_of(case)
    stored, expected = {}, []
    for key, tensor in full.items():
        height, width = tensor.shape
        stored[key] = torch.randn(tensor.shape, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand((height, 1) if rows else (-(-height // 3), -(-width // 2)), generator=generator)
        each = scales if rows else scales.repeat_interleave(3, 0).repeat_interleave(2, 1)[:height, :width]
        stored[f"{key}_scale" if rows else f"{key}_scale_inv"] = scales
        expected.append((stored[key].float() * each).bfloat16())
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [3, 2]}}'
    )
    progress = LoadProgress()
    with SliceReader(tmp_path) as reader:
        for place in places(case.cut, 2, (2, 0, 3, 1)):
            wanted = case.expected(expected, place).float()
            parameter = torch.full_like(wanted, torch.nan, memory_format=torch.contiguous_format)
            for each in slices(case, described, place, parameter):
                reader.check(each)
                reader.fill(each, progress)
            assert torch.equal(parameter, wanted)
