"""Traced steps of the real trainer: real Ray, real Megatron. A sound step passes the check, and routes that are really
spoiled on their way (the driver deals out wrong ones) fail it, naming the place."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agent_rl.config import R3Config, RunConfig, TraceConfig, TrainConfig
from agent_rl.errors import ConfigError, TrainerError
from agent_rl.models.spec import read_model_spec
from agent_rl.train import ray_trainer
from agent_rl.train.batching.partition import split_step
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.train.requests import OptimizerSpec, StepRequest, WorkerRequest
from agent_rl.train.route_sharding import shard_routes, without_routes
from agent_rl.train.route_trace import begin_trace
from agent_rl.types import Sample
from r3.shard import RouteShard, ShardSpec
from r3.trace.check import CheckReport, HandOver, check_dir
from r3.trace.events import STAGES

if TYPE_CHECKING:
    from agent_rl.train.worker import TrainerWorker

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

Config = Callable[..., RunConfig]
Make = Callable[..., Sample]
LENGTHS = (10, 20, 30, 40, 15, 17, 33)


def samples(make_sample: Make) -> list[Sample]:
    return [make_sample(n, seed=n, advantage=(-1.0) ** n * n / 20) for n in LENGTHS]


def traced(config: RunConfig, directory: Path, *steps: int) -> RunConfig:
    """``config`` with all micro-batches of ``steps`` traced."""
    trace = TraceConfig(steps=steps, samples=64, microbatches=64, dir=directory)
    return config.model_copy(update={"r3": R3Config(trace=trace)})


def check(directory: Path) -> CheckReport:
    return check_dir(directory, require_forward_verify=True, require_shard_identity=True)


def tally(report: CheckReport, hand_over: HandOver) -> dict[str | None, int]:
    return {row.stage: row.checked for row in report.tallies if row.hand_over is hand_over}


@pytest.fixture(scope="module")
def rank(tiny_moe: Path) -> Iterator[TrainerWorker]:
    """A world of one rank in this process, so that faults can be put inside it."""
    import torch

    from agent_rl.train.worker import TrainerWorker

    threads, listener = torch.get_num_threads(), socket.create_server(("127.0.0.1", 0))
    config = RunConfig(name="test", model=tiny_moe, train=TrainConfig(recompute="full"))
    order = WorkerRequest(config, read_model_spec(tiny_moe), tiny_moe, None, device="cpu", threads=1)
    port = listener.getsockname()[1]
    optimizer = OptimizerSpec(lr=1e-3)
    ready = TrainerWorker(order, optimizer, 0, master_addr="127.0.0.1", master_port=port, listener=listener.detach())
    yield ready
    ready.close()
    torch.set_num_threads(threads)


def traced_step(rank: TrainerWorker, config: RunConfig, data: Sequence[Sample], step: int) -> None:
    """What RayTrainer does with one rank."""
    info = rank.info()
    shares = split_step(data, mini_steps=config.train.mini_steps, budget=config.train.microbatch_tokens, ranks=1)
    batches = [ids for share in shares[0] for ids in share.micro_batches]
    trace = begin_trace(config, step, data, [batches], [info])
    routes = [shard_routes(data, ids, info.shard) for ids in batches]
    order = StepRequest(config, measure_without_replay=True, trace=trace)
    rank.grpo(without_routes(data, batches), shares[0], order, routes)


def test_a_step_on_one_rank_holds(rank: TrainerWorker, run_config: Config, make_sample: Make, tmp_path: Path) -> None:
    """Two updates, a native pass between, rows without routes; only the step asked for is traced."""
    config = traced(run_config(mini_steps=2, recompute="full"), tmp_path / "trace", 3)
    data = samples(make_sample)
    assert data[2].routing is not None
    present = data[2].routing.present.copy()
    present[4:7] = False
    data[2] = replace(data[2], routing=replace(data[2].routing, present=present))
    traced_step(rank, config, data, 2)
    assert not (tmp_path / "trace").exists()
    traced_step(rank, config, data, 3)
    report = check(tmp_path / "trace")
    assert report.holds, str(report.breaks[0])
    assert report.steps == (3,)
    assert tally(report, HandOver.PAYLOAD) == {None: len(LENGTHS)}
    assert tally(report, HandOver.FETCH) == dict.fromkeys(STAGES, len(LENGTHS))
    routers = tally(report, HandOver.ROUTER)
    assert routers["prev-logprob"] == routers["train"] >= 2 * 3, "two layers, at least three micro-batches"
    assert tally(report, HandOver.BACKWARD) == {"train": routers["train"]}


def given_late(original: Any) -> Any:
    """Layer 2 is given each row one place too late."""

    def begin(self: Any, microbatch: int, experts: Any, present: Any, *, backward: bool) -> None:
        late = experts.roll(1, 0) if self.layer_number == 2 and experts is not None else experts
        original(self, microbatch, late, present, backward=backward)

    return begin


def chosen_natively(original: Any) -> Any:
    """Layer 1's router overrules what it was given."""

    def forward(self: Any, scores: Any, topk: int, native: Any) -> Any:
        given = original(self, scores, topk, native)
        return native() if self.layer_number == 1 else given

    return forward


def recomputed_late(original: Any) -> Any:
    """In layer 2's recomputation each row takes the experts of the row before."""

    def backward(self: Any, scores: Any) -> Any:
        kept = original(self, scores)
        return kept.roll(1, 0) if self.layer_number == 2 else kept

    return backward


@pytest.mark.parametrize(
    ("method", "fault", "hand_over", "stage", "layer"),
    [
        ("begin", given_late, HandOver.ROUTER, "prev-logprob", 2),
        ("_forward", chosen_natively, HandOver.FORWARD, "prev-logprob", 1),
        ("_backward", recomputed_late, HandOver.BACKWARD, "train", 2),
    ],
)
def test_a_fault_inside_a_rank_is_found(
    rank: TrainerWorker, run_config: Config, make_sample: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    method: str, fault: Callable[[Any], Any], hand_over: HandOver, stage: str, layer: int,
) -> None:  # fmt: skip
    from r3.megatron_replay import LayerReplay

    monkeypatch.setattr(LayerReplay, method, fault(getattr(LayerReplay, method)))
    traced_step(rank, traced(run_config(recompute="full"), tmp_path, 1), samples(make_sample), 1)
    first = check(tmp_path).breaks[0]
    assert (first.hand_over, first.stage, first.rank, first.layer) == (hand_over, stage, 0, layer), str(first)
    assert (first.step, first.microbatch) == (1, 0)
    assert first.sample is not None
    assert first.row is not None


def test_only_the_rollouts_routes_are_traced(run_config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.replay is r2: only r3"):
        RayTrainer(traced(run_config(replay="r2"), tmp_path, 1))


Cut = Callable[[Sequence[Sample], Sequence[int], ShardSpec], RouteShard]


def shifted_rows(shard_routes: Cut) -> Cut:
    """One context rank's rows come one place too late."""

    def spoiled(data: Sequence[Sample], ids: Sequence[int], spec: ShardSpec) -> RouteShard:
        shard = shard_routes(data, ids, spec)
        return replace(shard, experts=np.roll(shard.experts, 1, axis=0)) if spec.context_rank == 1 else shard

    return spoiled


def swapped_layers(shard_routes: Cut) -> Cut:
    """In sample 5's micro-batch the first stage gets the second one's layer."""

    def spoiled(data: Sequence[Sample], ids: Sequence[int], spec: ShardSpec) -> RouteShard:
        if 5 in ids and spec.columns == (0,) and spec.context_rank == 0:
            return replace(shard_routes(data, ids, replace(spec, columns=(1,))), columns=spec.columns)
        return shard_routes(data, ids, spec)

    return spoiled


def exchanged_ranks(shard_routes: Cut) -> Cut:
    """Each context rank gets the other's share."""
    return lambda data, ids, spec: shard_routes(data, ids, replace(spec, context_rank=1 - spec.context_rank))


@pytest.mark.long
async def test_spoiled_routes_are_found(
    run_config: Config, make_sample: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two context ranks by two pipeline stages. There micro-batches overtake each other: one is recomputed after the
    next one's forward pass."""
    config = run_config(parallel={"world_size": 4, "context": 2, "pipeline": 2}, recompute="full")
    data = samples(make_sample)
    faults = {"shifted": shifted_rows, "swapped": swapped_layers, "exchanged": exchanged_ranks}
    async with RayTrainer(traced(config, tmp_path, 1)) as trainer:
        await trainer.step(data, measure_without_replay=False, step=1)
        reports = {"sound": check(tmp_path)}
        for name, fault in faults.items():  # the same step again, each time: it forgets its earlier trace
            monkeypatch.setattr(ray_trainer, "shard_routes", fault(shard_routes))
            if name == "exchanged":
                with pytest.raises(TrainerError, match="routes do not belong to the tokens"):
                    await trainer.step(data, measure_without_replay=False, step=1)
            else:
                await trainer.step(data, measure_without_replay=False, step=1)  # the trainer itself can't tell
            reports[name] = check(tmp_path)
    assert reports["sound"].holds, str(reports["sound"].breaks[0])
    assert tally(reports["sound"], HandOver.FETCH) == dict.fromkeys(STAGES, 4 * len(LENGTHS))

    ranks = {info.rank: info.shard for info in trainer.workers.infos}
    first = reports["shifted"].breaks[0]
    assert (first.hand_over, first.stage, first.step) == (HandOver.FETCH, "prev-logprob", 1)
    assert {ranks[b.rank].context_rank for b in reports["shifted"].breaks if b.rank is not None} == {1}
    assert first.row is not None
    assert "the row before" in first.what
    first = reports["swapped"].breaks[0]
    assert (first.hand_over, first.layer) == (HandOver.FETCH, 1)
    assert first.rank is not None
    assert (ranks[first.rank].columns, ranks[first.rank].context_rank) == ((0,), 0)
    assert {b.sample for b in reports["swapped"].breaks if b.hand_over is HandOver.FETCH} >= {5}
    first = reports["exchanged"].breaks[0]
    assert (first.hand_over, first.stage) == (HandOver.FETCH, "prev-logprob")
    assert any("routes do not belong to the tokens" in b.what for b in reports["exchanged"].breaks)
