"""Hugging Face checkpoints: which tensor is which parameter, reading, exporting, writing.

Every parameter of this rank is a :class:`Slot`: the Hugging Face names it is made of and how it is cut. Reading takes
the cut out of the full tensors; exporting gathers the cuts over tensor or expert ranks, then passes the tensors of
every pipeline stage on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file
from torch import Tensor

from agent_rl.config import LoraConfig
from agent_rl.errors import ConfigError
from agent_rl.models.spec import ModelSpec
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.megatron.parallel import Ranks
from agent_rl.train.megatron.safetensors_slices import Piece, SliceReader

_SHARD_BYTES = 4 << 30
_HALVES = (".lora_A", ".lora_B")


EMBEDDING = "model.embed_tokens.weight"


class Cut(Enum):
    """How a parameter is made of Hugging Face tensors and cut over ranks."""

    WHOLE = "the same on every tensor rank"
    ROWS = "cut along axis 0 over tensor ranks"
    COLUMNS = "cut along axis 1 over tensor ranks"
    QKV = "query, key and value interleaved by key-value group, cut along axis 0"
    GATE_UP = "gate over up, each cut along axis 0"
    EXPERTS_GATE_UP = "stacked over this rank's experts, gate over up"
    EXPERTS_DOWN = "stacked over this rank's experts"


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A parameter and the Hugging Face names of what it holds (of all experts, on every expert rank).

    ``home``, where it is stacked over experts: the expert in each place over all expert ranks, one after the other.
    """

    parameter: Tensor
    names: tuple[str, ...]
    cut: Cut
    home: tuple[int, ...] = ()

    @property
    def adapter(self) -> bool:
        """Whether it is half of a :class:`~agent_rl.train.megatron.lora.Pair`: its names end in ``.lora_A`` or
        ``.lora_B`` where those of the weight have ``.weight``."""
        return self.names[0].endswith(_HALVES)


Homes = Mapping[int, Sequence[int]]
"""By layer (from 0) the expert in each place over the expert ranks; a layer that is not there has them in order."""


def slots(models: Sequence[Any], facts: ModelSpec, homes: Homes) -> Iterator[Slot]:
    """The slots of this rank's (bare) GPT model chunks. A tied output copy has the embedding's name."""
    for model, name, parameter in ((m, *named) for m in models for named in m.named_parameters()):
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            layer = model.decoder.layers[int(local)].layer_number - 1
            names, cut = _layer_slot(rest, facts)
            stacked = cut in (Cut.EXPERTS_GATE_UP, Cut.EXPERTS_DOWN)
            home = tuple(homes.get(layer, range(facts.num_experts))) if stacked else ()
            yield Slot(parameter, tuple(f"model.layers.{layer}.{part}" for part in names), cut, home)
        elif name == "decoder.final_layernorm.weight":
            yield Slot(parameter, ("model.norm.weight",), Cut.WHOLE)
        elif name == "output_layer.weight" and not facts.tied:
            yield Slot(parameter, ("lm_head.weight",), Cut.ROWS)
        elif name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            yield Slot(parameter, (EMBEDDING,), Cut.ROWS)
        else:
            raise ConfigError(f"parameter {name} has no Hugging Face name")


_LAYER_SLOTS: dict[str, tuple[tuple[str, ...], Cut]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), Cut.WHOLE),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Cut.WHOLE),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), Cut.WHOLE),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), Cut.WHOLE),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), Cut.QKV),
    "self_attention.linear_qkv.bias": (tuple(f"self_attn.{part}_proj.bias" for part in "qkv"), Cut.QKV),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), Cut.COLUMNS),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), Cut.GATE_UP),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), Cut.COLUMNS),
    "mlp.shared_experts.linear_fc1.weight": (
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        Cut.GATE_UP,
    ),
    "mlp.shared_experts.linear_fc2.weight": (("mlp.shared_expert.down_proj.weight",), Cut.COLUMNS),
    "mlp.shared_experts.gate_weight": (("mlp.shared_expert_gate.weight",), Cut.WHOLE),
}


def _layer_slot(name: str, facts: ModelSpec) -> tuple[tuple[str, ...], Cut]:
    if ".lora." in name:
        module, _, half = name.partition(".lora.")
        return _adapter_slot(half.endswith(".a"), *_layer_slot(f"{module}.{half[:-2]}", facts))
    family, experts = facts.family, range(facts.num_experts)
    gate, up, down = family.expert_parts
    if name == "mlp.router.weight":
        return (family.router,), Cut.WHOLE
    if name == "mlp.experts.weight1":
        names = tuple(f"{family.expert.format(e)}.{part}.weight" for e in experts for part in (gate, up))
        return names, Cut.EXPERTS_GATE_UP
    if name == "mlp.experts.weight2":
        return tuple(f"{family.expert.format(e)}.{down}.weight" for e in experts), Cut.EXPERTS_DOWN
    if name not in _LAYER_SLOTS:
        raise ConfigError(f"layer parameter {name} has no Hugging Face name")
    return _LAYER_SLOTS[name]


def _adapter_slot(first: bool, names: tuple[str, ...], cut: Cut) -> tuple[tuple[str, ...], Cut]:
    """B is cut as its weight is, and A, which all parts of a fused weight share, is named after the first."""
    tag = _HALVES[not first]
    names = tuple(name.removesuffix(".weight") + tag for name in names)
    if not first:
        return names, cut
    if cut in (Cut.EXPERTS_GATE_UP, Cut.EXPERTS_DOWN):
        return names[:: 2 if cut is Cut.EXPERTS_GATE_UP else 1], Cut.EXPERTS_DOWN
    return names[:1], Cut.WHOLE


@torch.no_grad()
def load_weights(
    models: Sequence[Any], facts: ModelSpec, directory: Path, ranks: Ranks, homes: Homes, progress: LoadProgress
) -> None:
    """Fill this rank's parameters from the safetensors in ``directory``; ``progress`` grows meanwhile.

    Raises ConfigError naming a tensor that is missing or has another shape, before anything is read.
    """
    with SliceReader(directory) as reader:
        weights = (slot for slot in slots(models, facts, homes) if not slot.adapter)
        pieces = [piece for slot in weights for piece in pieces_of(slot, facts, ranks)]
        for piece in pieces:
            reader.check(piece)
        progress.needed += sum(reader.nbytes(piece) for piece in pieces)
        for piece in sorted(pieces, key=reader.place):
            reader.fill(piece, progress)


def pieces_of(slot: Slot, facts: ModelSpec, ranks: Ranks) -> Iterator[Piece]:
    """What this rank reads of the Hugging Face tensors of a slot, each with its place in the slot's parameter."""
    parameter, names, cut = slot.parameter.detach(), slot.names, (ranks.tensor_rank, ranks.tensor_size)
    match slot.cut:
        case Cut.WHOLE:
            yield Piece.share(names[0], parameter)
        case Cut.ROWS:
            yield Piece.share(names[0], parameter, 0, *cut)
        case Cut.COLUMNS:
            yield Piece.share(names[0], parameter, 1, *cut)
        case Cut.GATE_UP:
            yield from (Piece.share(name, half, 0, *cut) for name, half in zip(names, parameter.chunk(2), strict=True))
        case Cut.QKV:
            yield from _qkv_pieces(names, parameter, facts, ranks)
        case Cut.EXPERTS_GATE_UP:
            for expert, weight in zip(own_experts(slot, ranks), parameter, strict=True):
                gate, up = weight.chunk(2)
                yield Piece.share(names[2 * expert], gate)
                yield Piece.share(names[2 * expert + 1], up)
        case Cut.EXPERTS_DOWN:
            for expert, weight in zip(own_experts(slot, ranks), parameter, strict=True):
                yield Piece.share(names[expert], weight)


def _qkv_pieces(names: tuple[str, ...], parameter: Tensor, facts: ModelSpec, ranks: Ranks) -> Iterator[Piece]:
    """Of each of this rank's key-value groups its queries, its key and its value."""
    groups = facts.kv_heads // ranks.tensor_size
    widths = _group_widths(facts)
    for number, group in enumerate(parameter.unflatten(0, (groups, -1)), ranks.tensor_rank * groups):
        for name, part, width in zip(names, group.split(widths), widths, strict=True):
            yield Piece(name, part, 0, number * width, facts.kv_heads * width)


def _group_widths(facts: ModelSpec) -> list[int]:
    """Rows of the queries, the key and the value of a key-value group."""
    return [width * facts.head_dim for width in (facts.heads // facts.kv_heads, 1, 1)]


def own_experts(slot: Slot, ranks: Ranks) -> tuple[int, ...]:
    """The experts that this rank has of a parameter that is stacked over experts, in its order."""
    size = len(slot.home) // ranks.expert_size
    return slot.home[ranks.expert_rank * size : (ranks.expert_rank + 1) * size]


def export_weights(models: Sequence[Any], facts: ModelSpec, ranks: Ranks, homes: Homes) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face name with its full tensor, without adapters. Collective; tensors are yielded on rank 0 alone.

    A tied output projection is written out as ``lm_head.weight``: SGLang's Qwen3-MoE never ties, and without it would
    answer with uniform probabilities.
    """
    mine = [s for s in slots(models, facts, homes) if not s.adapter and not _is_tied_copy(s, ranks)]
    for names, full in _full_slots(mine, ranks):
        yield from zip(names, _split(names, full, facts), strict=True)
        if facts.tied and names == (EMBEDDING,):
            yield "lm_head.weight", full.clone()


def export_adapters(
    models: Sequence[Any], facts: ModelSpec, ranks: Ranks, homes: Homes
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The Hugging Face name of every weight that has an adapter, its A ``[r, in]`` and its B ``[out, r]``. Collective;
    tensors are yielded on rank 0 alone."""
    halves = _full_slots([slot for slot in slots(models, facts, homes) if slot.adapter], ranks)
    for (_, a), (names, b) in zip(halves, halves, strict=True):
        parts = _split(names, b, facts)
        each = a if a.ndim == 3 else a[None]
        shared = [own for own in each for _ in range(len(names) // len(each))]
        yield from zip((name.removesuffix(_HALVES[1]) + ".weight" for name in names), shared, parts, strict=True)


def _full_slots(mine: Sequence[Slot], ranks: Ranks) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The names and the full tensor of each slot of every stage, of which ``mine`` are this one's. Collective; yields
    on rank 0 alone."""
    group = parallel_state.get_pipeline_model_parallel_group()
    plans: list[Any] = [None] * ranks.pipeline_size
    plan = [(slot.names, _full_shape(slot, ranks), slot.parameter.dtype) for slot in mine]
    torch.distributed.all_gather_object(plans, plan, group=group)
    for stage, entries in enumerate(plans):
        for index, (names, full_shape, dtype) in enumerate(entries):
            if stage == ranks.pipeline_rank:
                full = _to_full(mine[index], ranks)
            else:
                full = torch.empty(full_shape, dtype=dtype, device=mine[0].parameter.device)
            if ranks.pipeline_size > 1:
                torch.distributed.broadcast(full, torch.distributed.get_global_rank(group, stage), group=group)
            if ranks.rank == 0:
                yield names, full


def _is_tied_copy(slot: Slot, ranks: Ranks) -> bool:
    return slot.names == (EMBEDDING,) and ranks.pipeline_rank > 0


def _full_shape(slot: Slot, ranks: Ranks) -> tuple[int, ...]:
    sizes = list(slot.parameter.shape)
    if slot.cut in (Cut.EXPERTS_GATE_UP, Cut.EXPERTS_DOWN):
        sizes[0] *= ranks.expert_size
    elif slot.cut is Cut.COLUMNS:
        sizes[1] *= ranks.tensor_size
    elif slot.cut is not Cut.WHOLE:
        sizes[0] *= ranks.tensor_size
    return tuple(sizes)


@torch.no_grad()
def _to_full(slot: Slot, ranks: Ranks) -> Tensor:
    """The parameter with the cuts of all tensor or expert ranks put together, in Megatron's arrangement; experts by
    their number."""
    local = slot.parameter.detach().contiguous()
    if slot.cut in (Cut.EXPERTS_GATE_UP, Cut.EXPERTS_DOWN):
        full = torch.cat(_gather(local, parallel_state.get_expert_model_parallel_group()))
        if slot.home == tuple(range(len(full))):
            return full
        return full[torch.tensor(slot.home, device=full.device).argsort()]
    if slot.cut is Cut.WHOLE:
        return local
    parts = _gather(local, parallel_state.get_tensor_model_parallel_group())
    if slot.cut is Cut.COLUMNS:
        return torch.cat(parts, dim=1).contiguous()
    if slot.cut is Cut.GATE_UP:
        return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
    return torch.cat(parts)


def _gather(local: Tensor, group: Any) -> list[Tensor]:
    if group.size() == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(group.size())]
    torch.distributed.all_gather(parts, local, group=group)
    return parts


def _split(names: tuple[str, ...], full: Tensor, facts: ModelSpec) -> Iterable[Tensor]:
    """The Hugging Face tensors, in the order of ``names``, out of a full parameter."""
    parts = [name.rsplit(".", 2)[1] for name in names[:3]]
    if parts == ["q_proj", "k_proj", "v_proj"]:
        groups = facts.kv_heads
        return [part.flatten(0, 1) for part in full.unflatten(0, (groups, -1)).split(_group_widths(facts), dim=1)]
    if full.ndim == 3:
        return [piece for expert in full for piece in expert.chunk(len(names) // len(full))]
    return full.chunk(len(names))


def write_checkpoint(weights: Iterable[tuple[str, Tensor]], source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write ``weights`` as safetensors beside the other files of ``source``; the directory appears whole or not at
    all."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name and file.suffix not in (".bin", ".pt"):
            shutil.copy2(file, partial / file.name)
    _write_shards(weights, partial, dtype)
    if directory.exists():
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(directory, old)
        os.rename(partial, directory)
        shutil.rmtree(old)
    else:
        os.rename(partial, directory)


def write_adapter(
    adapters: Sequence[tuple[str, Tensor, Tensor]], base: Path, directory: Path, lora: LoraConfig
) -> None:
    """Write what :func:`export_adapters` gives in PEFT's format, beside the name of the checkpoint ``base``."""
    tensors: dict[str, Tensor] = {}
    for name, a, b in adapters:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": _stored(a), f"{module}.lora_B.weight": _stored(b)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.rsplit(".", 2)[1] for name, _, _ in adapters}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", copy=True).contiguous()


def _write_shards(weights: Iterable[tuple[str, Tensor]], directory: Path, dtype: torch.dtype) -> None:
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(held, directory / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in weights:
        held[name] = tensor.to(device="cpu", dtype=dtype, copy=True).contiguous()
        size += held[name].nbytes
        total += held[name].nbytes
        if size >= _SHARD_BYTES:
            flush()
            size = 0
    if held:
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
