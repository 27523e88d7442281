"""A tiny Qwen3-MoE checkpoint, and the real SGLang server on it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.weight_sync.receivers import WeightReceivers

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one
from server_control import idle, load

ROOT = Path(__file__).resolve().parents[2]
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
LAYERS, EXPERTS, TOP_K, VOCABULARY, CONTEXT = 4, 8, 2, 256, 2048
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MOE_WIDTH = 64, 4, 2, 16, 24


def tiny_weights(seed: int) -> dict[str, NDArray[np.float32]]:
    """Random weights under Hugging Face names, large enough that sampling and routing are not near-ties."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float = 0.08) -> NDArray[np.float32]:
        return (rng.standard_normal(shape) * std).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, std=0.5),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": normal(VOCABULARY, HIDDEN, std=0.2),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for norm in ("q_norm", "k_norm"):
            weights[f"{at}self_attn.{norm}.weight"] = np.ones(HEAD_DIM, np.float32)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{at}self_attn.{part}_proj.weight"] = normal(heads * HEAD_DIM, HIDDEN)
        weights[f"{at}self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        weights[f"{at}mlp.gate.weight"] = normal(EXPERTS, HIDDEN, std=0.3)
        for mlp in (f"{at}mlp.experts.{expert}." for expert in range(EXPERTS)):
            weights[f"{mlp}gate_proj.weight"] = normal(MOE_WIDTH, HIDDEN)
            weights[f"{mlp}up_proj.weight"] = normal(MOE_WIDTH, HIDDEN)
            weights[f"{mlp}down_proj.weight"] = normal(HIDDEN, MOE_WIDTH)
    return weights


TINY_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "float32",
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 128, "hidden_act": "silu",
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "attention_bias": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": MOE_WIDTH, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip


def write_model(directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True)
    save_file(tiny_weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG))
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
    yield from _serving(EngineServer(engine_config, model, tmp_path_factory.mktemp("engine") / "engine.log"))


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
    engine = EngineServer(engine_config, model, tmp_path_factory.mktemp("second") / "engine.log")
    for _ in _serving(engine):
        yield engine


def _serving(engine: EngineServer) -> Iterator[str]:
    asyncio.run(engine.start())
    yield engine.url
    asyncio.run(engine.stop())
