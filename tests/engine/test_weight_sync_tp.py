"""Weights to a real server of two tensor ranks, each of which holds its part of every matrix.

Those of hybrids are in ``test_families.py``.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.local_server import serving
from test_weight_deltas import Run, deltas_equal_full_updates
from test_weight_sync import FileTrainer, OneBitOff, Setting, torch

from agent_rl.config import EngineConfig
from agent_rl.engine.launch import EngineServer
from agent_rl.engine.sglang import SGLangEngine
from agent_rl.errors import WeightSyncError
from agent_rl.models.spec import read_model_spec
from agent_rl.weight_sync.adapters import SUFFIX, BaseWeights
from agent_rl.weight_sync.buckets import Bucket
from agent_rl.weight_sync.digests import DigestKind, RankDigests, predictable
from agent_rl.weight_sync.publisher import WeightPublisher
from agent_rl.weight_sync.receivers import WeightReceivers
from agent_rl.weight_sync.requests import PublishReport


@pytest.fixture(scope="module")
def two_ranks(engine_config: EngineConfig, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # the second rank's core may be another test's
        options = {"extra_args": ("--tp-size", "2"), "threads": 1, "weight_sync": "delta"}
        config = engine_config.model_copy(update=options)
        server = EngineServer(config, model, tmp_path_factory.mktemp("tp") / "engine.log")
        asyncio.run(server.start())
        yield server.url
        asyncio.run(server.stop())


@pytest.fixture
def server_url(two_ranks: str) -> str:
    return two_ranks


class OneSignOff(WeightPublisher):
    """Turns the sign of the first number. (The last bit of an adapter may be lost in the sum with its weight.)"""

    def _send(self, bucket: Bucket, version: str) -> Any:
        bucket.data[3] ^= 0x80
        return super()._send(bucket, version)


class HandleOfNoRank(WeightPublisher):
    """Gives the second rank a handle that it cannot open."""

    def _send(self, bucket: Bucket, version: str) -> Any:
        handles = [*bucket.handles[:1], *(pickle.dumps(1) for _ in bucket.handles[1:])]
        return super()._send(replace(bucket, handles=handles), version)


@pytest.mark.sglang
@pytest.mark.slow
class TestTwoRanks:
    async def test_every_rank_holds_what_was_sent(
        self, setting: Setting, engine: SGLangEngine, model: Path, engine_config: EngineConfig
    ) -> None:
        metrics = await setting.sync(engine).publish(3)
        await setting.holds(engine, setting.new, "3")
        assert metrics["weight_sync/verified"] == 1
        assert metrics["weight_sync/retries"] == metrics["weight_sync/disk_loads"] == 0
        report = await FileTrainer(engine_config, model, []).publish(engine.urls, "4")
        with WeightReceivers(engine.urls) as receivers:
            (held,) = receivers.checksums()
        assert held.ranks == report.digests[DigestKind.of(held.ranks)]
        assert held.ranks[0] != held.ranks[1]

    async def test_each_rank_opens_its_own_handle(self, setting: Setting, engine: SGLangEngine) -> None:
        sync = setting.sync(engine, WeightPublisher, HandleOfNoRank, gpus=["0", "1"])
        metrics = await sync.publish(7)
        assert metrics["weight_sync/verified"] == 1
        assert metrics["weight_sync/retries"] == 0
        await setting.holds(engine, setting.new, "7")
        assert (await sync.publish(8))["weight_sync/retries"] == 1
        await setting.holds(engine, setting.new, "8")
        assert "rank 1: " in setting.notes[0]
        assert "rank 0: " not in setting.notes[0]

    async def test_a_wrong_bit_of_one_ranks_part_is_found(self, setting: Setting, engine: SGLangEngine) -> None:
        metrics = await setting.sync(engine, OneBitOff).publish(5)
        await setting.holds(engine, setting.new, "5")
        assert metrics["weight_sync/retries"] == 1
        assert "does not hold the bytes that were sent" in setting.notes[0]
        assert "(its rank " in setting.notes[0]

    @pytest.mark.usefixtures("restored")
    async def test_deltas_equal_full_updates(
        self, engine: SGLangEngine, model: Path, engine_config: EngineConfig, tmp_path: Path
    ) -> None:
        run = Run(engine_config, model, engine, tmp_path)
        await deltas_equal_full_updates(run, engine, engine_config)
        run.close()

    async def test_every_rank_merges_its_part_of_adapters(
        self, two_ranks: str, model: Path, engine_config: EngineConfig
    ) -> None:
        """From the weights that the server was started with, whatever was sent since. A wrong sign is found, and so
        is a change of a weight that does not exist."""
        base, config = BaseWeights(model), engine_config.model_copy(update={"weight_bucket_mb": 0.3})

        def publish(link: type[WeightPublisher]) -> tuple[PublishReport, RankDigests]:
            publisher = link([two_ranks], torch.device("cpu"), read_model_spec(model), config)
            try:
                report = publisher.publish(changes.items(), "6", base)
            finally:
                publisher.close()
            with WeightReceivers([two_ranks]) as receivers:
                return report, receivers.checksums()[0].ranks

        generator = torch.Generator().manual_seed(0)
        changes = {
            name + SUFFIX: torch.randn(8, sum(base[name].shape), generator=generator) / 16
            for name in sorted(base.names)
            if "_proj." in name
        }
        report, held = await asyncio.to_thread(publish, WeightPublisher)
        assert report.failures == {}
        assert report.verified == 1
        assert report.bytes == sum(change.nbytes for change in changes.values())
        assert held == report.digests[DigestKind.of(held)]
        off, others = await asyncio.to_thread(publish, OneSignOff)
        assert others != held
        assert "does not hold the bytes that were sent" in off.failures[two_ranks]
        report, held_again = await asyncio.to_thread(publish, WeightPublisher)
        assert (report.failures, held_again) == ({}, held)
        changes["model.x.weight.lora"] = torch.ones(8, 2)
        unknown, _ = await asyncio.to_thread(publish, WeightPublisher)
        assert "model.x.weight" in unknown.failures[two_ranks]


def server(info: bytes) -> AbstractAsyncContextManager[str]:
    async def handler(path: str, request: dict[str, object]) -> tuple[int, bytes]:
        return 200, info

    return serving(handler)


@pytest.mark.parametrize("option", ["pp_size", "dp_size"])
async def test_pipeline_ranks_and_replicas_are_refused(option: str) -> None:
    async with server(b'{"tp_size": 2, "%s": 2}' % option.encode()) as url:
        with WeightReceivers([url]) as receivers:
            with pytest.raises(WeightSyncError, match=f"{url} runs with {option} 2"):
                await asyncio.to_thread(receivers.query_info)
            assert receivers.ranks == (1,)


async def test_ranks_of_data_parallel_attention_receive_weights() -> None:
    """As SGLang 0.5.21 reports them."""
    async with server(b'{"tp_size": 2, "dp_size": 2, "enable_dp_attention": true, "device": "cpu"}') as url:
        with WeightReceivers([url]) as receivers:
            infos = await asyncio.to_thread(receivers.query_info)
            assert receivers.ranks == (2,)
            assert not predictable(infos[0])
