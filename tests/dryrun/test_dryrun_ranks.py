"""Dry runs of a small model match the plan and detect each fault that is put back. Ranks of Qwen3-30B-A3B match the
plan too (`pytest -m exhaustive tests/dryrun`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.dryrun_ranks import config_of, dry_run_records, write_30b, write_model

from agent_rl.config import RunConfig
from agent_rl.dryrun.job import ENGINE_GROUP, RankRecord
from agent_rl.dryrun.report import print_dry_run, sent_by
from agent_rl.dryrun.run import DryRunResult, PlannedFigures, dry_run, planned_figures
from agent_rl.planner import memory_model as sizes
from agent_rl.planner.known_models import planned_model
from agent_rl.planner.memory_model import BYTES, pool_bytes, state_bytes

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(900)]

HOST = {"offload_optimizer": True, "optimizer_moments": "bfloat16", "offload_activations": True}
UNRECOMPUTED = {"lora": {"rank": 16}, "kl": {"coefficient": 0.1}, "recompute": "none"}
POOL = {"enabled": True, "slots": 2, "transfer": {"recompute": "pool", "update": "pool"}}
CRITIC = {"baseline": "critic", "advantage_scale": "batch", "critic": {"coefficient": 0.1}}
TAUGHT = {"distill": {"teacher": "http://teacher", "top_k": 64}, "echo": {}, "ema": {}}
EP4 = {"world_size": 4, "expert": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one GPU": (0, {"world_size": 1}),
    "TP2 EP4": (0, {"world_size": 8, "tensor": 2, "expert": 4}),
    "one GPU, on the host": (0, {"world_size": 1, "train": HOST}),
    "bfloat16 moments": (0, {**EP4, "train": {"optimizer_moments": "bfloat16"}}),
    "PP2, inputs on the host": (1, {"world_size": 2, "pipeline": 2, "train": {"offload_activations": True}}),
    "EP4, adapters": (3, {**EP4, "train": {"lora": {"rank": 8}}}),
    "one GPU, adapters": (0, {"world_size": 1, "train": UNRECOMPUTED}),
    "one GPU, float32": (0, {"world_size": 1, "train": {"dtype": "float32"}}),
    "EP8, whole optimizer": (3, {"world_size": 8, "expert": 8, "distributed_optimizer": False}),
    "EP8": (3, {"world_size": 8, "expert": 8}),
    "CP2 PP2 EP2": (7, {"world_size": 8, "context": 2, "pipeline": 2, "expert": 2}),
    "KL": (0, {"world_size": 1, "train": {"kl": {"coefficient": 0.1}}}),
    "balanced by exchange": (0, {**EP4, "train": {"balance": {"enabled": True, "slots": 2}}}),
    "balanced by a pool": (1, {**EP4, "train": {"balance": POOL}}),
    "allgather": (0, {"world_size": 2, "expert": 2, "dispatcher": "allgather"}),
    "colocated": (0, {**EP4, "colocate": True}),
    "a critic": (0, {"world_size": 1, "train": CRITIC}),
    "PP2 TP2, a critic": (3, {"world_size": 4, "pipeline": 2, "tensor": 2, "train": CRITIC}),
    "TP2, a teacher, observations, an average": (0, {"world_size": 2, "tensor": 2, "train": TAUGHT}),
    "nothing again": (0, {**EP4, "train": {"recompute": "none"}}),
    "experts again": (0, {**EP4, "train": {"recompute": "selective", "recompute_modules": ["moe"]}}),
}
ORDINARY = ("one GPU", "TP2 EP4", "one GPU, on the host")
Records, Configs = dict[str, RankRecord], dict[str, RunConfig]
Six = dict[str, tuple[RunConfig, dict[int, RankRecord]]]
Check = Callable[[RankRecord, RankRecord, PlannedFigures], bool]


def fails(text: str) -> Check:
    """The dry run names this call or reason."""
    return lambda record, sound, plan: record.fault is not None and text in record.fault


DETECTED: dict[str, Check] = {
    "a device without an index": fails("start: megatron/parallel.py"),
    "a router on the host": fails("Received torch.BFloat16Tensor"),
    "a table on the host": fails("cuda:0 and cpu"),
    "experts out of line": fails("to be multiple of 16 bytes, got 65"),
    "gates are kept": lambda record, sound, plan: record.retained > 100_000,
    "memory pinned in powers of two": lambda record, sound, plan: record.pinned == 1 << 22 > plan.rank.optimizer,
    "engines of one rank": fails("init_weights_update_group answered 400"),
    "a group destroyed within a broadcast": fails("destroyed, not aborted, within a broadcast"),
    "a wait more": lambda record, sound, plan: waits(record, "update") > waits(sound, "update"),
}
"""By fault, what a dry run reports where it is put back: of a rank, a sound one, and the plan."""
QUICK = tuple(DETECTED)[:6]


def on_host(config: RunConfig, plan: PlannedFigures) -> float:
    """Bytes of a host that a rank locks: for checkpoints of what is on the GPU, the KL reference, the pool of experts,
    the average of the weights, which checkpoints have too, and what lies there in place of the GPU."""
    train, rank = config.train, plan.rank
    each = 12 + 2 * 4 * (train.ema is not None)
    written = rank.optimizer * each / state_bytes(train)  # in float32, and in float32 the weights are the masters
    reference = rank.gradients * BYTES[train.dtype] / 4 if train.kl.coefficient else 0  # of what is trained
    return written + reference + pool_bytes(planned_model(config.model), train) + rank.offloaded + rank.inputs


def waits(record: RankRecord, phase: str) -> int:
    return record.phases[phase].syncs


@cache
def exhaustive_run(request: pytest.FixtureRequest) -> bool:
    return "exhaustive" in request.config.getoption("markexpr") and "not " not in request.config.getoption("markexpr")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Configs:
    model = write_model(tmp_path_factory.mktemp("dry-run") / "model")
    return {name: config_of(model, **options) for name, (_, options) in LAYOUTS.items()}


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, configs: Configs) -> Records:
    """By layout and by fault (on one GPU); the quick ones, or all."""
    every = exhaustive_run(request)
    layouts, faults = (LAYOUTS, DETECTED) if every else ((*ORDINARY, "colocated"), QUICK)
    jobs = {name: ("none", configs[name], LAYOUTS[name][0]) for name in layouts}
    jobs |= {fault: (fault, configs["one GPU"], 0) for fault in faults}
    return dict(zip(jobs, dry_run_records(list(jobs.values())), strict=True))


def some(names: Any, quick: Any) -> list[Any]:
    """All names as parameters, those that are not quick under the marker ``exhaustive`` alone."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", some(LAYOUTS, ORDINARY))
def test_a_layout_matches_the_plan(name: str, records: Records, configs: Configs) -> None:
    record, (rank, _), config = records[name], LAYOUTS[name], configs[name]
    plan, phases = planned_figures(config, rank=rank), record.phases
    assert record.fault is None
    assert record.retained < 4096, "of a step after it: a scale of the loss, and counters"
    assert record.static == pytest.approx(plan.rank.static, rel=0.05)
    assert record.pinned <= 1.02 * on_host(config, plan)
    if config.train.dtype == "bfloat16":  # attention in float32 computes the masked half too
        assert phases["old log-probs"].flops == pytest.approx(plan.step.logprobs, rel=5e-3)
        assert phases["update"].flops == pytest.approx(plan.step.update, rel=5e-3), "and the entropy's sum"
    fused = configs[name].train.dtype == "bfloat16"  # attention in float32 consists of products
    assert fused == (0 < phases["old log-probs"].attention < phases["old log-probs"].flops)
    for phase in phases.values():
        assert sum(phase.owners.values()) == phase.peak
    assert phases["update"].owners["weights"] == pytest.approx(plan.rank.weights, rel=0.05)


def test_offloading_moves_memory_from_the_gpu_to_the_host(records: Records, configs: Configs) -> None:
    there, here = records["one GPU, on the host"], records["one GPU"]
    plan, usual = planned_figures(configs["one GPU, on the host"]).rank, planned_figures(configs["one GPU"]).rank
    assert here.static - there.static == pytest.approx(usual.optimizer, rel=0.02)
    assert there.pinned == pytest.approx(plan.offloaded + plan.inputs, rel=0.02)
    assert plan.offloaded == pytest.approx(usual.optimizer * 8 / 12, rel=1e-6)
    fallen = here.phases["update"].peak - there.phases["update"].peak
    assert fallen >= usual.optimizer + usual.activations - plan.activations


def test_traffic_matches_the_formulas(records: Records, configs: Configs) -> None:
    record, plan = records["TP2 EP4"], planned_figures(configs["TP2 EP4"])
    expert = next(name for name in record.groups if "expert" in name.split(", "))
    small = record.phases["old log-probs"].calls[expert] * 8 * 8 * 8  # what ranks tell of their counts
    assert plan.step.exchanged <= sent_by(record, expert) <= plan.step.exchanged + 4 * small
    publish = record.phases["publish"]
    assert publish.sent[ENGINE_GROUP] == plan.publish.bytes
    assert publish.calls[ENGINE_GROUP] == plan.publish.buckets
    assert publish.peak - record.static <= plan.publish.memory


@pytest.mark.exhaustive
def test_each_pipeline_stage_sends_its_own_weights(records: Records, configs: Configs) -> None:
    name = "PP2, inputs on the host"
    record, plan = records[name], planned_figures(configs[name], rank=1)
    publish = record.phases["publish"]
    assert publish.sent[ENGINE_GROUP] == plan.publish.bytes != planned_figures(configs[name], rank=0).publish.bytes
    assert publish.calls[ENGINE_GROUP] == plan.publish.buckets
    assert publish.peak - record.static <= plan.publish.memory
    other = records["CP2 PP2 EP2"]
    assert ENGINE_GROUP not in other.phases["publish"].sent, "only the first rank of a stage sends"


def test_colocated_engines_read_all_weights_from_shared_memory(records: Records, configs: Configs) -> None:
    record, plan = records["colocated"], planned_figures(configs["colocated"])
    assert record.fault is None
    shared, sent = record.phases["shared publish"], record.phases["publish"]
    assert (shared.sent.get(ENGINE_GROUP, 0), sent.sent[ENGINE_GROUP]) == (0, plan.publish.bytes)
    assert 0 < shared.peak - record.static <= plan.publish.memory
    assert record.phases["refused shared publish"].peak <= shared.peak


def test_number_of_host_syncs_is_unchanged(records: Records) -> None:
    """Each wait of the host for the GPU leaves the GPU idle for a moment: more must be meant."""
    found = [[waits(records[name], phase) for phase in ("old log-probs", "update")] for name in ORDINARY]
    assert found == [[29, 37], [31, 40], [29, 37]]


@pytest.mark.parametrize("fault", some(DETECTED, QUICK))
def test_a_reintroduced_fault_is_detected(fault: str, records: Records, configs: Configs) -> None:
    plan, sound = planned_figures(configs["one GPU"]), records["one GPU"]
    assert DETECTED[fault](records[fault], sound, plan)
    assert not DETECTED[fault](sound, sound, plan)


def test_print_dry_run(records: Records, configs: Configs, capsys: pytest.CaptureFixture[str]) -> None:
    print_dry_run(configs["TP2 EP4"], [DryRunResult(0, 1.0, 2, (records["TP2 EP4"],))])
    printed = capsys.readouterr().out
    for text in ("memory by owner at a phase's peak", "the least seconds on a GPU H100 SXM", "weight sync: ", "expert"):
        assert text in printed


SIX: dict[str, tuple[dict[str, Any], int]] = {
    "one GPU": ({"world_size": 1}, 2),
    "EP8": ({"world_size": 8, "expert": 8}, 2),
    "TP4 EP8": ({"world_size": 32, "tensor": 4, "expert": 8}, 2),
    "CP4 EP8": ({"world_size": 32, "context": 4, "expert": 8}, 2),
    "TP2 EP4": ({"world_size": 8, "tensor": 2, "expert": 4}, 2),
    "TP2 CP2 PP2 EP8": ({"world_size": 64, "tensor": 2, "context": 2, "pipeline": 2, "expert": 8}, 4),
}


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> Six:
    """Two layers a stage of Qwen3-30B-A3B at 4,096 tokens, in six layouts: rank 0, and the first of the last stage."""
    directory = tmp_path_factory.mktemp("six")
    configs, jobs = {}, []
    for name, (parallel, layers) in SIX.items():
        configs[name] = config_of(write_30b(directory / str(layers), layers), 4096, **parallel)
        parallel = configs[name].train.parallel
        last = parallel.world_size - parallel.world_size // parallel.pipeline
        jobs += [(name, rank) for rank in sorted({0, last})]
    found = dry_run_records([("none", configs[name], rank) for name, rank in jobs])
    pairs = list(zip(jobs, found, strict=True))
    return {
        name: (config, {rank: record for (other, rank), record in pairs if other == name})
        for name, config in configs.items()
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SIX)
def test_six_layouts_are_planned_slightly_above_the_dry_run(name: str, six: Six) -> None:
    config, records = six[name]
    for rank, record in records.items():
        plan = planned_figures(config, rank=rank)
        assert record.fault is None
        assert record.retained < 4096
        assert record.phases["old log-probs"].flops == pytest.approx(plan.step.logprobs, rel=1e-3)
        assert record.phases["update"].flops == pytest.approx(plan.step.update, rel=1e-3)
        for group in record.groups:
            if set(group.split(", ")) == {"expert", "tensor x expert"}:  # no gradients are sent there
                assert sent_by(record, group) == pytest.approx(plan.step.exchanged, rel=2e-3)
    assert 1.0 <= planned_figures(config).peak / max(record.peak for record in records.values()) <= 1.15


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "tokens"), [("TP4 EP8", 65536), ("TP2 CP2 PP2 EP8", 65536)])
def test_forty_eight_layers_are_extrapolated(name: str, tokens: int) -> None:
    config = config_of("models/Qwen3-30B-A3B", tokens, **SIX[name][0])
    results = dry_run(config, ranks=(), skew=1.0, layers="2,4")
    assert [result.fault for result in results] == [None] * len(results)
    assert 1.0 <= planned_figures(config).peak / max(result.peak for result in results) <= 1.15


@pytest.mark.exhaustive
def test_an_incomplete_plan_is_detected(monkeypatch: pytest.MonkeyPatch, six: Six) -> None:
    """Without Adam's step the plan of a step on one GPU is less than the dry run."""
    config, records = six["one GPU"]
    assert planned_figures(config).rank.total >= records[0].peak
    monkeypatch.setattr(sizes.RankBytes, "peak", property(lambda self: max(self.logits, self.layer)))
    assert planned_figures(config).rank.total < records[0].peak


@pytest.mark.exhaustive
def test_chunks_sized_for_a_cpu_are_detected(tmp_path: Path) -> None:
    """Log-probs of 110 tokens at once read the output weight 600 times: twice the seconds at the GPU's speed."""
    config = config_of(write_30b(tmp_path / "model", 1), 16384, world_size=8, expert=8)
    faulty, sound = dry_run_records([("chunks of a CPU", config, 0), ("none", config, 0)])
    assert faulty.phases["update"].seconds > 1.2 * sound.phases["update"].seconds
