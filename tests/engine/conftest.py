"""A tiny Qwen3-MoE checkpoint, and the real SGLang server on it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.moe_checkpoint import write_moe

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.weight_sync.receivers import WeightReceivers

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one
from server_control import idle, load, serving

ROOT = Path(__file__).resolve().parents[2]
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
SCALES = {"embed_tokens": 0.5, "lm_head": 0.2, "mlp.gate.": 0.3}
"""Standard deviations with which sampling and routing are not near-ties."""


def write_model(directory: Path, seed: int) -> Path:
    write_moe(directory, layers=4, hidden=64, heads=4, kv=2, head_dim=16, experts=8, inter=24, vocab=256)
    config = json.loads((directory / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("bos_token_id", "eos_token_id")}
    config |= {"max_position_embeddings": 2048, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    weights, rng = load_file(directory / "model.safetensors"), np.random.default_rng(seed)
    for name in sorted(name for name, weight in weights.items() if weight.ndim > 1):
        scale = next((scale for part, scale in SCALES.items() if part in name), 0.08)
        weights[name] = (rng.standard_normal(weights[name].shape) * scale).astype(np.float32)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def engine_config() -> EngineConfig:
    limits = {"max_total_tokens": 8192, "max_running_requests": 16, "request_timeout": 60.0, "retries": 2}
    return EngineConfig(python=str(ENGINE_PYTHON), device="cpu", dtype="float32", **limits)


@pytest.fixture(scope="session")
def server(engine_config: EngineConfig, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running server on ``model``, shared by all; a test that changes its weights restores them."""
    config = engine_config.model_copy(update={"weight_sync": "delta"})  # it takes full updates too
    yield from serving(EngineServer(config, model, tmp_path_factory.mktemp("engine") / "engine.log"))


@pytest.fixture
def server_url(server: str) -> str:
    """The server that ``engine`` and ``setting`` use; a module may override it."""
    return server


@pytest.fixture
def connect(model: Path, engine_config: EngineConfig) -> Callable[..., SGLangEngine]:
    """Makes the client of servers on ``model``."""
    return lambda *urls: SGLangEngine(urls, read_model_spec(model), engine_config)


@pytest.fixture
async def engine(server_url: str, connect: Callable[..., SGLangEngine]) -> AsyncIterator[SGLangEngine]:
    async with connect(server_url) as client:
        await idle(client)
        yield client


@pytest.fixture
def restored(server_url: str, model: Path) -> Iterator[None]:
    """Restores the weights of ``model`` after the test."""
    yield
    with WeightReceivers([server_url]) as receivers:
        load(receivers, model, "default")


@pytest.fixture
async def setting(
    server_url: str, model: Path, other_model: Path, engine_config: EngineConfig, tmp_path: Path
) -> AsyncIterator[Any]:
    from test_weight_sync import setting_of  # it needs torch

    async with setting_of(server_url, model, other_model, engine_config, tmp_path / "weights") as setting:
        yield setting


@pytest.fixture(scope="session")
def second_server(
    engine_config: EngineConfig, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """One more, for what takes two; the last test that uses it may kill it."""
    config = engine_config.model_copy(update={"weight_sync": "delta"})
    engine = EngineServer(config, model, tmp_path_factory.mktemp("second") / "engine.log")
    for _ in serving(engine):
        yield engine
