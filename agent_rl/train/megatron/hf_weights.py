"""Hugging Face checkpoints: map parameters to tensors, read, export and write them.

Every parameter of this rank has a :class:`ParamMapping` with its description (:mod:`agent_rl.models.tensors`): the
Hugging Face tensors that it is made of, and its cut. Reading copies slices of the tensors into the parameter. Exporting
gathers the parameters of all tensor or expert ranks, copies the same slices the other way, then broadcasts the tensors
of every pipeline stage.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.errors import ConfigError
from agent_rl.models.cuts import Experts, Place
from agent_rl.models.families import keeps_float32
from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import (
    OUTPUT,
    Parameter,
    adapted_weight,
    adapters,
    embedding_tensor,
    is_adapter,
    model_parameters,
)
from agent_rl.train.hf_index import LoadProgress, read_headers
from agent_rl.train.megatron.parallel import ParallelState
from agent_rl.train.megatron.safetensors_slices import SliceReader, TensorSlice

_SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, eq=False)
class ParamMapping:
    """This rank's part ``parameter`` of the parameter that ``described`` describes.

    ``expert_order``, for stacked experts: the expert at each position over all expert ranks, rank after rank.
    """

    parameter: Tensor
    described: Parameter
    expert_order: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors, of all ranks and experts."""
        return tuple(tensor.name for tensor in self.described.tensors)

    @property
    def adapter(self) -> bool:
        """Whether it is half of a :class:`~agent_rl.train.megatron.lora.LoraPair`."""
        return is_adapter(self.described.tensors[0].name)

    def place(self, ranks: ParallelState) -> Place:
        """The rank among those that share the parameter."""
        experts = own_experts(self, ranks) if self.expert_order else ()
        return Place(ranks.tensor_rank, ranks.tensor_size, experts)

    def slices(self, ranks: ParallelState) -> Iterator[TensorSlice]:
        """The slices of Hugging Face tensors that a rank has, each with its view of the parameter."""
        parameter = self.parameter.detach()
        for piece in self.described.cut.pieces(self.described.tensors, self.place(ranks)):
            yield TensorSlice.of(piece, parameter)


ExpertOrder = Mapping[int, Sequence[int]]
"""By layer (from 0): the expert at each position over the expert ranks. Layers that are absent have experts in
order."""


def param_mappings(
    models: Sequence[Any], model_spec: ModelSpec, expert_order: ExpertOrder, lora: LoraConfig | None = None
) -> Iterator[ParamMapping]:
    """The mappings of this rank's GPT model chunks (not DDP-wrapped), in the order of an export. A tied output copy has
    the embedding's tensor. Raises ConfigError for a parameter without a description, and for a layer without one that
    is described."""
    for model in models:
        weights = dict(_named_weights(model))
        layers = {layer.layer_number - 1: local for local, layer in enumerate(model.decoder.layers)}
        for layer, described in model_parameters(model_spec, tuple(layers)):
            prefix = "" if layer is None else f"decoder.layers.{layers[layer]}."
            order = tuple(expert_order.get(layer, range(model_spec.num_experts))) if layer is not None else ()
            for each in (described, *(adapters(described, lora.rank) if lora and described.adapted else ())):
                weight = weights.pop(prefix + each.name, None)
                if weight is not None:
                    yield ParamMapping(weight, each, order if isinstance(each.cut, Experts) else ())
                elif layer is not None:
                    raise ConfigError(f"the model has no parameter {prefix}{each.name}")
        if weights:
            raise ConfigError(f"parameter {min(weights)} has no Hugging Face name")


_FROZEN = re.compile(r"\.router\.expert_bias$|\.indexer\.")


def _named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and the correction biases of routers and the weights of indexers, which are buffers: no gradient
    reaches them."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if _FROZEN.search(name))


@torch.no_grad()
def load_weights(
    mappings: Iterable[ParamMapping], directory: Path, ranks: ParallelState, progress: LoadProgress
) -> None:
    """Fill this rank's parameters, but adapters, from the safetensors in ``directory``; ``progress`` counts the bytes.

    Raises ConfigError for a tensor that is missing or has another shape, before it reads any.
    """
    with SliceReader(directory) as reader:
        slices = [each for mapping in mappings if not mapping.adapter for each in mapping.slices(ranks)]
        for each in slices:
            reader.check(each)
        progress.needed += sum(reader.nbytes(each) for each in slices)
        for each in sorted(slices, key=reader.position):
            reader.fill(each, progress)


def own_experts(mapping: ParamMapping, ranks: ParallelState) -> tuple[int, ...]:
    """This rank's experts of a stacked parameter, in its order."""
    size = len(mapping.expert_order) // ranks.expert_size
    return mapping.expert_order[ranks.expert_rank * size : (ranks.expert_rank + 1) * size]


def export_weights(
    mappings: Iterable[ParamMapping], model_spec: ModelSpec, ranks: ParallelState
) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face name with its full tensor, without adapters. Collective; only rank 0 yields.

    A tied output projection is exported as ``lm_head.weight``, because SGLang's Qwen3-MoE never ties and would sample
    from uniform probabilities without it.
    """
    embedding = embedding_tensor(model_spec).name
    own = [mapping for mapping in mappings if not mapping.adapter and not mapping.described.copied]
    for tensors in _full_tensors(own, ranks):
        yield from tensors.items()
        if model_spec.tied and embedding in tensors:
            yield OUTPUT, tensors[embedding].clone()


def export_adapters(mappings: Iterable[ParamMapping], ranks: ParallelState) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The Hugging Face name of every adapted weight, its A ``[r, in]`` and its B ``[out, r]``. Collective; only rank 0
    yields."""
    halves = _full_tensors([mapping for mapping in mappings if mapping.adapter], ranks)
    for first, second in zip(halves, halves, strict=True):
        shared = [a for a in first.values() for _ in range(len(second) // len(first))]
        for a, (name, b) in zip(shared, second.items(), strict=True):
            yield adapted_weight(name), a, b


def _full_tensors(local: Sequence[ParamMapping], ranks: ParallelState) -> Iterator[dict[str, Tensor]]:
    """The Hugging Face tensors of each mapping of every stage; ``local``: those of this stage. Collective; only rank 0
    yields."""
    group = parallel_state.get_pipeline_model_parallel_group()
    plans: list[Any] = [None] * ranks.pipeline_size
    plan = [(mapping.described.tensors, mapping.parameter.dtype) for mapping in local]
    torch.distributed.all_gather_object(plans, plan, group=group)
    for stage, entries in enumerate(plans):
        for index, (tensors, dtype) in enumerate(entries):
            full: dict[str, Tensor] = {}
            if ranks.pipeline_size > 1:
                sizes = [tensor.size for tensor in tensors]
                flat = torch.empty(sum(sizes), dtype=dtype, device=local[0].parameter.device)
                views = zip(tensors, flat.split(sizes), strict=True)
                full = {tensor.name: view.view(tensor.shape) for tensor, view in views}
            if stage == ranks.pipeline_rank:
                _assemble(local[index], ranks, full)
            if ranks.pipeline_size > 1:
                torch.distributed.broadcast(flat, torch.distributed.get_global_rank(group, stage), group=group)
            if ranks.rank == 0:
                yield {tensor.name: full[tensor.name] for tensor in tensors}


@torch.no_grad()
def _assemble(mapping: ParamMapping, ranks: ParallelState, full: dict[str, Tensor]) -> None:
    """Fill the Hugging Face tensors ``full`` with the slices of all ranks that share the parameter; make those that
    ``full`` lacks, without a copy where a slice is a full tensor. Collective."""
    kind, parts = mapping.described.cut.ranks, [mapping.parameter.detach().contiguous()]
    if kind == "tensor":
        parts = _gather(parts[0], parallel_state.get_tensor_model_parallel_group())
    elif kind == "expert":
        parts = _gather(parts[0], parallel_state.get_expert_model_parallel_group())
    for rank, part in enumerate(parts):
        owner = replace(ranks, **{f"{kind}_rank": rank}) if kind else ranks
        for each in replace(mapping, parameter=part).slices(owner):
            if each.name not in full:
                if each.target.shape == each.full_shape:
                    full[each.name] = each.target
                    continue
                full[each.name] = part.new_empty(each.full_shape)
            each.region(full[each.name]).copy_(each.target)


def _gather(local: Tensor, group: Any) -> list[Tensor]:
    if group.size() == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(group.size())]
    torch.distributed.all_gather(parts, local, group=group)
    return parts


def write_checkpoint(weights: Iterable[tuple[str, Tensor]], source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write ``weights`` as safetensors, with copies of the other files and of the other tensors of ``source`` (a vision
    tower, layers that predict further tokens). The directory appears atomically."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".pt"):
            shutil.copy2(file, partial / file.name)
    _write_shards(_completed(weights, source, dtype), partial)
    if directory.exists():
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(directory, old)
        os.rename(partial, directory)
        shutil.rmtree(old)
    else:
        os.rename(partial, directory)


def write_adapter(deltas: Sequence[tuple[str, Tensor, Tensor]], base: Path, directory: Path, lora: LoraConfig) -> None:
    """Write the result of :func:`export_adapters` in PEFT's format, with ``base`` as the base model."""
    tensors: dict[str, Tensor] = {}
    for name, a, b in deltas:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": _stored(a), f"{module}.lora_B.weight": _stored(b)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.rsplit(".", 2)[1] for name, _, _ in deltas}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", copy=True).contiguous()


def _completed(weights: Iterable[tuple[str, Tensor]], source: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """``weights`` on the CPU in the dtype of the checkpoint, then the other tensors of ``source`` as they are."""
    names = set()
    for name, tensor in weights:
        names.add(name)
        kept = torch.float32 if keeps_float32(name) else dtype
        yield name, tensor.to(device="cpu", dtype=kept, copy=True).contiguous()
    for name, entry in read_headers(source).items():
        if name not in names:
            with safe_open(entry.file, "pt") as file:
                yield name, file.get_tensor(name)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(pending, directory / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        pending[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        if size >= _SHARD_BYTES:
            flush()
            size = 0
    if pending:
        flush()
    _name_shards(directory, shards, total)


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        os.rename(directory / "part-0.safetensors", directory / "model.safetensors")
        return
    index: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.rename(directory / f"part-{number}.safetensors", directory / file)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (directory / "model.safetensors.index.json").write_text(text)
