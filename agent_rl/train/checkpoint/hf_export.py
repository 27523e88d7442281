"""A Hugging Face checkpoint from a training checkpoint of any parallel layout. Needs no GPU, no Megatron and no ranks.

Parameters are read one after the other, so memory holds one parameter (all experts of a layer, at most) and one file
of the result.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from agent_rl.config import RunConfig
from agent_rl.config.train import FrozenModule
from agent_rl.models.cuts import Experts, Place
from agent_rl.models.spec import ModelSpec, read_model_spec
from agent_rl.models.tensors import OUTPUT, Parameter, adapters, belongs_to, embedding_tensor, model_parameters
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.checkpoint.piece_files import FlatRange, PieceReader
from agent_rl.train.hf_writer import write_adapter, write_checkpoint
from agent_rl.train.megatron.safetensors_slices import TensorSlice, fill_tensors
from agent_rl.weight_sync.adapters import BaseWeights, merge, pack


def export_checkpoint(source: Path, config: RunConfig, out: Path, slot: str = "master") -> None:
    """Write the weights of the training checkpoint ``source`` of a run with ``config`` to the new directory ``out``, as
    the trainer exports them: in ``train.dtype``, adapters merged and also alone in ``out/adapter``. ``config.model`` is
    a local directory; it gives the other files and the tensors that are not trained. ``slot``: the weights ``master``,
    or their average ``ema``.

    The directory appears atomically. Raises ConfigError, TrainerError for a damaged checkpoint or another model's.
    """
    manifest = checkpoint.read_manifest(source)
    checkpoint.verify(source, manifest)
    spec, lora = read_model_spec(config.model), config.train.lora
    reader = checkpoint.open_pieces(source, manifest)
    if lora is None:
        weights = _trained(reader, spec, config.train.freeze or (), slot)
        write_checkpoint(weights, config.model, out, getattr(torch, manifest.dtype))
        return
    halves = list(_adapters(reader, spec, lora.rank, slot))
    changes = {name: pack(a, b, lora.scale) for name, a, b in halves}
    base = BaseWeights(config.model)
    merged = ((name, merge(base[name], change)) for name, change in changes.items())
    staged = out.with_name(f".{out.name}.staged")
    shutil.rmtree(staged, ignore_errors=True)
    write_checkpoint(merged, config.model, staged, getattr(torch, manifest.dtype))
    write_adapter(halves, config.model, staged / "adapter", lora)
    staged.rename(out)


def _trained(
    reader: PieceReader, spec: ModelSpec, freeze: Collection[FrozenModule], slot: str
) -> Iterator[tuple[str, Tensor]]:
    """The trained tensors in the order of an export. A tied output layer is written under its own name too, as the
    trainer does."""
    embedding = embedding_tensor(spec).name
    for _, parameter in model_parameters(spec):
        if parameter.frozen or parameter.copied or belongs_to(parameter.name, freeze):
            continue
        tensors = _tensors(reader, parameter, spec, slot)
        yield from tensors.items()
        if spec.tied and embedding in tensors:
            yield OUTPUT, tensors[embedding].clone()


def _adapters(reader: PieceReader, spec: ModelSpec, rank: int, slot: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every adapted weight's name, its A and its B."""
    for _, parameter in model_parameters(spec):
        if not parameter.adapted:
            continue
        first, second = (_tensors(reader, half, spec, slot) for half in adapters(parameter, rank))
        shared = [a for a in first.values() for _ in range(len(second) // len(first))]
        names = [tensor.name for tensor in parameter.tensors]
        yield from zip(names, shared, second.values(), strict=True)


def _tensors(reader: PieceReader, parameter: Parameter, spec: ModelSpec, slot: str) -> dict[str, Tensor]:
    """The Hugging Face tensors of a parameter."""
    place = Place(experts=tuple(range(spec.num_experts)))
    shape = _full_shape(parameter)
    shards = parameter.cut.shards(parameter.tensors, shape, place)
    read = [torch.from_numpy(reader.read(FlatRange(each, 0, math.prod(each.shape)), slot)) for each in shards]
    value = torch.cat(read).view(shape)
    full: dict[str, Tensor] = {}
    pieces = parameter.cut.pieces(parameter.tensors, place)
    fill_tensors(full, (TensorSlice.of(piece, value) for piece in pieces))
    return {tensor.name: full[tensor.name] for tensor in parameter.tensors}


def _full_shape(parameter: Parameter) -> tuple[int, ...]:
    """The shape of the parameter on a single rank."""
    cut, first = parameter.cut, parameter.tensors[0]
    rows = sum(tensor.shape[0] for tensor in parameter.tensors)
    if not isinstance(cut, Experts):
        return (rows, *first.shape[1:])
    if not cut.stacked:
        return (cut.count, rows // cut.count, *first.shape[1:])
    count, *rest = first.shape
    return (count, *(reversed(rest) if cut.transposed else rest))
