"""Hugging Face checkpoints: map parameters to tensors, read and export them.

Every parameter of this rank has a :class:`ParamMapping` with its description (:mod:`agent_rl.models.tensors`): the
Hugging Face tensors that it is made of, and its cut. Reading copies slices of the tensors into the parameter. Exporting
gathers the parameters of all tensor or expert ranks, copies the same slices the other way, then brings the tensors
of every pipeline stage to the ranks that receive them (:data:`Receivers`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.errors import ConfigError
from agent_rl.models.cuts import Experts, Place
from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import (
    OUTPUT,
    HfTensor,
    Parameter,
    adapted_weight,
    adapters,
    embedding_tensor,
    is_adapter,
    model_parameters,
)
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.megatron.parallel import ParallelState
from agent_rl.train.megatron.safetensors_slices import SliceReader, TensorSlice, fill_tensors


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


Receivers = Literal["rank 0", "stage leaders", "every rank"]
"""The ranks to which an export yields: rank 0 and every rank get all tensors, the first rank of each pipeline stage
those of its stage."""

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
    mappings: Iterable[ParamMapping], model_spec: ModelSpec, ranks: ParallelState, to: Receivers = "rank 0"
) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face name with its full tensor, without adapters. Collective; only the receivers yield.

    A tied output projection is exported as ``lm_head.weight``, because SGLang's Qwen3-MoE never ties and would sample
    from uniform probabilities without it.
    """
    embedding = embedding_tensor(model_spec).name
    own = [mapping for mapping in mappings if not mapping.adapter and not mapping.described.copied]
    for tensors in _full_tensors(own, ranks, to):
        yield from tensors.items()
        if model_spec.tied and embedding in tensors:
            yield OUTPUT, tensors[embedding].clone()


def export_adapters(
    mappings: Iterable[ParamMapping], ranks: ParallelState, to: Receivers = "rank 0"
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The Hugging Face name of every adapted weight, its A ``[r, in]`` and its B ``[out, r]``. Collective; only the
    receivers yield."""
    halves = _full_tensors([mapping for mapping in mappings if mapping.adapter], ranks, to)
    for first, second in zip(halves, halves, strict=True):
        shared = [a for a in first.values() for _ in range(len(second) // len(first))]
        for a, (name, b) in zip(shared, second.items(), strict=True):
            yield adapted_weight(name), a, b


def _full_tensors(local: Sequence[ParamMapping], ranks: ParallelState, to: Receivers) -> Iterator[dict[str, Tensor]]:
    """The Hugging Face tensors of each mapping, stage by stage; ``local``: those of this stage. Collective; only the
    receivers yield. For rank 0 alone, the other stages of its pipeline group send it theirs, and the other pipeline
    groups transfer nothing; to the first rank of each stage nothing is transferred between stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    own, device = ranks.pipeline_rank, local[0].parameter.device
    plan = [(mapping.described.tensors, mapping.parameter.dtype) for mapping in local]
    plans: list[Any] = [()] * ranks.pipeline_size
    plans[own] = plan
    if to != "stage leaders":
        torch.distributed.all_gather_object(plans, plan, group=group)
    for stage, entries in enumerate(plans):
        receivers = _receiving(stage, to, ranks)
        if own not in receivers and own != stage:
            continue
        moves = any(receiver != stage for receiver in receivers)
        for index, (tensors, dtype) in enumerate(entries):
            flat, full = _empty(tensors, dtype, device) if moves else (None, {})
            if stage == own:
                _assemble(local[index], ranks, full)
            if flat is not None:
                _transfer(flat, stage, own, receivers, group)
            if own in receivers:
                yield {tensor.name: full[tensor.name] for tensor in tensors}


def _receiving(stage: int, to: Receivers, ranks: ParallelState) -> range:
    """The ranks of this pipeline group that receive the tensors of a stage."""
    if to == "every rank":
        return range(ranks.pipeline_size)
    if ranks.rank not in ranks.stage_leaders:
        return range(0)
    return range(stage, stage + 1) if to == "stage leaders" else range(1)


def _empty(tensors: Sequence[HfTensor], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """Memory for ``tensors``, in one piece and by name."""
    sizes = [tensor.size for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    views = zip(tensors, flat.split(sizes), strict=True)
    return flat, {tensor.name: view.view(tensor.shape) for tensor, view in views}


def _transfer(flat: Tensor, stage: int, own: int, receivers: range, group: Any) -> None:
    """Bring ``flat`` from a stage to the pipeline ranks ``receivers``; ``own`` is one of them."""
    source = torch.distributed.get_global_rank(group, stage)
    if len(receivers) > 1:
        torch.distributed.broadcast(flat, source, group=group)
    elif own == stage:
        torch.distributed.send(flat, torch.distributed.get_global_rank(group, 0), group=group)
    else:
        torch.distributed.recv(flat, source, group=group)


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
        fill_tensors(full, replace(mapping, parameter=part).slices(owner))


def _gather(local: Tensor, group: Any) -> list[Tensor]:
    if group.size() == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(group.size())]
    torch.distributed.all_gather(parts, local, group=group)
    return parts
