"""Updates by deltas to the real server: equal to full ones to the bit, and replaced by them in any doubt."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_control import load
from test_weight_sync import PROBE, TOKENS, FileTrainer, Weights, exported, torch

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.models.spec import read_model_spec
from agent_rl.types import SamplingParams
from agent_rl.weight_sync.delta_sender import DeltaSender
from agent_rl.weight_sync.digests import Digests
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.receivers import Checksums, WeightReceivers
from agent_rl.weight_sync.requests import PublishReport, PublishRequest
from agent_rl.weight_sync.sync import WeightSync

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.usefixtures("restored")]


class DeltaTrainer(FileTrainer):
    """A trainer whose update changes a few weights by a little. ``links[i]`` connects to the engines for the i-th
    staged delta; further ones are faultless."""

    def __init__(self, config: EngineConfig, model: Path, *links: type[WeightPublisher]) -> None:
        config = config.model_copy(update={"weight_sync": "delta", "weight_bucket_mb": 0.3})
        super().__init__(config, model, [], *links)
        self.weights: Weights = exported(model)
        self._spec, self._rng = read_model_spec(model), np.random.default_rng(0)
        self._sender, self._publisher = DeltaSender(self._spec, self._connect), None
        self._faulty: type[WeightPublisher] = WeightPublisher

    def _connect(self, request: PublishRequest) -> WeightPublisher:
        if self._publisher is None or not self._publisher.serves(request) or type(self._publisher) is not self._faulty:
            self.close()
            self._publisher = self._faulty(request.urls, torch.device("cpu"), self._spec, request.config)
        return self._publisher

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def update(self) -> None:
        for _, weight in self.weights:
            some = torch.from_numpy(self._rng.random(weight.shape) < 0.02)
            weight[some] *= 1 + 1e-5

    async def stage(self, engine_urls: Sequence[str], weight_version: str) -> dict[str, str]:
        request = PublishRequest(tuple(engine_urls), weight_version, self._config)
        self._faulty = self._links.pop(0) if self._links else WeightPublisher
        refusals = await asyncio.to_thread(self._sender.stage, request, self.weights)
        self._faulty, self._staged = WeightPublisher, weight_version
        return refusals

    async def publish(self, engine_urls: Sequence[str], weight_version: str, gpus: Any = ()) -> PublishReport:
        if self._staged != weight_version:
            await self.stage((), weight_version)
        self._staged = ""
        request = PublishRequest(tuple(engine_urls), weight_version, self._config)
        report = await asyncio.to_thread(self._sender.publish, request)
        if report.failures:
            self.close()
        return report


class Run:
    """Updates and their publishing, one version after the other."""

    def __init__(
        self, config: EngineConfig, model: Path, engine: SGLangEngine, directory: Path, *links: type[WeightPublisher]
    ) -> None:
        self.trainer, self.step, self.notes, self._engine = DeltaTrainer(config, model, *links), 0, list[str](), engine
        self._sync = WeightSync(config, model, engine, self.trainer, directory, self.notes.append)

    async def publish(self, *, update: bool = True) -> dict[str, float]:
        if not self.step:
            self.trainer._logprobs = await self._engine.score(PROBE)
        if update:
            self.trainer.update()
        self.step += 1
        await self._sync.stage(self.step)
        async with self._engine.gate.closed():
            metrics = await self._sync.publish(self.step)
        assert metrics["weight_sync/verified"] == 1, "checksums of all weights were compared with the trainer's"
        assert metrics["weight_sync/disk_loads"] == 0
        return metrics

    def close(self) -> None:
        self.trainer.close()


@pytest.fixture
def run_of(engine_config: EngineConfig, model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    def start(engine: SGLangEngine, *links: type[WeightPublisher]) -> Run:
        run = Run(engine_config, model, engine, tmp_path / "weights", *links)
        request.addfinalizer(run.close)
        return run

    return start


def checksums(engine: SGLangEngine) -> list[Checksums]:
    with WeightReceivers(engine.urls) as receivers:
        return receivers.checksums()


async def deltas_equal_full_updates(run: Run, engine: SGLangEngine, config: EngineConfig) -> None:
    assert (await run.publish())["weight_sync/delta_ratio"] == 1, "an engine that confirmed nothing receives everything"
    for update in (True, True, False):
        metrics = await run.publish(update=update)
        assert metrics["weight_sync/delta_ratio"] < 0.2
        assert metrics["weight_sync/retries"] == 0
    by_delta = checksums(engine)
    sender = WeightPublisher(engine.urls, torch.device("cpu"), engine.model_spec, config)
    try:
        report = await asyncio.to_thread(sender.publish, run.trainer.weights, "full")
    finally:
        sender.close()
    assert not report.failures
    assert checksums(engine) == by_delta
    assert not run.notes


async def test_deltas_equal_full_updates(engine: SGLangEngine, run_of: Any, engine_config: EngineConfig) -> None:
    await deltas_equal_full_updates(run_of(engine), engine, engine_config)


class Damages(WeightPublisher):
    """Flips a bit of the delta."""

    def stage(self, delta: bytes, *rest: Any) -> Any:
        damaged = bytearray(delta)
        damaged[len(delta) // 2] ^= 4
        return super().stage(bytes(damaged), *rest)


class Repeats(WeightPublisher):
    """Sends the delta twice and has only the second response."""

    def stage(self, delta: bytes, *rest: Any) -> Any:
        super().stage(delta, *rest)
        return super().stage(delta, *rest)


class Loses(WeightPublisher):
    """Loses the delta, and the response says that it arrived."""

    def stage(self, delta: bytes, weights: Any, timer: Any) -> tuple[dict[str, str], Digests]:
        self._receivers.stage = lambda data: {}  # type: ignore[method-assign]
        return super().stage(delta, weights, timer)


@pytest.mark.parametrize(
    ("fault", "reason", "retries"),
    [
        (Damages, "receives all weights: .*damaged in transfer", 0),
        (Repeats, "receives all weights: .*no complete update came before", 0),
        (Loses, "no delta is staged", 1),
    ],
)
async def test_a_faulty_delta_is_replaced_by_all_weights(
    engine: SGLangEngine, run_of: Any, fault: type[WeightPublisher], reason: str, retries: int
) -> None:
    run = run_of(engine, WeightPublisher, fault)
    await run.publish()
    metrics = await run.publish()
    (note,) = run.notes
    assert re.search(reason, note)
    assert metrics["weight_sync/retries"] == retries
    assert (await run.publish())["weight_sync/delta_ratio"] < 0.2, "deltas go on"
    assert len(run.notes) == 1
    assert np.isfinite(await engine.score(PROBE)).all()


async def test_an_engine_that_loaded_other_weights_receives_all(engine: SGLangEngine, run_of: Any, model: Path) -> None:
    run = run_of(engine)
    await run.publish()
    with WeightReceivers(engine.urls) as receivers:
        load(receivers, model, "1")
    metrics = await run.publish()
    assert "receives all weights: no complete update came before the delta" in run.notes[0]
    assert (metrics["weight_sync/delta_ratio"], metrics["weight_sync/retries"]) == (1, 0)


async def test_a_delta_is_relayed_and_one_of_two_engines_may_need_all_weights(
    server: str, second_server: EngineServer, connect: Any, run_of: Any, model: Path
) -> None:
    async with connect(server, second_server.url) as engine:
        run = run_of(engine)
        await run.publish()
        assert (await run.publish())["weight_sync/delta_ratio"] < 0.2
        with WeightReceivers([second_server.url]) as receivers:
            load(receivers, model, "2")
        mixed = await run.publish()
        assert 0.5 < mixed["weight_sync/delta_ratio"] < 0.7
        assert len({each.combined for each in checksums(engine)}) == 1
        assert (await run.publish())["weight_sync/delta_ratio"] < 0.2
    with WeightReceivers([second_server.url]) as receivers:
        load(receivers, model, "default")


async def test_engines_after_a_broken_relay_are_named(engine: SGLangEngine) -> None:
    with WeightReceivers([*engine.urls, "http://127.0.0.1:9", "http://127.0.0.1:10"], timeout=30) as receivers:
        refusals = await asyncio.to_thread(receivers.stage, b"no delta")
    own, *others = refusals.values()
    assert "damaged in transfer" in own
    assert len(others) == 2
    assert all(reason.startswith("the relay to http://127.0.0.1:9 broke off: ") for reason in others)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
async def test_two_hundred_deltas_under_load(engine: SGLangEngine, run_of: Any, engine_config: EngineConfig) -> None:
    """Eight requests sample throughout; every response is of versions that were published."""
    run, versions = run_of(engine), set[str]()

    async def sample(number: int) -> None:
        greedy = SamplingParams(max_new_tokens=48)
        while True:
            completion = await engine.generate(TOKENS, greedy, routes_from=0, session=f"s{number}")
            versions.update(span.version for span in completion.versions)

    await run.publish()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sample(number)) for number in range(8)]
        ratios = []
        for _ in range(200):
            ratios.append((await run.publish())["weight_sync/delta_ratio"])
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
    assert max(ratios) < 0.2
    assert not run.notes
    assert versions <= {str(step) for step in range(1, 202)}
    assert len(versions) > 100
    await deltas_equal_full_updates(run_of(engine), engine, engine_config)
