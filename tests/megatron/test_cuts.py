"""Every kind of cut: what each rank gets of the Hugging Face tensors, and that all ranks give the tensors back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from agent_rl.models.cuts import Columns, Cut, Experts, HfTensor, Place, Replicated, Rows
from agent_rl.models.tensors import Parameter, adapters
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.megatron.safetensors_slices import SliceReader, TensorSlice

pytestmark = pytest.mark.megatron
EXPERTS, GROUPS = 4, 4


@dataclass(frozen=True)
class Case:
    """``expected``: a rank's parameter, from the full tensors."""

    cut: Cut
    shapes: tuple[tuple[int, ...], ...]
    expected: Callable[[Sequence[Tensor], Place], Tensor]


def rows(parts: Sequence[Tensor], place: Place) -> Tensor:
    return torch.cat([part.chunk(place.tensor_size)[place.tensor_rank] for part in parts])


def by_group(parts: Sequence[Tensor], place: Place) -> Tensor:
    grouped = torch.cat([part.unflatten(0, (GROUPS, -1)) for part in parts], dim=1)
    return grouped.chunk(place.tensor_size)[place.tensor_rank].flatten(0, 1)


def per_expert(parts: Sequence[Tensor], place: Place) -> Tensor:
    each = len(parts) // EXPERTS
    return torch.stack([torch.cat(tuple(parts[expert * each : (expert + 1) * each])) for expert in place.experts])


def alternating(parts: Sequence[Tensor], place: Place) -> Tensor:
    """Gate over up, out of a last axis on which they alternate."""
    (stack,) = parts
    gate, up = stack[..., ::2], stack[..., 1::2]
    whole = torch.cat((gate, up), dim=-1)
    return torch.stack([whole[expert].mT if whole.ndim == 3 else whole[expert] for expert in place.experts])


CASES = {
    "replicated": Case(Replicated(), ((6, 4),), lambda parts, _: parts[0]),
    "rows": Case(Rows(), ((8, 3),), rows),
    "row vector": Case(Rows(), ((8,),), rows),
    "columns": Case(Columns(), ((3, 8),), lambda parts, place: parts[0].chunk(place.tensor_size, 1)[place.tensor_rank]),
    "gate over up": Case(Rows(), ((8, 3), (8, 3)), rows),
    "query, key, value": Case(Rows(groups=GROUPS), ((24, 5), (8, 5), (8, 5)), by_group),
    "query with gate": Case(Rows(groups=GROUPS), ((48, 5), (8, 5), (8, 5)), by_group),
    "biases": Case(Rows(groups=GROUPS), ((24,), (8,), (8,)), by_group),
    "parts of a tensor": Case(
        Rows(parts=(4, 4, 12)), ((20, 3),), lambda parts, place: rows(parts[0].split((4, 4, 12)), place)
    ),
    "a convolution's parts": Case(
        Rows(parts=(4, 4, 12)), ((20, 1, 4),), lambda parts, place: rows(parts[0].split((4, 4, 12)), place)
    ),
    "experts' gate over up": Case(Experts(EXPERTS), ((6, 5),) * 2 * EXPERTS, per_expert),
    "experts' down": Case(Experts(EXPERTS), ((5, 6),) * EXPERTS, per_expert),
    "stack": Case(
        Experts(EXPERTS, stacked=True), ((EXPERTS, 6, 5),), lambda parts, place: parts[0][list(place.experts)]
    ),
    "transposed stack": Case(
        Experts(EXPERTS, stacked=True, transposed=True),
        ((EXPERTS, 6, 5),),
        lambda parts, place: parts[0][list(place.experts)].mT,
    ),
    "alternating stack": Case(
        Experts(EXPERTS, stacked=True, interleaved=True, transposed=True), ((EXPERTS, 5, 12),), alternating
    ),
    "alternating biases": Case(Experts(EXPERTS, stacked=True, interleaved=True), ((EXPERTS, 12),), alternating),
}


def tensors_of(case: Case) -> tuple[list[HfTensor], dict[str, Tensor]]:
    """The tensors, and numbers that all differ."""
    described = [HfTensor(f"t{index}", shape) for index, shape in enumerate(case.shapes)]
    values = torch.arange(sum(tensor.size for tensor in described), dtype=torch.float32)
    parts = values.split([tensor.size for tensor in described])
    return described, {each.name: part.view(each.shape) for each, part in zip(described, parts, strict=True)}


def places(cut: Cut, count: int, order: Sequence[int]) -> list[Place]:
    """The ranks that share a parameter."""
    each = EXPERTS // count
    if cut.ranks == "expert":
        return [Place(0, 1, tuple(order[rank * each : (rank + 1) * each])) for rank in range(count)]
    return [Place(rank, count) for rank in range(count if cut.ranks else 1)]


def slices(case: Case, described: Sequence[HfTensor], place: Place, parameter: Tensor) -> Iterator[TensorSlice]:
    return (TensorSlice.of(piece, parameter) for piece in case.cut.pieces(described, place))


layouts = {
    "case": st.sampled_from(list(CASES)),
    "count": st.sampled_from([1, 2, 4]),
    "order": st.permutations(range(EXPERTS)),
}


@given(**layouts)
def test_ranks_load_their_part_and_give_the_tensors_back(case: str, count: int, order: list[int]) -> None:
    one = CASES[case]
    described, full = tensors_of(one)
    again = {name: torch.full_like(tensor, torch.nan) for name, tensor in full.items()}
    for place in places(one.cut, count, order):
        expected = one.expected(list(full.values()), place)
        parameter = torch.full_like(expected, torch.nan, memory_format=torch.contiguous_format)
        for each in slices(one, described, place, parameter):
            assert each.region(again[each.name]).isnan().all(), "no two ranks have the same part"
            each.target.copy_(each.region(full[each.name]))
            each.region(again[each.name]).copy_(each.target)
        assert torch.equal(parameter, expected)
        assert expected.numel() == Parameter("p", tuple(described), one.cut).rank_size(count, count)
    assert all(torch.equal(again[name], full[name]) for name in full)


@pytest.mark.parametrize("name", CASES)
def test_every_cut_is_read_from_a_file(name: str, tmp_path: Path) -> None:
    one = CASES[name]
    described, full = tensors_of(one)
    save_file(full, tmp_path / "model.safetensors")
    with SliceReader(tmp_path) as reader:
        for place in places(one.cut, 2, (2, 0, 3, 1)):
            expected, progress = one.expected(list(full.values()), place), LoadProgress()
            parameter = torch.full_like(expected, torch.nan, memory_format=torch.contiguous_format)
            for each in slices(one, described, place, parameter):
                reader.check(each)
                reader.fill(each, progress)
            assert torch.equal(parameter, expected)
            assert progress.read == expected.nbytes, "each byte is read once"


def named_shards(one: Case, count: int, order: Sequence[int]) -> dict[str, Tensor]:
    """The arrays of a checkpoint of training, put together from the shards of all ranks."""
    described, full = tensors_of(one)
    found: dict[str, dict[tuple[int, int], Tensor]] = {}
    axes: dict[str, int] = {}
    for place in places(one.cut, count, order):
        parameter = one.expected(list(full.values()), place).contiguous()
        shards = list(one.cut.shards(described, tuple(parameter.shape), place))
        parts = parameter.flatten().split([math.prod(shard.shape) for shard in shards])
        for shard, part in zip(shards, parts, strict=True):
            found.setdefault(shard.name, {})[shard.index, shard.count] = part.view(shard.shape)
            axes[shard.name] = shard.axis
    return {
        name: torch.cat([parts[key] for key in sorted(parts, key=lambda key: key[0] / key[1])], dim=axes[name])
        for name, parts in found.items()
    }


@given(**layouts)
def test_shards_of_every_layout_make_the_same_arrays(case: str, count: int, order: list[int]) -> None:
    one = CASES[case]
    expected, found = named_shards(one, 1, range(EXPERTS)), named_shards(one, count, order)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_adapters_are_named_after_their_weights() -> None:
    described = tuple(HfTensor(f"layer.{part}_proj.weight", (rows, 6)) for part, rows in (("q", 8), ("k", 4), ("v", 4)))
    a, b = adapters(Parameter("attention.linear_qkv.weight", described, Rows(groups=4), adapted=True), rank=2)
    assert a == Parameter("attention.linear_qkv.lora.weight.a", (HfTensor("layer.q_proj.lora_A", (2, 6)),))
    assert (b.name, b.cut) == ("attention.linear_qkv.lora.weight.b", Rows(groups=4))
    assert [tensor.shape for tensor in b.tensors] == [(8, 2), (4, 2), (4, 2)]
    experts = tuple(HfTensor(f"layer.{e}.{part}.weight", (4, 6)) for e in range(EXPERTS) for part in ("gate", "up"))
    a, _ = adapters(Parameter("mlp.experts.weight1", experts, Experts(EXPERTS), adapted=True), rank=2)
    assert [tensor.name for tensor in a.tensors] == [f"layer.{expert}.gate.lora_A" for expert in range(EXPERTS)]
