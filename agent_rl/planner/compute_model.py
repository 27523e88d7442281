"""What a trainer rank computes and sends in a step, and rank 0 in a weight sync: formulas over a model's shape and a
layout. Pure; imports no torch.

Symbols as in :mod:`agent_rl.planner.memory_model`. The FLOPs of a forward pass are those of
:mod:`agent_rl.train.batching.cost`, of the layers of one stage, over the t c ranks that share a micro-batch. A backward
pass takes twice as many, but 2.5 times those of attention, whose kernel computes the scores again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from agent_rl.config import EngineConfig, RunConfig, TrainConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.planner.memory_model import BYTES, LOGITS_CHUNK, adapter_parameters, changes_bytes
from agent_rl.train.batching.cost import PartCosts
from agent_rl.train.hf_index import change_shapes, expected_shapes

_GATE_BYTES = 4
"""A token's gate weight, which travels with each of its copies to an expert (float32)."""


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of one forward pass of a rank, by what can be run again apart from the rest; ``frozen`` of them are
    products with weights that take no gradient (``train.lora``)."""

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

    def again(self, train: TrainConfig, *, chunked: bool) -> float:
        """What is run a second time under the backward pass; ``chunked``: log-probs are made in several chunks."""
        parts = {"core_attn": self.attention, "moe": self.experts, "mlp": self.dense}
        some = sum(parts[name] for name in train.recompute_modules) if train.recompute == "selective" else 0.0
        return (self.layers if train.recompute == "full" else some) + self.logprobs * chunked

    def update(self, train: TrainConfig, *, chunked: bool) -> float:
        """Forward and backward pass."""
        return 3 * self.forward - self.frozen + self.attention / 2 + self.again(train, chunked=chunked)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A rank's step of one full micro-batch a pipeline stage: FLOPs of the log-prob pass and of the update, and bytes
    that leave the rank for the other expert ranks in all of it."""

    logprobs: float
    update: float
    exchanged: float


@dataclass(frozen=True, slots=True)
class PlannedPublish:
    """A weight sync: ``bytes`` sent (once, whatever the number of engines), in ``buckets``, holding ``memory`` bytes of
    rank 0's GPU beside its state."""

    bytes: int
    buckets: int
    memory: int


def planned_step(model: ModelSpec, config: RunConfig, *, rank: int, skew: float) -> PlannedStep:
    """Of ``rank``, whose experts are chosen ``skew`` times as often as the mean rank's."""
    train, stages = config.train, config.train.parallel.pipeline
    stage = rank // (train.parallel.world_size // stages)
    work = forward_work(model, config, stage=stage, skew=skew)
    chunked = train.microbatch_tokens // train.parallel.context > _chunk_rows(model, train)
    passes = 3 + (train.recompute == "full" or (train.recompute == "selective" and "moe" in train.recompute_modules))
    passes += bool(train.kl.coefficient)
    return PlannedStep(
        stages * work.forward,
        stages * work.update(train, chunked=chunked),
        stages * passes * _exchanged(model, train, _layers(model, train, stage), skew),
    )


def forward_work(model: ModelSpec, config: RunConfig, *, stage: int, skew: float) -> Work:
    """One forward pass over a full micro-batch of the longest trajectories, in pipeline stage ``stage``."""
    train, parts = config.train, PartCosts.of(model)
    length = min(config.rollout.max_tokens, train.microbatch_tokens)
    count, ranks = train.microbatch_tokens // length, train.parallel.tensor * train.parallel.context
    tokens = count * length / ranks
    layers = _layers(model, train, stage)
    moe = sum(layers)
    last = stage == train.parallel.pipeline - 1
    whole = Work(
        projections=len(layers) * tokens * parts.projections,
        attention=len(layers) * parts.attention * count * length * (length + 1) / ranks,
        experts=moe * tokens * (model.top_k * skew * parts.expert + parts.beside_experts),
        dense=(len(layers) - moe) * tokens * parts.dense,
        logprobs=last * (tokens - count / ranks) * parts.logprobs,
    )
    if train.lora is None:
        return whole
    attention, expert = (2 * tokens * each for each in adapter_parameters(model, train.lora))
    return replace(
        whole,
        projections=whole.projections + len(layers) * attention,
        experts=whole.experts + moe * model.top_k * skew * expert,
        frozen=whole.forward - whole.attention,
    )


def planned_publish(model: ModelSpec, train: TrainConfig, engine: EngineConfig) -> PlannedPublish:
    """Buckets are filled in the order of the checkpoint; a tied output is sent once more. Adapters may go alone."""
    width, limit = BYTES[engine.dtype], int(engine.weight_bucket_mb * 2**20)
    if train.lora and engine.merges_adapters:
        sent = [math.prod(shape) * 4 for shape in change_shapes(model, train.lora.rank).values()]
    else:
        sent = [math.prod(shape) * width for shape in expected_shapes(model).values()]
        if model.tied:
            sent.append(model.vocab_size * model.hidden * width)
    buckets, held = 1, 0
    for size in sent:
        if held and held + size > limit:
            buckets, held = buckets + 1, 0
        held += size
    return PlannedPublish(sum(sent), buckets, publishing_bytes(model, train, engine))


def publishing_bytes(model: ModelSpec, train: TrainConfig, engine: EngineConfig) -> int:
    """What a weight sync holds beside a rank's state: the largest weight, whole, beside its parts where it is cut or
    the bucket that it goes into; the bucket that is sent, those before and after it, and the largest, whose broadcast
    an engine may have refused; and all adapters."""
    width, limit = BYTES[engine.dtype], int(engine.weight_bucket_mb * 2**20)
    vocabulary = model.vocab_size * model.hidden
    experts = 2 * model.num_experts * model.expert_inner * model.hidden
    own = BYTES[train.dtype]
    whole = max(
        weight * own + max(weight * own * (cut > 1), bucket)
        for weight, cut, bucket in (
            (vocabulary, train.parallel.tensor, vocabulary * width),
            (experts, train.parallel.expert, limit),
        )
    )
    return whole + 3 * limit + max(limit, vocabulary * width) + changes_bytes(model, train)


def _layers(model: ModelSpec, train: TrainConfig, stage: int) -> tuple[bool, ...]:
    """Which layers of a stage have experts. Of a virtual pipeline it has one part in so many of each round."""
    stages, rounds = train.parallel.pipeline, train.parallel.virtual_pipeline
    each = model.num_layers // (stages * rounds)
    starts = [(part * stages + stage) * each for part in range(rounds)]
    return tuple(moe for start in starts for moe in model.moe[start : start + each])


def _exchanged(model: ModelSpec, train: TrainConfig, layers: tuple[bool, ...], skew: float) -> float:
    """Bytes that leave a rank in one forward or one backward pass over a micro-batch: copies of its own tokens with
    their gates for other ranks' experts, and what its own experts made of the others' tokens."""
    parallel, width = train.parallel, BYTES[train.dtype]
    copies = train.microbatch_tokens / (parallel.tensor * parallel.context) * model.top_k
    out, back = copies * (1 - skew / parallel.expert), copies * skew * (1 - 1 / parallel.expert)
    gates = _GATE_BYTES * out
    return sum(layers) * ((out + back) * model.hidden * width + gates)


def _chunk_rows(model: ModelSpec, train: TrainConfig) -> int:
    return max(1, LOGITS_CHUNK["cuda"] // (model.vocab_size // train.parallel.tensor))
