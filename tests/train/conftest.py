"""A tiny Qwen3-MoE checkpoint and samples for the trainer's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.moe_checkpoint import TOP_K, write_moe

from agent_rl.config import RunConfig
from agent_rl.types import Sample
from r3.routing import Routing, Span, SpanKind

sys.path.insert(0, str(Path(__file__).parent))  # tests import the worker processes' modules too

LAYERS, EXPERTS, VOCAB = 2, 4, 64


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers, 4 experts top-2, 64 tokens of vocabulary."""
    return write_moe(
        tmp_path_factory.mktemp("models") / "tiny-moe",
        layers=LAYERS,
        hidden=64,
        heads=4,
        kv=2,
        head_dim=16,
        experts=EXPERTS,
        inter=32,
        vocab=VOCAB,
    )


def routing_of(tokens: int, seed: int, *, missing: tuple[int, ...] = ()) -> Routing:
    """Random distinct experts for all rows but the last (and ``missing``)."""
    generator = np.random.default_rng(seed)
    experts = generator.random((tokens, LAYERS, EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.uint8)
    present = np.ones(tokens, bool)
    present[[*missing, tokens - 1]] = False
    experts[~present] = 0
    kinds = [SpanKind.PREFILLED if row else SpanKind.MISSING for row in present]
    spans = tuple(Span(i, i + 1, "1", "test", kind) for i, kind in enumerate(kinds))
    return Routing(experts, present, spans, EXPERTS)


def sample_of(length: int, seed: int, *, advantage: float = 1.0, routes: bool = True) -> Sample:
    """A random sample: the second half is sampled, with made-up rollout log-probs."""
    generator = np.random.default_rng(seed)
    mask = np.arange(length) >= max(1, length // 2)
    logprobs = np.where(mask, -generator.random(length) * 4, 0).astype(np.float32)
    tokens = generator.integers(0, VOCAB, length).astype(np.int32)
    return Sample(tokens, mask, logprobs, advantage, routing_of(length, seed) if routes else None)


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return sample_of


@pytest.fixture
def run_config(tiny_moe: Path) -> Callable[..., RunConfig]:
    """A run config on the tiny model; keywords go into its ``train`` section."""

    def build(**train: object) -> RunConfig:
        settings = {"device": "cpu", "microbatch_tokens": 64, "lr": 1e-2, **train}
        return RunConfig.model_validate({"name": "test", "model": tiny_moe, "train": settings})

    return build
