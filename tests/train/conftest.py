"""A tiny Qwen3-MoE checkpoint and samples for the trainer's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.moe_checkpoint import write_moe
from support.train_samples import EXPERTS, LAYERS, VOCAB, sample_of

from agent_rl.config import RunConfig
from agent_rl.types import Sample

sys.path.insert(0, str(Path(__file__).parent))  # tests import the worker processes' modules too


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers, 4 experts top-2, 64 tokens of vocabulary."""
    sizes = {"layers": LAYERS, "hidden": 64, "heads": 4, "kv": 2, "head_dim": 16, "experts": EXPERTS, "inter": 32}
    return write_moe(tmp_path_factory.mktemp("models") / "tiny-moe", **sizes, vocab=VOCAB)


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
