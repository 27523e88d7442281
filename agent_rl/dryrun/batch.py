"""The step of a dry run: full micro-batches of the longest trajectories, with routes of a given expert load.

numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import RunConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.train.batching.partition import MiniStepShare
from agent_rl.types import Sample, TopTokens
from r3.routing import Routing, narrowest_dtype


def make_samples(config: RunConfig, model_spec: ModelSpec, expert_rank: int, skew: float) -> dict[int, Sample]:
    """Returns the samples, by index, that fill one micro-batch per pipeline stage."""
    length = min(config.rollout.max_tokens, config.train.microbatch_tokens)
    count = config.train.microbatch_tokens // length * config.train.parallel.pipeline
    routing = Routing(
        skewed_routes(model_spec, length, config.train.parallel.expert, expert_rank, skew),
        np.ones(length, np.bool_),
        (),
        model_spec.num_experts,
    )
    top_k = (config.train.distill.top_k if config.train.distill else None) or 0
    return {index: _sample(length, model_spec.vocab_size, routing, index, top_k) for index in range(count)}


def _sample(length: int, vocabulary: int, routing: Routing | None, index: int, top_k: int) -> Sample:
    tokens = (np.arange(length) + index).astype(np.int32) % vocabulary
    sampled, zeros = np.arange(length) > 0, np.zeros(length, np.float32)
    top = TopTokens(np.zeros((length - 1, top_k), np.int32), np.full((length - 1, top_k), -20.0, np.float32))
    return Sample(
        tokens,
        sampled,
        zeros,
        1.0 - 2.0 * (index % 2),
        routing,
        old_logprobs=zeros,
        teacher_logprobs=zeros,
        teacher_top=top if top_k else None,
    )


def mini_step_share(samples: dict[int, Sample], config: RunConfig) -> MiniStepShare:
    """Returns all samples as one mini step with one full micro-batch per pipeline stage."""
    stages = config.train.parallel.pipeline
    batches = tuple(tuple(int(index) for index in part) for part in np.array_split(list(samples), stages))
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples.values())
    return MiniStepShare(batches, tokens, len(samples), float(tokens))


def skewed_routes(
    model_spec: ModelSpec, tokens: int, expert_ranks: int, loaded: int, skew: float
) -> NDArray[np.unsignedinteger]:
    """Returns experts ``[tokens, moe_layers, top_k]``, equal in every layer: the experts of rank ``loaded`` are chosen
    ``skew`` times as often as those of the mean rank, all others equally often."""
    each = model_spec.num_experts // expert_ranks
    per_token = min(skew / expert_ranks * model_spec.top_k, float(min(model_spec.top_k, each)))
    rows = np.arange(tokens)
    count = np.floor((rows + 1) * per_token).astype(np.int64) - np.floor(rows * per_token).astype(np.int64)
    inside = loaded * each + (np.cumsum(count)[:, None] + np.arange(model_spec.top_k)) % each
    others = np.setdiff1d(np.arange(model_spec.num_experts), np.arange(loaded * each, (loaded + 1) * each))
    choices = rows[:, None] * model_spec.top_k + np.arange(model_spec.top_k)
    outside = others[choices % len(others)] if len(others) else inside
    chosen = np.where(np.arange(model_spec.top_k) < count[:, None], inside, outside)
    experts = np.repeat(chosen[:, None], len(model_spec.moe_layer_ids), axis=1)
    return experts.astype(narrowest_dtype(model_spec.num_experts))
