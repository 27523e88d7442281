"""Formulas for the FLOPs and traffic of a trainer rank in a step, and of rank 0 in a weight sync. Pure; no torch.

Symbols as in :mod:`agent_rl.planner.memory_model`. The FLOPs of a forward pass are those of
:mod:`agent_rl.train.batching.cost` for the layers of one stage, divided by the t c ranks that share a micro-batch. A
backward pass takes 2 times as many, for attention 2.5 times: its kernel computes the scores again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from agent_rl.config import EngineConfig, RunConfig, TrainConfig
from agent_rl.models.families import keeps_float32
from agent_rl.models.mixer_costs import mixer_cost
from agent_rl.models.spec import ModelSpec
from agent_rl.models.tensors import fill_buckets, joined_tensors
from agent_rl.planner.memory_model import BYTES, LOGITS_CHUNK, adapter_bytes, adapter_parameters
from agent_rl.train.batching.cost import LayerFlops
from agent_rl.train.hf_index import adapter_update_shapes, sent_shapes
from r3.shard import stage_layers

_GATE_BYTES = 4
"""Bytes of a token's gate weight, sent with each copy to an expert (float32)."""


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """FLOPs of one forward pass of a rank, split by what can be recomputed separately; ``frozen`` of them are products
    with weights without gradient (``train.lora``)."""

    projections: float
    attention: float
    experts: float
    dense: float
    logprobs: float
    frozen: float = 0.0

    @property
    def layers(self) -> float:
        return self.projections + self.attention + self.experts + self.dense

    @property
    def forward(self) -> float:
        return self.layers + self.logprobs

    def recomputed(self, train: TrainConfig, *, chunked: bool) -> float:
        """Returns the FLOPs of recomputation; ``chunked``: log-probs are computed in several chunks."""
        modules = {"core_attn": self.attention, "moe": self.experts, "mlp": self.dense}
        selective = (
            sum(modules.get(name, 0.0) for name in train.recompute_modules) if train.recompute == "selective" else 0.0
        )
        return (self.layers if train.recompute == "full" else selective) + self.logprobs * chunked

    def update(self, train: TrainConfig, *, chunked: bool) -> float:
        """Returns the FLOPs of the forward and backward pass, with recomputation."""
        return 3 * self.forward - self.frozen + self.attention / 2 + self.recomputed(train, chunked=chunked)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A rank's step with one full micro-batch per pipeline stage: FLOPs of the log-prob pass and of the update, and
    bytes sent to other expert ranks during the step."""

    logprobs: float
    update: float
    exchanged: float


@dataclass(frozen=True, slots=True)
class PlannedPublish:
    """A weight sync: ``bytes`` sent (once, for any number of engines) in ``buckets``; ``memory``: bytes of a sender's
    GPU in addition to its state."""

    bytes: int
    buckets: int
    memory: int


def planned_step(model: ModelSpec, config: RunConfig, *, rank: int, skew: float) -> PlannedStep:
    """Plan a step of ``rank``, whose experts are chosen ``skew`` times as often as those of the mean rank."""
    train, stages = config.train, config.train.parallel.pipeline
    stage = rank // (train.parallel.world_size // stages)
    flops = forward_flops(model, config, stage=stage, skew=skew)
    chunked = train.microbatch_tokens // train.parallel.context > _chunk_rows(model, train)
    passes = 3 + (train.recompute == "full" or (train.recompute == "selective" and "moe" in train.recompute_modules))
    passes += bool(train.kl.coefficient)
    return PlannedStep(
        stages * flops.forward,
        stages * flops.update(train, chunked=chunked),
        stages * passes * _exchanged_bytes(model, train, _layers(model, train, stage), skew),
    )


def forward_flops(model: ModelSpec, config: RunConfig, *, stage: int, skew: float) -> ForwardFlops:
    """Returns the FLOPs of stage ``stage`` for one full micro-batch of the longest trajectories."""
    train, parts = config.train, LayerFlops.of(model)
    length = min(config.rollout.max_tokens, train.microbatch_tokens)
    count, ranks = train.microbatch_tokens // length, train.parallel.tensor * train.parallel.context
    tokens = count * length / ranks
    layers = _layers(model, train, stage)
    mixers, moe = [mixer_cost(model, layer) for layer in layers], sum(model.moe[layer] for layer in layers)
    pairs = count * length * (length + 1) / ranks
    last = stage == train.parallel.pipeline - 1
    flops = ForwardFlops(
        projections=sum(mixer.projections for mixer in mixers) * tokens,
        attention=sum(mixer.pair * pairs + mixer.token * tokens for mixer in mixers),
        experts=moe * tokens * (model.top_k * skew * parts.expert + parts.beside_experts),
        dense=sum(model.has_mlp(layer) and not model.moe[layer] for layer in layers) * tokens * parts.dense,
        logprobs=last * (tokens - count / ranks) * (parts.logprobs + 2 * model.hidden * train.uses_critic),
    )
    if train.lora is None:
        return flops
    attention, expert = (2 * tokens * each for each in adapter_parameters(model, train.lora))
    return replace(
        flops,
        projections=flops.projections + len(layers) * attention,
        experts=flops.experts + moe * model.top_k * skew * expert,
        frozen=flops.forward - flops.attention,
    )


def planned_publish(
    model: ModelSpec, train: TrainConfig, engine: EngineConfig, stages: Sequence[int] | None = None
) -> PlannedPublish:
    """Plan what the senders of pipeline ``stages`` (None: all) do in a weight sync of a trainer on GPUs. Buckets are
    filled in the order of the checkpoint. With merged adapters only the adapters are sent."""
    planned = [
        _planned_sender(model, train, engine, stage)
        for stage in (range(train.parallel.pipeline) if stages is None else stages)
    ]
    memory = publishing_bytes(model, train, engine)
    return PlannedPublish(sum(size for size, _ in planned), sum(count for _, count in planned), memory)


def _planned_sender(model: ModelSpec, train: TrainConfig, engine: EngineConfig, stage: int) -> tuple[int, int]:
    """Returns the bytes and buckets that the sender of a pipeline stage sends."""
    width, limit = BYTES[engine.dtype], int(engine.bucket_mb(cuda=True) * 2**20)
    if train.lora and engine.merges_adapters:
        shapes = adapter_update_shapes(model, train.lora.rank)
        sent = [(name, math.prod(shape) * 4) for name, shape in shapes.items()]
    else:
        shapes = sent_shapes(model, stage, train.parallel.pipeline, train.parallel.virtual_pipeline)
        sent = [(name, math.prod(shape) * (4 if keeps_float32(name) else width)) for name, shape in shapes.items()]
    filled = fill_buckets(sent, itemgetter(0), itemgetter(1), limit=limit, joined=joined_tensors(model))
    return sum(size for _, size in sent), sum(1 for _ in filled)


def publishing_bytes(model: ModelSpec, train: TrainConfig, engine: EngineConfig) -> int:
    """Returns the bytes of a weight sync in addition to a rank's state: the largest gathered weight plus its shards or
    the bucket that it fills; the bucket in transfer, the ones before and after it, and one whose broadcast an engine
    may have refused; and all adapters."""
    width, limit = BYTES[engine.dtype], int(engine.bucket_mb(cuda=True) * 2**20)
    vocabulary = model.vocab_size * model.hidden
    experts = 2 * model.num_experts * model.expert_inner * model.hidden
    own = BYTES[train.dtype]
    gathered = max(
        weight * own + max(weight * own * (shards > 1), bucket)
        for weight, shards, bucket in (
            (vocabulary, train.parallel.tensor, vocabulary * width),
            (experts, train.parallel.expert, limit),
        )
    )
    return gathered + 3 * limit + max(limit, vocabulary * width) + adapter_bytes(model, train)


def _layers(model: ModelSpec, train: TrainConfig, stage: int) -> list[int]:
    """Returns the layers of a stage. With a virtual pipeline, a stage has one chunk per round."""
    chunks = stage_layers(model.num_layers, train.parallel.pipeline, train.parallel.virtual_pipeline)[stage]
    return [number - 1 for chunk in chunks for number in chunk]


def _exchanged_bytes(model: ModelSpec, train: TrainConfig, layers: list[int], skew: float) -> float:
    """Returns the bytes that a rank sends in one forward or backward pass over a micro-batch: copies of its tokens
    with gate weights for other ranks' experts, and the outputs of its experts for other ranks' tokens."""
    parallel, width = train.parallel, BYTES[train.dtype]
    copies = train.microbatch_tokens / (parallel.tensor * parallel.context) * model.top_k
    out, back = copies * (1 - skew / parallel.expert), copies * skew * (1 - 1 / parallel.expert)
    gates = _GATE_BYTES * out
    return sum(model.moe[layer] for layer in layers) * ((out + back) * model.hidden * width + gates)


def _chunk_rows(model: ModelSpec, train: TrainConfig) -> int:
    return max(1, LOGITS_CHUNK["cuda"] // (model.vocab_size // train.parallel.tensor))
