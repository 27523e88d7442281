"""Traced steps of the real trainer: real Ray, real Megatron. A sound step passes the check, and routes that are really
spoiled on their way (the driver deals out wrong ones) fail it, naming the place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_rl.config import R3Config, RunConfig, TraceConfig
from agent_rl.errors import ConfigError, TrainerError
from agent_rl.train import ray_trainer
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Sample
from r3.check import CheckReport, HandOver, check_folder
from r3.shard import RouteShard, ShardSpec
from r3.trace import STAGES

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

Config = Callable[..., RunConfig]
Make = Callable[..., Sample]
LENGTHS = (10, 20, 30, 40, 15, 17, 33)


def samples(make_sample: Make) -> list[Sample]:
    return [make_sample(n, seed=n, advantage=(-1.0) ** n * n / 20) for n in LENGTHS]


def traced(config: RunConfig, folder: Path, *steps: int) -> RunConfig:
    """``config`` with all micro-batches of ``steps`` traced."""
    trace = TraceConfig(steps=steps, samples=64, microbatches=64, dir=folder)
    return config.model_copy(update={"r3": R3Config(trace=trace)})


def check(folder: Path) -> CheckReport:
    return check_folder(folder, require_forward_verify=True, require_shard_identity=True)


def tally(report: CheckReport, hand_over: HandOver) -> dict[str | None, int]:
    return {row.stage: row.checked for row in report.tallies if row.hand_over is hand_over}


async def test_a_step_on_one_rank_holds(run_config: Config, make_sample: Make, tmp_path: Path) -> None:
    """Two updates, native routes measured between; only the steps asked for are traced."""
    config = traced(run_config(mini_steps=2), tmp_path / "trace", 3)
    data = samples(make_sample)
    assert data[2].routing is not None
    present = data[2].routing.present.copy()
    present[4:7] = False
    data[2] = replace(data[2], routing=replace(data[2].routing, present=present))
    async with RayTrainer(config) as trainer:
        await trainer.step(data, measure_native=True)
        await trainer.step(data, measure_native=True, step=2)
        assert not (tmp_path / "trace").exists()
        await trainer.step(data, measure_native=True, step=3)
    report = check(tmp_path / "trace")
    assert report.holds, str(report.breaks[0])
    assert report.steps == (3,)
    assert tally(report, HandOver.PAYLOAD) == {None: len(LENGTHS)}
    assert tally(report, HandOver.FETCH) == dict.fromkeys(STAGES, len(LENGTHS))
    routers = tally(report, HandOver.ROUTER)
    assert routers["prev-logprob"] == routers["train"] >= 2 * 3, "two layers, at least three micro-batches"
    assert tally(report, HandOver.BACKWARD) == {"train": routers["train"]}
    with pytest.raises(ConfigError, match=r"train\.replay is r2: only r3"):
        RayTrainer(traced(run_config(replay="r2"), tmp_path, 1))


async def test_a_step_over_pipeline_stages_holds(run_config: Config, make_sample: Make, tmp_path: Path) -> None:
    """Micro-batches overtake each other there: the recomputation of one comes after the next one's forward pass."""
    config = run_config(parallel={"world_size": 2, "pipeline": 2}, recompute="full")
    async with RayTrainer(traced(config, tmp_path, 1)) as trainer:
        await trainer.step(samples(make_sample), measure_native=False, step=1)
    report = check(tmp_path)
    assert report.holds, str(report.breaks[0])
    assert tally(report, HandOver.FETCH) == dict.fromkeys(STAGES, 2 * len(LENGTHS))


Cut = Callable[[Sequence[Sample], Sequence[int], ShardSpec], RouteShard]


def shifted_rows(cut: Cut) -> Cut:
    """One context rank's rows come one place too late."""

    def spoiled(data: Sequence[Sample], ids: Sequence[int], spec: ShardSpec) -> RouteShard:
        shard = cut(data, ids, spec)
        return replace(shard, experts=np.roll(shard.experts, 1, axis=0)) if spec.context_rank == 1 else shard

    return spoiled


def swapped_layers(cut: Cut) -> Cut:
    """Sample 5's micro-batch has its layers in each other's place, on one rank."""

    def spoiled(data: Sequence[Sample], ids: Sequence[int], spec: ShardSpec) -> RouteShard:
        shard = cut(data, ids, spec)
        swap = 5 in ids and spec.context_rank == 0
        return replace(shard, experts=shard.experts[:, ::-1].copy()) if swap else shard

    return spoiled


def exchanged_ranks(cut: Cut) -> Cut:
    """Each context rank gets the other's share."""
    return lambda data, ids, spec: cut(data, ids, replace(spec, context_rank=1 - spec.context_rank))


async def test_spoiled_routes_are_found_between_context_ranks(
    run_config: Config, make_sample: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(parallel={"world_size": 2, "context": 2}, recompute="full")
    data, cut = samples(make_sample), ray_trainer.cut
    faults = {"shifted": shifted_rows, "swapped": swapped_layers, "exchanged": exchanged_ranks}
    reports = {}
    async with RayTrainer(traced(config, tmp_path, 1)) as trainer:
        await trainer.step(data, measure_native=False, step=1)
        reports["sound"] = check(tmp_path)
        for name, fault in faults.items():  # the same step again, each time: it forgets its earlier trace
            monkeypatch.setattr(ray_trainer, "cut", fault(cut))
            if name == "exchanged":
                with pytest.raises(TrainerError, match="routes do not belong to the tokens they came with"):
                    await trainer.step(data, measure_native=False, step=1)
            else:
                await trainer.step(data, measure_native=False, step=1)  # the trainer itself can't tell
            reports[name] = check(tmp_path)
    assert reports["sound"].holds, str(reports["sound"].breaks[0])
    assert tally(reports["sound"], HandOver.FETCH) == dict.fromkeys(STAGES, 2 * len(LENGTHS))

    first = reports["shifted"].breaks[0]
    assert (first.hand_over, first.stage, first.step, first.rank) == (HandOver.FETCH, "prev-logprob", 1, 1)
    assert first.row is not None
    assert "the row before" in first.what
    first = reports["swapped"].breaks[0]
    assert (first.hand_over, first.rank, first.layer) == (HandOver.FETCH, 0, 1)
    assert "those of layer 2" in first.what
    assert {b.sample for b in reports["swapped"].breaks if b.hand_over is HandOver.FETCH} >= {5}
    first = reports["exchanged"].breaks[0]
    assert (first.hand_over, first.stage) == (HandOver.FETCH, "prev-logprob")
    assert any("routes do not belong to the tokens" in b.what for b in reports["exchanged"].breaks)
