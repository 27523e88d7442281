"""``agent-rl convert``: quantized checkpoints become the bfloat16 tensors that torch and transformers compute."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.small_disk import small_disk
from torch import Tensor
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.cli.common import CommandStopped
from agent_rl.errors import ConfigError, UserError
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.quantized.convert import Conversion
from agent_rl.train.quantized.dequantize import from_blocks, from_mxfp4, from_rows
from agent_rl.train.quantized.formats import without_quantization

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def float8(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def scales_of(shape: tuple[int, ...], block: int = 128) -> Tensor:
    sizes = [-(-size // block) for size in shape]
    return torch.rand(sizes, generator=torch.Generator().manual_seed(1)) * 1e-2 + 1e-4


def expanded(weight: Tensor, scales: Tensor, block: int = 128) -> Tensor:
    """The product with scales of full size, cut to the weight's shape."""
    full = scales.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    return (weight.to(torch.float32) * full[: weight.shape[0], : weight.shape[1]]).to(torch.bfloat16)


def checkpoint(directory: Path, *shards: Mapping[str, Tensor], quantization: Any = FP8) -> Path:
    directory.mkdir(parents=True)
    config = {"model_type": "deepseek_v3", "torch_dtype": "bfloat16"}
    config |= {"quantization_config": quantization} if quantization else {}
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": 7}, indent=4) + "\n")
    (directory / "tokenizer.json").write_text("{}")
    names = [f"model-{number}-of-{len(shards)}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(dict(shard), directory / name)
    index = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def two_shards(directory: Path) -> Path:
    """Two shards with a weight each, whose scales lie in the other shard."""
    first, second = float8(130, 257), float8(64, 300, seed=2)
    return checkpoint(
        directory,
        {"a.weight": first, "b.weight_scale_inv": scales_of((64, 300)), "norm.weight": torch.ones(3).bfloat16()},
        {"b.weight": second, "a.weight_scale_inv": scales_of((130, 257)), "gate.bias": torch.rand(4)},
    )


def convert(source: Path, target: Path, report: Callable[[], None] = lambda: None) -> LoadProgress:
    progress = LoadProgress()
    Conversion.plan(source, target).run(progress, report)
    return progress


def test_weights_are_the_products_and_other_tensors_keep_their_bits(tmp_path: Path) -> None:
    source = two_shards(tmp_path / "in")
    progress = convert(source, tmp_path / "out")
    before = {**load_file(source / "model-1-of-2.safetensors"), **load_file(source / "model-2-of-2.safetensors")}
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    after = {name: load_file(tmp_path / "out" / file)[name] for name, file in index["weight_map"].items()}
    assert set(after) == {"a.weight", "b.weight", "norm.weight", "gate.bias"}
    assert torch.equal(after["a.weight"], expanded(before["a.weight"], before["a.weight_scale_inv"]))
    assert torch.equal(after["b.weight"], expanded(before["b.weight"], before["b.weight_scale_inv"]))
    assert torch.equal(after["gate.bias"], before["gate.bias"])
    assert after["gate.bias"].dtype == torch.float32
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert progress.read == progress.needed == sum(tensor.nbytes for tensor in before.values())
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert not list((tmp_path / "out").glob(".*"))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 300), block=st.sampled_from([32, 128]))
def test_blocks_of_any_shape_equal_scales_of_full_size(rows: int, columns: int, block: int) -> None:
    weight, scales = float8(rows, columns), scales_of((rows, columns), block)
    assert torch.equal(from_blocks(weight, scales, (block, block)), expanded(weight, scales, block))


def test_every_float8_number_and_power_of_two_scales_are_exact() -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    scales = torch.tensor([[120]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    expected = weight.double() * 2.0**-7
    assert torch.equal(from_blocks(weight, scales, (128, 128)).double().nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(
        from_rows(weight, torch.tensor([[1.0], [3.0]])).double().nan_to_num(7)[1, 1], weight.double()[1, 1] * 3
    )


def test_scales_of_rows_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    weight, scale = float8(10, 33), torch.rand(10, 1).bfloat16()
    source = checkpoint(
        tmp_path / "in",
        {"x.weight": weight, "x.weight_scale": scale},
        quantization={"quant_method": "compressed-tensors"},
    )
    convert(source, tmp_path / "out")
    stored = load_file(tmp_path / "out/model-1-of-1.safetensors")
    assert torch.equal(stored["x.weight"], weight.to(torch.bfloat16) * scale)  # the decompression of compressed-tensors


def test_mxfp4_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 10, 2), dtype=torch.uint8, generator=generator)
    source = checkpoint(
        tmp_path / "in", {"w_blocks": blocks, "w_scales": scales}, quantization={"quant_method": "mxfp4"}
    )
    convert(source, tmp_path / "out")
    stored = load_file(tmp_path / "out/model-1-of-1.safetensors")
    assert torch.equal(stored["w"], transformers.convert_moe_packed_tensors(blocks, scales))
    assert stored["w"].shape == (3, 64, 10)
    assert torch.equal(from_mxfp4(blocks[1], scales[1]), stored["w"][1])


def test_fp8_equals_transformers() -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scales = float8(256, 384), scales_of((256, 384))
    expected = module.Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
    assert torch.equal(from_blocks(weight, scales, (128, 128)), expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "a": 1,\n  "quantization_config": {"x": [1, "}"]},\n  "b": 2\n}\n', '{\n  "a": 1,\n  "b": 2\n}\n'),
        ('{"a": 1.50,\n "quantization_config": {}\n}', '{"a": 1.50\n}'),
        ('{"quantization_config": {}, "é": "\\u00e9"}', '{"é": "\\u00e9"}'),
        ('{"quantization_config": {}}', "{}"),
        ('{"a": {"quantization_config": 1}, "quantization_config": {}}', '{"a": {"quantization_config": 1}}'),
    ],
)
def test_only_the_member_quantization_config_leaves_the_config(text: str, expected: str) -> None:
    assert without_quantization(text) == expected


def refusals() -> list[tuple[dict[str, Tensor], Any, str]]:
    weight, scales = float8(130, 130), scales_of((130, 130))
    named = {"x.weight": weight, "x.weight_scale_inv": scales}
    blocks = torch.zeros(2, 4, 3, 16, dtype=torch.uint8)
    mxfp4 = {"quant_method": "mxfp4"}
    return [
        ({"x.weight": weight}, FP8, "x.weight is float8_e4m3fn and has no x.weight_scale_inv"),
        ({"x.weight_scale_inv": scales}, FP8, "x.weight_scale_inv has no weight"),
        ({"x.weight": weight, "x.weight_scale_inv": scales[:1]}, FP8, r"has the shape \[1, 2\], expected \[2, 2\]"),
        (named, FP8 | {"weight_block_size": 128}, "weight_block_size must be two positive integers, got 128"),
        (named | {"x.weight_scale_inv": scales.double()}, FP8, "the scales of x.weight are F64"),
        ({"x.weight": torch.ones(2)}, FP8, "no float8 or mxfp4 tensor: nothing to convert"),
        ({"x.weight": torch.ones(2)}, None, "no quantization_config: nothing to convert"),
        (named, {"quant_method": "awq"}, "quant_method 'awq' is not supported"),
        ({"w_blocks": blocks}, mxfp4, "w_blocks has no w_scales"),
        ({"w_scales": blocks[0, 0]}, mxfp4, "w_scales has no weight; expected w_blocks"),
        ({"w_blocks": blocks, "w_scales": blocks[:, :, :2, 0].contiguous()}, mxfp4, "w_scales has the shape"),
        ({"x.weight": float8(2, 2).to(torch.float8_e5m2)}, FP8, "x.weight is F8_E5M2, which is not supported"),
    ]


@pytest.mark.parametrize(("tensors", "quantization", "message"), refusals())
def test_what_cannot_be_converted_is_one_line_and_writes_nothing(
    tmp_path: Path, tensors: dict[str, Tensor], quantization: Any, message: str
) -> None:
    source = checkpoint(tmp_path / "in", tensors, quantization=quantization)
    with pytest.raises(ConfigError, match=message) as error:
        convert(source, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_existing_target_and_a_missing_source_are_refused(tmp_path: Path) -> None:
    source = two_shards(tmp_path / "in")
    with pytest.raises(UserError, match="in exists; name a new directory"):
        convert(source, source)
    with pytest.raises(UserError, match="is not a directory"):
        convert(tmp_path / "absent", tmp_path / "out")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = two_shards(tmp_path / "in")
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(UserError, match=r"take 0.00 GiB and .*disk has 0.00 GiB free"):
            convert(source, disk / "out")
        assert not list(disk.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.quantized.convert import Conversion
left = int(sys.argv[3])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
def report():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), int(sys.argv[4]))
Conversion.plan(Path(sys.argv[1]), Path(sys.argv[2])).run(LoadProgress(), report)
"""


def kill_after(tensors: int, source: Path, target: Path, number: int) -> int:
    arguments = [str(source), str(target), str(tensors), str(int(number))]
    return subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, timeout=120).returncode


def test_a_killed_conversion_goes_on_with_the_next_file(tmp_path: Path) -> None:
    source, target = two_shards(tmp_path / "in"), tmp_path / "out"
    assert kill_after(3, source, target, signal.SIGKILL) == -signal.SIGKILL  # within the second file
    partial = tmp_path / ".out.partial"
    first = (partial / "model-1-of-2.safetensors").stat()
    assert not target.exists()
    assert not (partial / "model-2-of-2.safetensors").exists()
    progress = convert(source, target)
    resumed = (target / "model-1-of-2.safetensors").stat()
    assert (resumed.st_ino, resumed.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert progress.read == 64 * 300 + 4 * 3 + 4 * 4  # the second file's weights, with the scales from the first
    convert(source, tmp_path / "whole")
    for file in (tmp_path / "whole").iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes()
    assert {path.name for path in target.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_an_unfinished_conversion_of_other_files_is_not_continued(tmp_path: Path) -> None:
    source, target = two_shards(tmp_path / "in"), tmp_path / "out"
    assert kill_after(3, source, target, signal.SIGKILL)
    other = two_shards(tmp_path / "other")
    with pytest.raises(UserError, match=r"\.out\.partial has an unfinished conversion of another checkpoint"):
        convert(other, target)


def test_ctrl_c_leaves_finished_files_only(tmp_path: Path) -> None:
    source, target = two_shards(tmp_path / "in"), tmp_path / "out"
    kill_after(3, source, target, signal.SIGINT)
    names = {path.name for path in (tmp_path / ".out.partial").iterdir()}
    assert names == {".lock", ".source.json", "model-1-of-2.safetensors"}
    assert not target.exists()


def test_ctrl_c_ends_the_command_with_what_the_next_start_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversion, "run", interrupted)
    result = CliRunner().invoke(app, ["convert", str(two_shards(tmp_path / "in")), str(tmp_path / "out")])
    assert isinstance(result.exception, CommandStopped)
    assert str(result.exception) == "start again to resume"


def test_the_command_prints_bytes_and_rate(tmp_path: Path) -> None:
    source = two_shards(tmp_path / "in")
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out")])
    assert result.exit_code == 0
    assert "converted 0.00 of 0.00 GiB" in result.output
