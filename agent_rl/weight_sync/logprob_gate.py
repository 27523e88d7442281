"""Bounds the difference between the log-probs of engine and trainer after a weight update.

The bound depends on model, kernels and data types. The first update of a start measures it: the engines then hold the
trainer's weights, so what differs is rounding. Weights that are missing or misnamed differ by whole nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agent_rl.engine.types import Scores
from agent_rl.models.spec import ModelSpec
from agent_rl.types import Sample
from r3.stitch import RouteStitcher

DEFAULT_TOKENS, MAX_TOKENS = 128, 512
"""Length of the sequence without a prompt, and at most of a run's prompt."""
GROWTH = 4.0
"""The allowed difference over the one measured first. Keys and values in fp8 gave 0.14 to 0.44 nats in 195 updates
(docs/paper-runs)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """In nats a token: the most that the first update may show, and the least and the most that later ones may."""

    first: float
    least: float
    most: float


LIMITS = {"float32": Limits(0.1, 0.01, 0.4), "bfloat16": Limits(0.5, 0.05, 1.0), "fp8": Limits(1.0, 0.2, 1.0)}


def limits_of(dtype: str, kv_dtype: str) -> Limits:
    """The limits of an engine with weights in ``dtype`` and keys and values in ``kv_dtype``."""
    return LIMITS["fp8" if kv_dtype.startswith("fp8") else dtype]


@dataclass
class LogprobGate:
    """Allowed mean differences of log-probs in nats a token, by the data type of an engine's keys and values.

    ``dtype``: of the engines' weights.
    """

    dtype: str
    allowed: dict[str, float] = field(default_factory=dict)

    def limit(self, kv_dtype: str) -> float:
        """What is allowed now."""
        return self.allowed.get(kv_dtype, limits_of(self.dtype, kv_dtype).first)

    def measure(self, kv_dtype: str, difference: float) -> None:
        """Take a difference that was allowed. The first one, with equal weights, sets the limit."""
        limits = limits_of(self.dtype, kv_dtype)
        self.allowed.setdefault(kv_dtype, min(limits.most, max(limits.least, GROWTH * difference)))


def probe_tokens(prompt: Sequence[int], vocab_size: int) -> np.ndarray:
    """The sequence that engine and trainer compute, int32 ``[S]``: the start of ``prompt``, or all small ids."""
    tokens = prompt[:MAX_TOKENS] or range(min(DEFAULT_TOKENS, vocab_size))
    return np.array(tokens, np.int32)


def probe_sample(tokens: np.ndarray, scores: Scores, model_spec: ModelSpec) -> Sample:
    """``tokens`` as a sample with the experts that the engine chose for them; the last token has none."""
    routing = None
    if scores.routing is not None:
        layers = len(model_spec.moe_layer_ids)
        stitcher = RouteStitcher(moe_layers=layers, top_k=model_spec.top_k, num_experts=model_spec.num_experts)
        stitcher.append(scores.routing, sequence=len(tokens))
        routing = stitcher.finish(len(tokens))
    return Sample(tokens, np.ones(len(tokens), bool), np.zeros(len(tokens), np.float32), 0.0, routing)
