"""Keys and values of 8 bits in a server on a CPU (``--kv-cache-dtype fp8_e4m3``): near the model, and not the same.
Stopping that server leaves no process and no file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from server_control import shared_files

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer, group_members
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.shared_memory import SHARED_MEMORY
from agent_rl.models.spec import read_model_spec
from agent_rl.types import SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = [int(token) for token in np.random.default_rng(5).integers(2, 250, 60)]
OPTION = ("--kv-cache-dtype", "fp8_e4m3")


@pytest.mark.exhaustive
async def test_an_8_bit_cache_changes_log_probs_and_routes_by_rounding(
    server: str, engine_config: EngineConfig, model: Path, tmp_path: Path
) -> None:
    short = EngineServer(engine_config.model_copy(update={"extra_args": OPTION}), model, tmp_path / "engine.log")
    model_spec, kept, found = read_model_spec(model), [], []
    await short.start()
    assert short.pid is not None
    files = shared_files(short.pid)
    try:
        for url in (server, short.url):
            async with SGLangEngine(url, model_spec, engine_config) as engine:
                answer = await engine.generate(PROMPT, SamplingParams(max_new_tokens=1), routes_from=0, session="s")
                assert answer.routing is not None
                kept.append((await engine.info()).kv_dtype)
                found.append((np.array(await engine.score(PROMPT)), np.sort(answer.routing.experts, axis=2)))
    finally:
        await short.stop()
    assert files
    assert not files & set(os.listdir(SHARED_MEMORY)), "a stopped server leaves files"
    assert group_members(short.pid) == [], "a stopped server leaves processes"
    assert kept == ["auto", "fp8_e4m3"]
    (exact, experts), (rounded, others) = found
    apart = np.abs(exact - rounded)
    assert 1e-3 < apart.max() < 1.0
    assert apart.mean() < 0.1
    assert 0 < (experts != others).any(axis=2).mean() < 0.5
