"""What the driver does for a step, off the event loop, and the details of tokens by sample."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_workers import FakeWorkers

from agent_rl.config import RunConfig
from agent_rl.train import ray_trainer
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.train.reports import RankReport, SampledTokens
from agent_rl.train.route_sharding import shard_routes
from agent_rl.train.step_metrics import RouteDifferenceBits, token_details
from agent_rl.types import Sample, TokenDetail
from r3.routing import Routing
from r3.shard import ShardSpec

LAYERS, RANKS, SECONDS = 4, 2, 10


def sample_of(length: int) -> Sample:
    experts = np.tile(np.arange(2, dtype=np.uint8), (length, LAYERS, 1))
    present = np.arange(length) < length - 1
    mask = np.arange(length) > 1
    zeros = np.zeros(length, np.float32)
    return Sample(np.arange(length, dtype=np.int32), mask, zeros, 1.0, Routing(experts, present, (), 4))


def trainer_of(samples: list[Sample]) -> RayTrainer:
    train = {"microbatch_tokens": 32, "mini_steps": 2, "parallel": {"world_size": RANKS, "expert": RANKS}}
    trainer = RayTrainer(RunConfig.model_validate({"name": "test", "model": Path("none"), "train": train}))
    trainer.workers = FakeWorkers(samples, RANKS, LAYERS)  # type: ignore[assignment]
    return trainer


async def test_the_loop_is_free_during_the_drivers_work_on_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three functions waits for the loop, which would deadlock on the loop's thread."""
    loop, waited = asyncio.get_running_loop(), list[str]()

    def waits_for_the_loop(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*args: Any, **options: Any) -> Any:
            reached = threading.Event()
            loop.call_soon_threadsafe(reached.set)
            assert reached.wait(SECONDS), f"{name} holds the loop"
            waited.append(name)
            return call(*args, **options)

        return waiting

    names = ["split_step", "dispatch", "count_all_differing"]
    for name in names:
        monkeypatch.setattr(ray_trainer, name, waits_for_the_loop(name, getattr(ray_trainer, name)))
    samples = [sample_of(length) for length in (5, 9, 12, 20)]
    await trainer_of(samples).step(samples, measure_without_replay=True)
    assert waited == names


async def test_token_details_arrive_by_sample() -> None:
    samples = [sample_of(length) for length in (5, 9, 12, 20)]
    details: dict[int, TokenDetail] = {}
    metrics = await trainer_of(samples).step(samples, measure_without_replay=True, on_detail=details.update)
    assert metrics["r3/router_mismatch"] == metrics["mismatch_without_replay/router_mismatch"] == 0.5
    assert metrics["r3/sequence_mismatch"] == LAYERS / 2
    assert sorted(details) == [0, 1, 2, 3]
    for index, detail in details.items():
        sampled = int(samples[index].loss_mask[1:].sum())
        assert detail.gap.shape == detail.flags.shape == (sampled,)
        assert detail.differs_without_replay is not None
        layers = np.unpackbits(detail.differs_without_replay, axis=1, count=LAYERS)
        assert layers.sum(axis=1).tolist() == [LAYERS // 2] * (len(samples[index].tokens) - 1) + [0]


def test_token_details_keep_their_sample_over_ranks_and_micro_batches() -> None:
    """Every value is the index of its sample."""
    samples = [sample_of(length) for length in (5, 9, 12, 20)]
    micro_batches = [[(3,), (0,)], [(2, 1)]]
    reports = {}
    for rank, batches in enumerate(micro_batches):
        ids = [index for batch in batches for index in batch]
        own = np.concatenate([np.full(samples[index].loss_mask[1:].sum(), index, np.float32) for index in ids])
        tokens = SampledTokens(own.astype(np.float16), own.astype(np.uint8))
        reports[rank] = RankReport(own * 0, own, own + 0.5, np.zeros(len(own), np.int32), (), 0, 0, 0, sampled=tokens)
    details = token_details(samples, micro_batches, reports, RouteDifferenceBits(samples), RouteDifferenceBits(samples))
    for index, detail in details.items():
        wanted = np.full(int(samples[index].loss_mask[1:].sum()), index)
        for values in (detail.gap, detail.entropy, detail.flags):
            np.testing.assert_array_equal(values, wanted)
        np.testing.assert_array_equal(detail.gap_without_replay, wanted + 0.5)


def test_each_worker_is_sent_its_own_shards_in_order() -> None:
    """They are put by several threads."""

    class Keeping(FakeWorkers):
        def put(self, value: object) -> object:
            return value

    samples = [sample_of(length) for length in (4, 8, 12, 20, 6, 10)]
    workers = Keeping(samples, RANKS, LAYERS)
    workers.infos = [
        replace(workers.infos[data_rank], rank=2 * data_rank + tensor, shard=ShardSpec((0, 1, 2, 3), 0, 1, tensor, 2))
        for data_rank in range(RANKS)
        for tensor in range(2)
    ]
    batches = [[(0, 3), (1,)], [(5, 4), (2,)]]
    sent = ray_trainer.dispatch(workers, samples, batches, routes=True)  # type: ignore[arg-type]
    for info, stored in zip(workers.infos, sent, strict=True):
        assert set(stored.samples) == {index for ids in batches[info.data_rank] for index in ids}  # type: ignore[call-overload]
        for ids, shard in zip(batches[info.data_rank], stored.routes, strict=True):
            wanted = shard_routes(samples, ids, info.shard)
            np.testing.assert_array_equal(shard.experts, wanted.experts)  # type: ignore[attr-defined]
            np.testing.assert_array_equal(shard.identity, wanted.identity)  # type: ignore[attr-defined]
