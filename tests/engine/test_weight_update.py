"""Requests of a weight update to the running server, and their refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_control import load
from support.local_server import serving

from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import WeightSyncError
from agent_rl.types import SamplingParams
from agent_rl.weight_sync.receivers import WeightReceivers

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.usefixtures("restored")]
TOKENS = [int(token) for token in np.random.default_rng(11).integers(2, 250, 60)]


async def version(engine: SGLangEngine) -> str:
    sampled = await engine.generate(TOKENS, SamplingParams(max_new_tokens=1), routes_from=None, session="s")
    assert sampled.weight_version == (await engine.info()).weight_version
    return sampled.weight_version


async def test_weights_from_disk(engine: SGLangEngine, model: Path, other_model: Path, tmp_path: Path) -> None:
    before = await engine.score(TOKENS)
    with WeightReceivers(engine.urls) as receivers:
        load(receivers, other_model, "5")
        changed = await engine.score(TOKENS)
        assert np.abs(np.subtract(changed, before)).max() > 0.1
        assert await version(engine) == "5"
        with pytest.raises(WeightSyncError, match="answered 400"):
            load(receivers, tmp_path, "6")
        np.testing.assert_allclose(await engine.score(TOKENS), changed, atol=1e-6)
        assert await version(engine) == "5"
        load(receivers, model, "7")
    np.testing.assert_allclose(await engine.score(TOKENS), before, atol=1e-6)


async def test_a_refused_request_fails_at_once(engine: SGLangEngine) -> None:
    with WeightReceivers(engine.urls, timeout=30) as receivers:
        with pytest.raises(WeightSyncError, match="must run between begin_weight_update"):
            receivers.receive(["x"], ["float32"], [(1,)], weight_version="1", group="no-group").wait()
        with pytest.raises(WeightSyncError, match="no weight-update session is open"):
            receivers.end()
        with pytest.raises(WeightSyncError, match="does not exist"):
            receivers.leave("no-group").wait()


async def test_an_update_left_open_by_a_dead_sender_is_closed(engine: SGLangEngine) -> None:
    with WeightReceivers(engine.urls, timeout=30) as dead:
        dead.begin_paused("abort").wait()
    with WeightReceivers(engine.urls, timeout=30) as receivers:
        receivers.begin_paused("abort").wait()
        receivers.end()
        receivers.resume()
    assert len(await engine.score(TOKENS)) == len(TOKENS)


def test_an_engine_that_is_gone_is_reported() -> None:
    with (
        WeightReceivers(["http://127.0.0.1:9"], timeout=5) as receivers,
        pytest.raises(WeightSyncError, match=r"no response \(NewConnectionError"),
    ):
        receivers.begin_paused("abort").wait()


async def test_a_load_from_disk_waits_for_the_last_batch(tmp_path: Path) -> None:
    """SGLang 0.5 answers a request and removes it from its books only in its next round."""
    away, refusal = False, b'{"success": false, "message": "the cache was not flushed because requests are running"}'

    async def answer(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal away
        if path == "/end_weight_update":  # answered in a round, whose rest puts the batch away
            away = True
            return 400, b'{"message": "no weight-update session is open"}'
        return (200, b"{}") if away else (400, refusal)

    async with serving(answer) as url:
        with WeightReceivers([url], timeout=30) as receivers:
            await asyncio.to_thread(receivers.load_from_disk, tmp_path, "1")
