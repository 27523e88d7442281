"""One of two real engines is killed under load: no request is lost, and it is back with the published weights."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from test_weight_sync import TOKENS, Setting

from agent_rl.config import EngineConfig
from agent_rl.controller.engine_admission import EngineAdmission
from agent_rl.engine.fleet import Fleet, Phase
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.engine.supervisor import EngineSupervisor
from agent_rl.models.spec import read_model_spec
from agent_rl.types import Completion, SamplingParams
from agent_rl.utils.concurrency import run_alongside

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
BACK_SECONDS = 200.0
"""How long a killed one may take to serve again: 20 s on a quiet machine, most of it imports."""


class Lent:
    """A server of the whole session: it is ended only where it is dead already."""

    gpus = ()

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self.start, self.death = server.start, server.death

    async def stop(self) -> None:
        if self._server.death() is not None:
            await self._server.stop()


@pytest.mark.long
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(1, marks=pytest.mark.timeout(600)),
        pytest.param(20, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
    ],
)
async def test_an_engine_killed_under_load_loses_no_request(
    setting: Setting, server: str, second_server: EngineServer, model: Path, engine_config: EngineConfig, kills: int
) -> None:
    if second_server.death() is not None:
        await second_server.start()
    config = engine_config.model_copy(update={"health_interval": 0.2, "restarts": kills, "start_timeout": BACK_SECONDS})
    fleet = Fleet(config.restarts)
    for name, url in ((server, server), ("second", second_server.url)):
        fleet.add(name, url)
        fleet.up(name, url)
    async with SGLangEngine((), read_model_spec(model), config, fleet=fleet) as engine:
        for name in fleet.names:
            await engine.admission.admit(fleet[name].url)
            fleet.admitted(name)
        supervising, sync = EngineSupervisor(engine, {"second": Lent(second_server)}, config), setting.sync(engine)
        await sync.publish(3)
        admission = EngineAdmission(setting.config.routes_config, engine, sync, {})
        async with run_alongside(supervising.run()), admission.admit():
            for kill in range(kills):
                running = [asyncio.create_task(sampled(engine, f"{kill}-{n}")) for n in range(8)]
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                assert second_server.pid is not None
                os.killpg(second_server.pid, signal.SIGKILL)
                got = await asyncio.gather(*running, sampled(engine, f"{kill}-later"))
                assert {each.weight_version for each in got} == {"3"}
                assert all(len(each.tokens) == 200 for each in got)
                async with asyncio.timeout(BACK_SECONDS):
                    await engine.fleet.until(lambda fleet, before=kill: fleet["second"].losses > before)
                    await engine.fleet.until(lambda fleet: fleet["second"].phase is Phase.SERVING)
        await supervising.close()
        assert len(engine.urls) == 2
        await setting.holds(engine, setting.new, "3")


async def sampled(engine: SGLangEngine, session: str) -> Completion:
    """A request that runs for a while."""
    sampling = SamplingParams(max_new_tokens=200, temperature=1.0)
    return await engine.generate(TOKENS, sampling, routes_from=0, session=session)
