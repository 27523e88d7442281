"""Each rank reads its own slices of a checkpoint, each byte once; damaged checkpoints are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import numpy as np
import torch
from safetensors.torch import save_file
from support.model_sizes import DENSE_SIZES, EXPERT_SIZES
from torch import Tensor

from agent_rl.config import ParallelConfig
from agent_rl.errors import ConfigError
from agent_rl.models.spec import ModelSpec
from agent_rl.train.hf_index import LoadProgress, check_checkpoint, expected_shapes, read_headers
from agent_rl.train.megatron.parallel import ParallelState

pytestmark = pytest.mark.megatron

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
MODEL = {"model_type": "qwen3_moe", **DENSE_SIZES, **EXPERT_SIZES, **HEADS, "mlp_only_layers": [1]}
LAYOUTS = {
    "one rank": ParallelConfig(),
    "TP4 EP8": ParallelConfig(world_size=8, tensor=4, expert=8),
    "TP2 PP2 EP4": ParallelConfig(world_size=8, tensor=2, pipeline=2, expert=4),
}


def ranks_of(layout: ParallelConfig) -> Iterator[ParallelState]:
    """The state of every rank in Megatron's order: tensor ranks first, then data ranks, then stages."""
    stage = layout.world_size // layout.pipeline
    data = stage // layout.tensor
    for rank in range(layout.world_size):
        within = rank % stage
        yield ParallelState(
            rank, layout.world_size, within // layout.tensor, data, within % layout.tensor, layout.tensor,
            rank // stage, layout.pipeline, 0, 1, within % layout.expert, layout.expert,
        )  # fmt: skip


Reads = list[tuple[str, int, int]]


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    model_spec: ModelSpec
    tensors: dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Random bfloat16 tensors in three shards."""
    directory, model_spec = tmp_path_factory.mktemp("slices"), ModelSpec.of(MODEL)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in expected_shapes(model_spec).items()}
    names = list(tensors)
    for number in range(3):
        save_file({name: tensors[name] for name in names[number::3]}, directory / f"model-{number}.safetensors")
    (directory / "config.json").write_text(json.dumps(MODEL))
    return Checkpoint(directory, model_spec, tensors)


def modules_of(model_spec: ModelSpec, ranks: ParallelState) -> list[Any]:
    """Modules with this rank's parameters, by Megatron's names."""
    tensor, hidden, dim = ranks.tensor_size, model_spec.hidden, model_spec.head_dim
    each = model_spec.num_layers // ranks.pipeline_size
    first = ranks.pipeline_rank * each
    shapes: dict[str, tuple[int, ...]] = {}
    if ranks.pipeline_rank == 0:
        shapes["embedding.word_embeddings.weight"] = (model_spec.vocab_size // tensor, hidden)
    for local in range(each):
        layer = f"decoder.layers.{local}."
        width = (model_spec.heads + 2 * model_spec.kv_heads) * dim // tensor
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "pre_mlp_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attention.q_layernorm.weight"] = (dim,)
        shapes[layer + "self_attention.k_layernorm.weight"] = (dim,)
        shapes[layer + "self_attention.linear_qkv.weight"] = (width, hidden)
        shapes[layer + "self_attention.linear_proj.weight"] = (hidden, model_spec.q_width // tensor)
        if model_spec.moe[first + local]:
            own = model_spec.num_experts // ranks.expert_size
            shapes[layer + "mlp.router.weight"] = (model_spec.num_experts, hidden)
            shapes[layer + "mlp.experts.weight1"] = (own, 2 * model_spec.expert_inner, hidden)
            shapes[layer + "mlp.experts.weight2"] = (own, hidden, model_spec.expert_inner)
        else:
            shapes[layer + "mlp.linear_fc1.weight"] = (2 * model_spec.inner // tensor, hidden)
            shapes[layer + "mlp.linear_fc2.weight"] = (hidden, model_spec.inner // tensor)
    if ranks.last_stage:
        shapes["decoder.final_layernorm.weight"] = (hidden,)
        shapes["output_layer.weight"] = (model_spec.vocab_size // tensor, hidden)
    parameters = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    layers = [SimpleNamespace(layer_number=first + local + 1) for local in range(each)]
    return [
        SimpleNamespace(named_parameters=parameters.items, named_buffers=dict, decoder=SimpleNamespace(layers=layers))
    ]


def wanted(
    name: str, parts: Sequence[Tensor], model_spec: ModelSpec, ranks: ParallelState, experts: Sequence[int]
) -> Tensor:
    """The parameter, made from whole tensors."""
    size, rank = ranks.tensor_size, ranks.tensor_rank
    if name.endswith("weight1"):
        return torch.stack([torch.cat((parts[2 * expert], parts[2 * expert + 1])) for expert in experts])
    if name.endswith("weight2"):
        return torch.stack([parts[expert] for expert in experts])
    if name.endswith("linear_qkv.weight"):
        grouped = [part.unflatten(0, (model_spec.kv_heads, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1).chunk(size)[rank]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return parts[0].chunk(size, dim=1)[rank]
    if name.endswith(("norm.weight", "router.weight")):
        return parts[0]
    return torch.cat([part.chunk(size)[rank] for part in parts])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """File, first byte and length of every read that is made."""
    made: Reads = []
    plain = os.preadv

    def preadv(file: int, buffers: Sequence[memoryview], start: int) -> int:
        count = plain(file, buffers, start)
        made.append((os.path.basename(os.readlink(f"/proc/self/fd/{file}")), start, count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return made


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_rank_reads_its_slices_once(checkpoint: Checkpoint, reads: Reads, layout: ParallelConfig) -> None:
    from agent_rl.train.megatron.hf_weights import load_weights, own_experts, param_mappings

    model_spec = checkpoint.model_spec
    sizes = {file.name: file.stat().st_size for file in checkpoint.directory.iterdir()}
    by_any = {name: np.zeros(size, bool) for name, size in sizes.items()}
    for ranks in ranks_of(layout):
        reads.clear()
        modules, progress = modules_of(model_spec, ranks), LoadProgress()
        mappings = list(param_mappings(modules, model_spec, {}))
        load_weights(mappings, checkpoint.directory, ranks, progress)
        held = dict(modules[0].named_parameters())
        names = {id(parameter): name for name, parameter in held.items()}
        assert {id(mapping.parameter) for mapping in mappings} == names.keys()
        for mapping in mappings:
            name, parts = names[id(mapping.parameter)], [checkpoint.tensors[part] for part in mapping.names]
            expected = wanted(name, parts, model_spec, ranks, own_experts(mapping, ranks)).float()
            assert torch.equal(held[name], expected), f"rank {ranks.rank}: {name}"
        own = {name: np.zeros(size, bool) for name, size in sizes.items()}
        for file, start, count in reads:
            assert not own[file][start : start + count].any(), "read twice"
            own[file][start : start + count] = by_any[file][start : start + count] = True
        needed = 2 * sum(parameter.numel() for parameter in held.values())
        assert sum(int(part.sum()) for part in own.values()) == needed == progress.needed == progress.read
    assert sum(int(part.sum()) for part in by_any.values()) == sum(part.nbytes for part in checkpoint.tensors.values())


def test_moved_experts_are_read_by_their_rank(checkpoint: Checkpoint) -> None:
    from agent_rl.train.megatron.hf_weights import load_weights, param_mappings

    (_, ranks) = ranks_of(ParallelConfig(world_size=2, expert=2))
    modules, placement = modules_of(checkpoint.model_spec, ranks), {2: (0, 2, 4, 6, 7, 5, 3, 1)}
    mappings = param_mappings(modules, checkpoint.model_spec, placement)
    load_weights(mappings, checkpoint.directory, ranks, LoadProgress())
    held = dict(modules[0].named_parameters())["decoder.layers.2.mlp.experts.weight2"]
    names = [f"model.layers.2.mlp.experts.{expert}.down_proj.weight" for expert in (7, 5, 3, 1)]
    assert torch.equal(held, torch.stack([checkpoint.tensors[name] for name in names]).float())


def test_loading_needs_one_block_of_host_memory(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_rl.train.megatron import safetensors_slices as slices
    from agent_rl.train.megatron.hf_weights import load_weights, param_mappings

    (ranks,) = ranks_of(ParallelConfig())
    monkeypatch.setattr(slices, "BLOCK_BYTES", 100)  # less than two rows of hidden 32
    sizes: list[int] = []
    plain = slices.SliceReader._block_of
    monkeypatch.setattr(slices.SliceReader, "_block_of", lambda self, size: sizes.append(size) or plain(self, size))
    modules = modules_of(checkpoint.model_spec, ranks)
    mappings = param_mappings(modules, checkpoint.model_spec, {})
    load_weights(mappings, checkpoint.directory, ranks, LoadProgress())
    assert max(sizes) == 2 * 128, "a block holds at least one row of the widest tensor"
    held = dict(modules[0].named_parameters())
    assert torch.equal(held["output_layer.weight"], checkpoint.tensors["lm_head.weight"].float())


def test_nothing_is_read_of_a_checkpoint_that_does_not_fit(
    checkpoint: Checkpoint, reads: Reads, tmp_path: Path
) -> None:
    from agent_rl.train.megatron.hf_weights import load_weights, param_mappings

    (ranks,) = ranks_of(ParallelConfig())
    narrow = checkpoint.tensors | {"model.layers.3.mlp.gate.weight": torch.zeros(4, 32)}
    save_file(narrow, tmp_path / "model.safetensors")
    modules = modules_of(checkpoint.model_spec, ranks)
    with pytest.raises(ConfigError, match=r"3\.mlp\.gate\.weight is \[4, 32\] in .* and \[8, 32\] by config\.json$"):
        load_weights(param_mappings(modules, checkpoint.model_spec, {}), tmp_path, ranks, LoadProgress())
    assert not reads


def test_damaged_checkpoint_files_are_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors file$"):
        read_headers(tmp_path)
    save_file({"a": torch.zeros(8)}, file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"truncated: \d+ bytes, and its header describes \d+$"):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a checkpoint index"):
        read_headers(tmp_path)


def test_tensors_that_the_model_does_not_have_are_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file, tensors = tmp_path / "model.safetensors", checkpoint.tensors
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    check_checkpoint(tmp_path, checkpoint.model_spec)
    further = {f"model.layers.4.{part}.weight": torch.ones(1) for part in ("enorm", "hnorm")}
    save_file(tensors | further, file)
    with pytest.raises(
        ConfigError, match=r"has 2 tensors that .* qwen3_moe .* first 'model\.layers\.4\.enorm\.weight'$"
    ):
        check_checkpoint(tmp_path, checkpoint.model_spec)


def test_missing_tensors_and_unsupported_dtypes_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file, model_spec, tensors = tmp_path / "model.safetensors", checkpoint.model_spec, dict(checkpoint.tensors)
    save_file(tensors | {"model.norm.weight": torch.zeros(32).to(torch.float8_e4m3fn)}, file)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is F8_E4M3; supported: F64, F32, F16, BF16$"):
        check_checkpoint(tmp_path, model_spec)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"no tensor model\.norm\.weight"):
        check_checkpoint(tmp_path, model_spec)


def test_files_that_an_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    """As in the engine."""
    save_file({"a": torch.zeros(8)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_headers(tmp_path)["a"].shape == (8,)
