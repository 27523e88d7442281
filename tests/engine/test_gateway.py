"""Engines behind a gateway that wants a key: it goes with every request, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agent_rl.config import EngineConfig, RunConfig
from agent_rl.config.loader import MODELS
from agent_rl.engine.factory import check_engines
from agent_rl.engine.route_probe.requests import ProbeClient
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import ConfigError, EngineKeyRefused, UserError, WeightSyncError
from agent_rl.models.spec import read_model_spec
from agent_rl.weight_sync.receivers import WeightReceivers
from agent_rl.weight_sync.requests import PublishRequest

KEY = "k3y-that-stays-secret"


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[str, list[str]]]:
    """Answers requests that bring the key with an empty object, others with 401; its address, and the paths it let
    through."""
    passed: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        passed.append(request.path)
        return web.json_response({})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", passed
    finally:
        await runner.cleanup()


async def test_every_request_has_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEY", f"{KEY}\n")
    async with gateway() as (url, passed):
        config = EngineConfig(urls=(url,), api_key_env="GATEWAY_KEY")
        await check_engines([url], headers=config.headers)
        engine = SGLangEngine(url, read_model_spec(MODELS["tiny-moe"]), config)
        await engine.info()
        await engine.close()
        async with ProbeClient(url, timeout=5, headers=config.headers) as probed:
            await probed.model_path()
        with WeightReceivers([url], timeout=5, headers=config.headers) as receivers:
            await asyncio.to_thread(receivers.end)
    assert passed == [
        "/model_info", "/server_info", "/model_info", "/model_info", "/end_weight_update",
    ]  # fmt: skip


@pytest.mark.parametrize("held", [None, "another"])
async def test_a_refused_key_is_reported(monkeypatch: pytest.MonkeyPatch, held: str | None) -> None:
    monkeypatch.setenv("GATEWAY_KEY", held or "")
    async with gateway() as (url, passed):
        config = EngineConfig(urls=(url,), api_key_env="GATEWAY_KEY" if held else None, retries=9)
        with pytest.raises(UserError) as refused:
            await check_engines([url], headers=config.headers)
        engine = SGLangEngine(url, read_model_spec(MODELS["tiny-moe"]), config)
        with pytest.raises(EngineKeyRefused, match="answered 401: no such key"):
            await engine.score([1, 2])
        await engine.close()
        refusing = pytest.raises(WeightSyncError, match="answered 401: no such key")
        with WeightReceivers([url], timeout=5, headers=config.headers) as receivers, refusing:
            await asyncio.to_thread(receivers.end)
    assert str(refused.value).startswith(f"engine.urls: GET {url}/model_info answered 401: no such key")
    assert "engine.api_key_env" in str(refused.value)
    assert not passed


def test_an_unset_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GATEWAY_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"engine\.api_key_env: .*GATEWAY_KEY"):
        _ = EngineConfig(api_key_env="GATEWAY_KEY").headers


def test_the_key_is_never_written_or_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_KEY", KEY)
    engine = EngineConfig(api_key_env="GATEWAY_KEY")
    order = PublishRequest(("http://x",), "1", engine, headers=engine.headers)
    run = RunConfig(name="x", model="m", engine=engine.model_dump())
    assert KEY in engine.headers["authorization"]
    assert KEY not in run.model_dump_json() + repr(run) + repr(order) + str(order)
