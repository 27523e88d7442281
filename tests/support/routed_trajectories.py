"""Trajectories with random log-probs and routes, for tests of what is stored and compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agent_rl.types import Trajectory
from r3.routing import Routing, Span, SpanKind
from support.trajectories import trajectory


def routed(seed: int, task_id: str = "t", *, sampled: int = 2, layers: int = 2, experts: int = 4) -> Trajectory:
    """Three tokens of prompt, then ``sampled`` ones. Two experts per token and layer, in no order."""
    generator, made = np.random.default_rng(seed), trajectory(1.0, sampled=sampled, task_id=task_id)
    length = len(made.tokens)
    chosen = generator.random((length, layers, experts)).argsort(axis=-1)[..., :2].astype(np.uint8)
    chosen[-1] = 0
    spans = (Span(0, length - 1, "0", "e", SpanKind.SAMPLED), Span(length - 1, length, "0", "e", SpanKind.MISSING))
    routing = Routing(chosen, np.arange(length) < length - 1, spans, experts)
    logprobs = np.where(made.loss_mask, -generator.random(length), 0).astype(np.float32)
    return replace(made, tokens=made.tokens + np.int32(seed), logprobs=logprobs, routing=routing)
