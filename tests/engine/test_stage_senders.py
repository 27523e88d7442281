"""The pipeline stages of a trainer send their weights to engines in turn."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_weight_sync import FileTrainer, Ranks, Setting, torch

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import WeightSyncError
from agent_rl.models.spec import read_model_spec
from agent_rl.train.hf_index import sent_shapes
from agent_rl.weight_sync.buckets import Bucket
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.receivers import WeightReceivers
from agent_rl.weight_sync.requests import PublishReport
from agent_rl.weight_sync.stage_sender import StageSender
from agent_rl.weight_sync.stage_turns import StageTurns
from agent_rl.weight_sync.sync import WeightSync


def in_stages(stages: int, act: Callable[[StageTurns], Any]) -> list[Any]:
    """What ``act`` returns or raises in each stage; stages are threads."""
    ranks = Ranks(stages)

    def rank(stage: int) -> Any:
        try:
            return act(StageTurns(partial(ranks.gather, stage), stage, stages))
        except WeightSyncError as error:
            return error

    with ThreadPoolExecutor(stages) as pool:
        return list(pool.map(rank, range(stages)))


def test_stages_act_in_order_and_each_has_its_result() -> None:
    order: list[int] = []

    def act(turns: StageTurns) -> int:
        def action() -> int:
            order.append(turns.stage)
            return 10 * turns.stage

        return turns.run(action)

    assert in_stages(3, act) == [0, 10, 20]
    assert order == [0, 1, 2]


@pytest.mark.parametrize("method", [StageTurns.run, StageTurns.together])
def test_the_failure_of_one_stage_is_raised_in_all(method: Any) -> None:
    acted: set[int] = set()

    def act(turns: StageTurns) -> None:
        def action() -> None:
            acted.add(turns.stage)
            if turns.stage == 1:
                raise WeightSyncError("refused")

        method(turns, action)

    assert [str(error) for error in in_stages(3, act)] == ["refused"] * 3
    assert acted == ({0, 1} if method is StageTurns.run else {0, 1, 2})


class TwoStages(FileTrainer):
    """A trainer of two pipeline stages in threads, with one connection each. ``second``: the next sender of the second
    stage."""

    def __init__(self, config: EngineConfig, directory: Path, logprobs: Any) -> None:
        super().__init__(config.model_copy(update={"weight_bucket_mb": 0.3}), directory, logprobs)
        self.second: type[StageSender] = StageSender
        self._senders: list[WeightPublisher | StageSender] = []
        self.reports: list[PublishReport] = []

    def sync(self, setting: Setting, engine: SGLangEngine) -> WeightSync:
        return WeightSync(
            setting.config.engine, setting.config.model, engine, self, setting.directory, setting.notes.append
        )

    def _open(self, urls: Any) -> None:
        if not self._senders or self._senders[0].urls != tuple(urls):
            self.close()
            spec, cpu = read_model_spec(self.directory), torch.device("cpu")
            self._senders = [kind(urls, cpu, spec, self._config) for kind in (WeightPublisher, self.second)]
            self.second = StageSender

    async def publish(self, engine_urls: Any, weight_version: str, gpus: Any = ()) -> PublishReport:
        self._open(engine_urls)
        weights, spec = load_file(self.directory / "model.safetensors"), read_model_spec(self.directory)

        def act(turns: StageTurns) -> Any:
            own = [(name, weights[name]) for name in sent_shapes(spec, turns.stage, 2)]
            sender = self._senders[turns.stage]
            if isinstance(sender, WeightPublisher):
                return sender.publish(own, weight_version, turns=turns)
            return sender.publish(own, weight_version, turns)

        report, failures = await asyncio.to_thread(in_stages, 2, act)
        assert failures == report.failures
        if failures:
            await asyncio.to_thread(self.close)
        self.reports.append(report)
        return report

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._senders.clear()


class Unjoined(StageSender):
    """Cannot reach the engines."""

    def _join(self) -> None:
        raise WeightSyncError("no way to the engine")


class Unknown(StageSender):
    """Announces a bucket in a group that the engine does not know, so the engine refuses it."""

    def _send(self, bucket: Bucket, version: str) -> Any:
        name, self._name = self._name, "unknown"
        try:
            return super()._send(bucket, version)
        finally:
            self._name = name


class OneBitOff(StageSender):
    """Changes a bit of its last bucket after it was hashed."""

    def _send(self, bucket: Bucket, version: str) -> Any:
        self._hashing.submit(int).result()
        bucket.data[0] ^= bucket.last
        return super()._send(bucket, version)


@pytest.mark.sglang
@pytest.mark.slow
class TestTwoStages:
    @pytest.fixture
    def trainer(self, setting: Setting, engine_config: EngineConfig) -> Iterator[TwoStages]:
        trainer = TwoStages(engine_config, setting.other_model, setting.new)
        yield trainer
        trainer.close()

    async def test_all_weights_of_both_stages_arrive(
        self, setting: Setting, engine: SGLangEngine, trainer: TwoStages
    ) -> None:
        sync = trainer.sync(setting, engine)
        size = sum(tensor.nbytes for tensor in load_file(setting.other_model / "model.safetensors").values())
        for version in (3, 4):  # the second goes through the same groups
            metrics = await sync.publish(version)
            await setting.holds(engine, setting.new, str(version))
            assert metrics["weight_sync/verified"] == 1
            assert metrics["weight_sync/retries"] == 0
            assert metrics["weight_sync/bytes"] == size
        assert not setting.notes

    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            (Unjoined, "no way to the engine"),
            (Unknown, "Group unknown not in"),
            (OneBitOff, r"updated to version 3, does not hold the bytes that were sent: model\."),
        ],
    )
    async def test_a_fault_of_the_second_stage_is_repaired_by_sending_again(
        self, setting: Setting, engine: SGLangEngine, trainer: TwoStages, fault: type[StageSender], reason: str
    ) -> None:
        trainer.second, sync = fault, trainer.sync(setting, engine)
        metrics = await sync.publish(3)
        await setting.holds(engine, setting.new, "3")
        assert (metrics["weight_sync/retries"], metrics["weight_sync/disk_loads"]) == (1, 0)
        failed, again = trainer.reports
        assert [*failed.failures] == [*engine.urls]
        (note,) = setting.notes
        assert re.search(reason, note)
        assert failed.digests == again.digests

    async def test_two_engines_receive_the_buckets_of_both_stages(
        self, setting: Setting, server: str, second_server: EngineServer, connect: Any, trainer: TwoStages
    ) -> None:
        async with connect(server, second_server.url) as engine:
            sync = trainer.sync(setting, engine)
            metrics = await sync.publish(3)
            assert (metrics["weight_sync/engines"], metrics["weight_sync/retries"]) == (2, 0)
            await setting.holds(engine, setting.new, "3")
            with WeightReceivers(engine.urls) as receivers:
                assert len({each.combined for each in receivers.checksums()}) == 1
