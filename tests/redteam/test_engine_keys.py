"""A launched engine serves no request without its key: every route of the real server is tried, also by web pages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from agent_rl.config import EngineConfig
from agent_rl.config.loader import install_model
from agent_rl.engine.launch import EngineServer
from tests.redteam.attack import report_stopped
from tests.redteam.web_page import HOSTS, REQUESTS

pytestmark = [pytest.mark.redteam, pytest.mark.sglang, pytest.mark.slow]

OPEN = ("/health", "/ready", "/metrics")
"""SGLang serves paths that begin with these to everybody."""
SERVED_OPENLY = {"/health", "/health_generate", "/ready"}
"""The routes among them without ``--enable-metrics``."""
PAGE_PATHS = ("/generate", "/pause_generation", "/flush_cache", "/v1/realtime", "/metrics")
CONTROL = ("/update_weights_from_tensor", "/init_weights_update_group", "/update_weights_from_disk")


@pytest.mark.long
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
            assert {path for path in routes if path.startswith(OPEN)} == SERVED_OPENLY
            for method, path in tried:
                for headers in ({}, {"authorization": "Bearer guess"}):
                    response = await client.request(method.upper(), path, headers=headers)
                    assert response.status_code == 401, (method, path, response.text)
            await asyncio.to_thread(refuse_web_pages, int(server.url.rpartition(":")[2]))
            for path in ("/pause_generation", "/continue_generation"):
                assert (await client.post(path, headers=key, json={})).status_code == 200
    finally:
        await server.stop()
    report_stopped("requests without the engine's key", f"{len(tried)} routes respond 401")


def refuse_web_pages(port: int) -> None:
    """No page and no host name reaches a route, whatever SGLang lets browsers do; websockets are not spoken."""
    for name, request in {**REQUESTS, **HOSTS}.items():
        replies = {path: request.send(port, path) for path in PAGE_PATHS}
        if request.method == "OPTIONS":
            assert {reply.data.partition(b"\r\n\r\n")[2] for reply in replies.values()} <= {b"OK"}
        else:
            assert {reply.status for reply in replies.values()} <= {400, 401, 404}, (name, replies)
        report_stopped(f"a page that {name} (engine)", {path: reply.status for path, reply in replies.items()})
