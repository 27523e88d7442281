"""Hugging Face checkpoints: map parameters to tensors, read, export and write them.

Every parameter of this rank has a :class:`ParamMapping`: the Hugging Face tensors that it is made of, and how it is
sharded. Reading takes the shard out of the full tensors. Exporting gathers the shards over tensor or expert ranks, then
broadcasts the tensors of every pipeline stage.
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
from agent_rl.models.families import keeps_float32
from agent_rl.models.spec import ModelSpec
from agent_rl.train.hf_index import LoadProgress
from agent_rl.train.megatron.parallel import ParallelState
from agent_rl.train.megatron.safetensors_slices import SliceReader, TensorSlice

_SHARD_BYTES = 4 << 30
_HALVES = (".lora_A", ".lora_B")


EMBEDDING = "model.embed_tokens.weight"


class Sharding(Enum):
    """How a parameter is composed of Hugging Face tensors and sharded over ranks."""

    REPLICATED = "the same on every tensor rank"
    ROWS = "sharded along axis 0 over tensor ranks"
    COLUMNS = "sharded along axis 1 over tensor ranks"
    QKV = "query, key and value interleaved by key-value group, sharded along axis 0"
    GATE_UP = "gate over up, each sharded along axis 0"
    EXPERTS_GATE_UP = "stacked over this rank's experts, gate over up"
    EXPERTS_DOWN = "stacked over this rank's experts"


@dataclass(frozen=True, slots=True, eq=False)
class ParamMapping:
    """A parameter and the Hugging Face names of its tensors (of all experts, on every expert rank).

    ``expert_order``, for stacked experts: the expert at each position over all expert ranks, rank after rank.
    """

    parameter: Tensor
    names: tuple[str, ...]
    sharding: Sharding
    expert_order: tuple[int, ...] = ()

    @property
    def adapter(self) -> bool:
        """Whether it belongs to a :class:`~agent_rl.train.megatron.lora.LoraPair`: its names end in ``.lora_A`` or
        ``.lora_B`` instead of ``.weight``."""
        return self.names[0].endswith(_HALVES)


ExpertOrder = Mapping[int, Sequence[int]]
"""By layer (from 0): the expert at each position over the expert ranks. Layers that are absent have experts in
order."""


def param_mappings(models: Sequence[Any], model_spec: ModelSpec, expert_order: ExpertOrder) -> Iterator[ParamMapping]:
    """The mappings of this rank's GPT model chunks (not DDP-wrapped). A tied output copy has the embedding's name."""
    for model, name, parameter in ((m, *named) for m in models for named in _named_weights(m)):
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            layer = model.decoder.layers[int(local)].layer_number - 1
            names, sharding = _layer_tensors(rest, model_spec)
            stacked = sharding in (Sharding.EXPERTS_GATE_UP, Sharding.EXPERTS_DOWN)
            order = tuple(expert_order.get(layer, range(model_spec.num_experts))) if stacked else ()
            yield ParamMapping(parameter, tuple(f"model.layers.{layer}.{part}" for part in names), sharding, order)
        elif name == "decoder.final_layernorm.weight":
            yield ParamMapping(parameter, ("model.norm.weight",), Sharding.REPLICATED)
        elif name == "output_layer.weight" and not model_spec.tied:
            yield ParamMapping(parameter, ("lm_head.weight",), Sharding.ROWS)
        elif name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            yield ParamMapping(parameter, (EMBEDDING,), Sharding.ROWS)
        else:
            raise ConfigError(f"parameter {name} has no Hugging Face name")


def _named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters, and the correction biases of routers, which are buffers: no gradient reaches them."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".router.expert_bias"))


_LAYER_TENSORS: dict[str, tuple[tuple[str, ...], Sharding]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), Sharding.REPLICATED),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Sharding.REPLICATED),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), Sharding.REPLICATED),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), Sharding.REPLICATED),
    "self_attention.linear_qkv.weight": (tuple(f"self_attn.{part}_proj.weight" for part in "qkv"), Sharding.QKV),
    "self_attention.linear_qkv.bias": (tuple(f"self_attn.{part}_proj.bias" for part in "qkv"), Sharding.QKV),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), Sharding.COLUMNS),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), Sharding.GATE_UP),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), Sharding.COLUMNS),
}


_QK_NORMS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")


def _layer_tensors(name: str, model_spec: ModelSpec) -> tuple[tuple[str, ...], Sharding]:
    if ".lora." in name:
        module, _, half = name.partition(".lora.")
        return _adapter_tensors(half.endswith(".a"), *_layer_tensors(f"{module}.{half[:-2]}", model_spec))
    family, experts = model_spec.family, range(model_spec.num_experts)
    gate, up, down = family.expert_parts
    of_family = {
        "mlp.router.weight": ((family.router,), Sharding.REPLICATED),
        "mlp.router.expert_bias": ((family.correction,), Sharding.REPLICATED),
        "mlp.shared_experts.linear_fc1.weight": (
            (f"{family.shared}.gate_proj.weight", f"{family.shared}.up_proj.weight"),
            Sharding.GATE_UP,
        ),
        "mlp.shared_experts.linear_fc2.weight": ((f"{family.shared}.down_proj.weight",), Sharding.COLUMNS),
        "mlp.shared_experts.gate_weight": ((f"{family.shared}_gate.weight",), Sharding.REPLICATED),
    }
    if name in of_family:
        return of_family[name]
    if model_spec.qk_norm == "all" and name in _QK_NORMS:
        return _LAYER_TENSORS[name][0], Sharding.ROWS
    if name == "mlp.experts.weight1":
        names = tuple(f"{family.expert.format(e)}.{part}.weight" for e in experts for part in (gate, up))
        return names, Sharding.EXPERTS_GATE_UP
    if name == "mlp.experts.weight2":
        return tuple(f"{family.expert.format(e)}.{down}.weight" for e in experts), Sharding.EXPERTS_DOWN
    if name not in _LAYER_TENSORS:
        raise ConfigError(f"layer parameter {name} has no Hugging Face name")
    return _LAYER_TENSORS[name]


def _adapter_tensors(first: bool, names: tuple[str, ...], sharding: Sharding) -> tuple[tuple[str, ...], Sharding]:
    """B is sharded like its weight. A, which all parts of a fused weight share, is named after the first part."""
    tag = _HALVES[not first]
    names = tuple(name.removesuffix(".weight") + tag for name in names)
    if not first:
        return names, sharding
    if sharding in (Sharding.EXPERTS_GATE_UP, Sharding.EXPERTS_DOWN):
        return names[:: 2 if sharding is Sharding.EXPERTS_GATE_UP else 1], Sharding.EXPERTS_DOWN
    return names[:1], Sharding.REPLICATED


@torch.no_grad()
def load_weights(
    models: Sequence[Any],
    model_spec: ModelSpec,
    directory: Path,
    ranks: ParallelState,
    expert_order: ExpertOrder,
    progress: LoadProgress,
) -> None:
    """Fill this rank's parameters from the safetensors in ``directory``; ``progress`` counts the bytes.

    Raises ConfigError for a tensor that is missing or has another shape, before it reads any.
    """
    with SliceReader(directory) as reader:
        weights = (mapping for mapping in param_mappings(models, model_spec, expert_order) if not mapping.adapter)
        pieces = [piece for mapping in weights for piece in pieces_of(mapping, model_spec, ranks)]
        for piece in pieces:
            reader.check(piece)
        progress.needed += sum(reader.nbytes(piece) for piece in pieces)
        for piece in sorted(pieces, key=reader.position):
            reader.fill(piece, progress)


def pieces_of(mapping: ParamMapping, model_spec: ModelSpec, ranks: ParallelState) -> Iterator[TensorSlice]:
    """The slices of Hugging Face tensors that this rank reads, each with its target view of the parameter."""
    param, names, shard = mapping.parameter.detach(), mapping.names, (ranks.tensor_rank, ranks.tensor_size)
    match mapping.sharding:
        case Sharding.REPLICATED:
            yield TensorSlice.share(names[0], param)
        case Sharding.ROWS:
            yield TensorSlice.share(names[0], param, 0, *shard)
        case Sharding.COLUMNS:
            yield TensorSlice.share(names[0], param, 1, *shard)
        case Sharding.GATE_UP:
            yield from (
                TensorSlice.share(name, half, 0, *shard) for name, half in zip(names, param.chunk(2), strict=True)
            )
        case Sharding.QKV:
            yield from _qkv_pieces(names, param, model_spec, ranks)
        case Sharding.EXPERTS_GATE_UP:
            for expert, weight in zip(own_experts(mapping, ranks), param, strict=True):
                gate, up = weight.chunk(2)
                yield TensorSlice.share(names[2 * expert], gate)
                yield TensorSlice.share(names[2 * expert + 1], up)
        case Sharding.EXPERTS_DOWN:
            for expert, weight in zip(own_experts(mapping, ranks), param, strict=True):
                yield TensorSlice.share(names[expert], weight)


def _qkv_pieces(names: tuple[str, ...], param: Tensor, model: ModelSpec, ranks: ParallelState) -> Iterator[TensorSlice]:
    """The queries, the key and the value of each of this rank's key-value groups."""
    groups = model.kv_heads // ranks.tensor_size
    widths = _group_widths(model)
    for number, group in enumerate(param.unflatten(0, (groups, -1)), ranks.tensor_rank * groups):
        for name, part, width in zip(names, group.split(widths), widths, strict=True):
            yield TensorSlice(name, part, 0, number * width, model.kv_heads * width)


def _group_widths(model_spec: ModelSpec) -> list[int]:
    """Numbers of rows of the queries, the key and the value of a key-value group."""
    return [width * model_spec.head_dim for width in (model_spec.heads // model_spec.kv_heads, 1, 1)]


def own_experts(mapping: ParamMapping, ranks: ParallelState) -> tuple[int, ...]:
    """This rank's experts of a stacked parameter, in its order."""
    size = len(mapping.expert_order) // ranks.expert_size
    return mapping.expert_order[ranks.expert_rank * size : (ranks.expert_rank + 1) * size]


def export_weights(
    models: Sequence[Any], model_spec: ModelSpec, ranks: ParallelState, expert_order: ExpertOrder
) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face name with its full tensor, without adapters. Collective; only rank 0 yields.

    A tied output projection is exported as ``lm_head.weight``, because SGLang's Qwen3-MoE never ties and would sample
    from uniform probabilities without it.
    """
    own = [s for s in param_mappings(models, model_spec, expert_order) if not s.adapter and not _is_tied_copy(s, ranks)]
    for names, full in _full_tensors(own, ranks):
        yield from zip(names, _split(names, full, model_spec), strict=True)
        if model_spec.tied and names == (EMBEDDING,):
            yield "lm_head.weight", full.clone()


def export_adapters(
    models: Sequence[Any], model_spec: ModelSpec, ranks: ParallelState, expert_order: ExpertOrder
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The Hugging Face name of every adapted weight, its A ``[r, in]`` and its B ``[out, r]``. Collective; only rank 0
    yields."""
    halves = _full_tensors([m for m in param_mappings(models, model_spec, expert_order) if m.adapter], ranks)
    for (_, a), (names, b) in zip(halves, halves, strict=True):
        parts = _split(names, b, model_spec)
        stacked = a if a.ndim == 3 else a[None]
        shared = [matrix for matrix in stacked for _ in range(len(names) // len(stacked))]
        yield from zip((name.removesuffix(_HALVES[1]) + ".weight" for name in names), shared, parts, strict=True)


def _full_tensors(local: Sequence[ParamMapping], ranks: ParallelState) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The names and the full tensor of each mapping of every stage; ``local``: those of this stage. Collective; only
    rank 0 yields."""
    group = parallel_state.get_pipeline_model_parallel_group()
    plans: list[Any] = [None] * ranks.pipeline_size
    plan = [(mapping.names, _full_shape(mapping, ranks), mapping.parameter.dtype) for mapping in local]
    torch.distributed.all_gather_object(plans, plan, group=group)
    for stage, entries in enumerate(plans):
        for index, (names, full_shape, dtype) in enumerate(entries):
            if stage == ranks.pipeline_rank:
                full = _to_full(local[index], ranks)
            else:
                full = torch.empty(full_shape, dtype=dtype, device=local[0].parameter.device)
            if ranks.pipeline_size > 1:
                torch.distributed.broadcast(full, torch.distributed.get_global_rank(group, stage), group=group)
            if ranks.rank == 0:
                yield names, full


def _is_tied_copy(mapping: ParamMapping, ranks: ParallelState) -> bool:
    return mapping.names == (EMBEDDING,) and ranks.pipeline_rank > 0


def _full_shape(mapping: ParamMapping, ranks: ParallelState) -> tuple[int, ...]:
    sizes = list(mapping.parameter.shape)
    if mapping.sharding in (Sharding.EXPERTS_GATE_UP, Sharding.EXPERTS_DOWN):
        sizes[0] *= ranks.expert_size
    elif mapping.sharding is Sharding.COLUMNS:
        sizes[1] *= ranks.tensor_size
    elif mapping.sharding is not Sharding.REPLICATED:
        sizes[0] *= ranks.tensor_size
    return tuple(sizes)


@torch.no_grad()
def _to_full(mapping: ParamMapping, ranks: ParallelState) -> Tensor:
    """The parameter gathered from all tensor or expert ranks, in Megatron's arrangement, with experts by number."""
    local = mapping.parameter.detach().contiguous()
    if mapping.sharding in (Sharding.EXPERTS_GATE_UP, Sharding.EXPERTS_DOWN):
        full = torch.cat(_gather(local, parallel_state.get_expert_model_parallel_group()))
        if mapping.expert_order == tuple(range(len(full))):
            return full
        return full[torch.tensor(mapping.expert_order, device=full.device).argsort()]
    if mapping.sharding is Sharding.REPLICATED:
        return local
    parts = _gather(local, parallel_state.get_tensor_model_parallel_group())
    if mapping.sharding is Sharding.COLUMNS:
        return torch.cat(parts, dim=1).contiguous()
    if mapping.sharding is Sharding.GATE_UP:
        return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
    return torch.cat(parts)


def _gather(local: Tensor, group: Any) -> list[Tensor]:
    if group.size() == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(group.size())]
    torch.distributed.all_gather(parts, local, group=group)
    return parts


def _split(names: tuple[str, ...], full: Tensor, model_spec: ModelSpec) -> Iterable[Tensor]:
    """The Hugging Face tensors, in the order of ``names``, out of a full parameter."""
    parts = [name.rsplit(".", 2)[1] for name in names[:3]]
    if parts == ["q_proj", "k_proj", "v_proj"]:
        groups = model_spec.kv_heads
        return [part.flatten(0, 1) for part in full.unflatten(0, (groups, -1)).split(_group_widths(model_spec), dim=1)]
    if full.ndim == 3:
        return [piece for expert in full for piece in expert.chunk(len(names) // len(full))]
    return full.chunk(len(names))


def write_checkpoint(weights: Iterable[tuple[str, Tensor]], source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write ``weights`` as safetensors, with copies of the other files of ``source``. The directory appears
    atomically."""
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


def _write_shards(weights: Iterable[tuple[str, Tensor]], directory: Path, dtype: torch.dtype) -> None:
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(pending, directory / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        kept = torch.float32 if keeps_float32(name) else dtype
        pending[name] = tensor.to(device="cpu", dtype=kept, copy=True).contiguous()
        size += pending[name].nbytes
        total += pending[name].nbytes
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
