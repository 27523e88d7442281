"""The step that is rehearsed: full micro-batches of the longest trajectories, with routes that load experts as asked.
numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent_rl.config import RunConfig
from agent_rl.models.spec import ModelSpec
from agent_rl.train.batching.mini_steps import MiniStepShare
from agent_rl.types import Sample
from r3.routing import Routing, narrowest_dtype


def make_samples(config: RunConfig, facts: ModelSpec, expert_rank: int, skew: float) -> dict[int, Sample]:
    """As many samples as fill a micro-batch for every pipeline stage, by index."""
    length = min(config.rollout.max_tokens, config.train.microbatch_tokens)
    count = config.train.microbatch_tokens // length * config.train.parallel.pipeline
    routing = Routing(
        routes(facts, length, config.train.parallel.expert, expert_rank, skew),
        np.ones(length, np.bool_),
        (),
        facts.num_experts,
    )
    return {index: _sample(length, facts.vocab_size, routing, index) for index in range(count)}


def _sample(length: int, vocabulary: int, routing: Routing | None, index: int) -> Sample:
    tokens = (np.arange(length) + index).astype(np.int32) % vocabulary
    sampled = np.arange(length) > 0
    return Sample(tokens, sampled, np.zeros(length, np.float32), 1.0 - 2.0 * (index % 2), routing)


def share_of(samples: dict[int, Sample], config: RunConfig) -> MiniStepShare:
    """All samples in one mini step, a full micro-batch for every pipeline stage."""
    stages = config.train.parallel.pipeline
    batches = tuple(tuple(int(index) for index in part) for part in np.array_split(list(samples), stages))
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples.values())
    return MiniStepShare(batches, tokens, len(samples))


def routes(facts: ModelSpec, tokens: int, expert_ranks: int, loaded: int, skew: float) -> NDArray[np.unsignedinteger]:
    """Experts ``[tokens, moe_layers, top_k]``: those of rank ``loaded`` are chosen ``skew`` times as often as the mean
    rank's, all others alike; the same in every layer."""
    each = facts.num_experts // expert_ranks
    own = min(skew / expert_ranks * facts.top_k, float(min(facts.top_k, each)))
    rows = np.arange(tokens)
    until = np.floor((rows + 1) * own).astype(np.int64) - np.floor(rows * own).astype(np.int64)
    inside = loaded * each + (np.cumsum(until)[:, None] + np.arange(facts.top_k)) % each
    others = np.setdiff1d(np.arange(facts.num_experts), np.arange(loaded * each, (loaded + 1) * each))
    places = rows[:, None] * facts.top_k + np.arange(facts.top_k)
    outside = others[places % len(others)] if len(others) else inside
    chosen = np.where(np.arange(facts.top_k) < until[:, None], inside, outside)
    whole = np.repeat(chosen[:, None], len(facts.moe_layer_ids), axis=1)
    return whole.astype(narrowest_dtype(facts.num_experts))
