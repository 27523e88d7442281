"""A launched engine serves no request without its key: every route of the real server is tried."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from agent_rl.config import EngineConfig
from agent_rl.config.loader import install_model
from agent_rl.engine.launch import EngineServer
from tests.redteam.attack import report_stopped

pytestmark = [pytest.mark.redteam, pytest.mark.sglang, pytest.mark.slow]

OPEN = ("/health", "/ready", "/metrics")
"""SGLang serves paths that begin with these to everybody."""
CONTROL = ("/update_weights_from_tensor", "/init_weights_update_group", "/update_weights_from_disk")


async def test_every_route_of_a_launched_engine_needs_the_key(tmp_path: Path) -> None:
    install_model(tmp_path / "model")
    config = EngineConfig(device="cpu", max_total_tokens=8192)
    server = EngineServer(config, tmp_path / "model", tmp_path / "engine.log", key="the-key")
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60.0) as client:
            key = {"authorization": "Bearer the-key"}
            routes = (await client.get("/openapi.json", headers=key)).json()["paths"]
            tried = [(method, path) for path in routes for method in routes[path] if not path.startswith(OPEN)]
            assert {path for _, path in tried} >= {*CONTROL, "/pause_generation", "/generate"}
            for method, path in tried:
                for headers in ({}, {"authorization": "Bearer guess"}):
                    response = await client.request(method.upper(), path, headers=headers)
                    assert response.status_code == 401, (method, path, response.text)
            for path in ("/pause_generation", "/continue_generation"):
                assert (await client.post(path, headers=key, json={})).status_code == 200
    finally:
        await server.stop()
    report_stopped("requests without the engine's key", f"{len(tried)} routes respond 401")
