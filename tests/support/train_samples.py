"""Random samples and routes for a model of two MoE layers with four experts and 64 tokens of vocabulary."""

from __future__ import annotations

import numpy as np

from agent_rl.types import Sample
from r3.routing import Routing, Span, SpanKind
from support.moe_checkpoint import TOP_K

LAYERS, EXPERTS, VOCAB = 2, 4, 64


def routing_of(tokens: int, seed: int) -> Routing:
    """Random distinct experts for all rows but the last."""
    generator = np.random.default_rng(seed)
    experts = generator.random((tokens, LAYERS, EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.uint8)
    present = np.arange(tokens) < tokens - 1
    experts[~present] = 0
    kinds = [SpanKind.PREFILLED if row else SpanKind.MISSING for row in present]
    spans = tuple(Span(i, i + 1, "1", "test", kind) for i, kind in enumerate(kinds))
    return Routing(experts, present, spans, EXPERTS)


def sample_of(length: int, seed: int, *, advantage: float = 1.0, routes: bool = True) -> Sample:
    """A random sample: the second half is sampled, with random rollout log-probs."""
    generator = np.random.default_rng(seed)
    mask = np.arange(length) >= max(1, length // 2)
    logprobs = np.where(mask, -generator.random(length) * 4, 0).astype(np.float32)
    tokens = generator.integers(0, VOCAB, length).astype(np.int32)
    return Sample(tokens, mask, logprobs, advantage, routing_of(length, seed) if routes else None)


def samples(*, routes: bool = True) -> list[Sample]:
    """Seven samples of 10 to 40 tokens, with advantages of both signs."""
    lengths = (10, 20, 30, 40, 15, 17, 33)
    return [sample_of(n, seed=n, advantage=(-1.0) ** n * n / 20, routes=routes) for n in lengths]
