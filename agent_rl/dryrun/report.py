"""Prints a dry run as tables: memory, FLOPs, waits and seconds by phase, bytes by group, beside the plan's figures."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from typing import get_args

from rich.console import Console
from rich.table import Table

from agent_rl.config import RunConfig
from agent_rl.dryrun.job import ENGINE_GROUP, STEP_PHASES, WEIGHT_PHASES, Owner, RankRecord
from agent_rl.dryrun.run import DryRunResult, PlannedFigures, planned_figures
from agent_rl.planner.assumptions import Assumptions
from agent_rl.planner.hardware import GPUS, Gpu
from agent_rl.planner.plan import GIB, gib

_OWNERS: tuple[Owner, ...] = get_args(Owner)


def print_dry_run(config: RunConfig, results: list[DryRunResult]) -> None:
    """Print the results to standard output, rank by rank."""
    console = Console(soft_wrap=True)
    for result in results:
        depths = " and ".join(str(record.layers) for record in result.records)
        seconds = sum(record.seconds for record in result.records)
        console.print(
            f"rank {result.rank} of {config.train.parallel.world_size}: {config.train.microbatch_tokens} tokens, "
            f"{depths} layers simulated in {seconds:.0f} s, figures for {result.depth} layers; not run on a GPU",
            highlight=False,
        )
        if result.fault is not None:
            continue
        plan = planned_figures(config, rank=result.rank, skew=result.skew, layers=result.depth)
        for table in (_phases(config, result, plan), _owners(result, plan), _groups(config, result, plan)):
            console.print(table)
        for line in _lines(config, result, plan):
            console.print(line, highlight=False)


def _phases(config: RunConfig, result: DryRunResult, plan: PlannedFigures) -> Table:
    name = config.hardware.gpu
    least = ("products, s", "roofline, s", "sending, s")
    columns = ("peak, GiB", "TFLOP", "planned", *least, "expected, s", "waits", "waits a layer")
    table = _table(
        f"phases, with the least seconds on a GPU {name}, and those that agent-rl plan --time expects", *columns
    )
    works = {"old log-probs": plan.step.logprobs, "reference": plan.step.logprobs, "update": plan.step.update}
    for phase in result.records[0].phases:
        table.add_row(phase, *_phase(config, result, phase, works.get(phase)))
    return table


def _phase(config: RunConfig, result: DryRunResult, phase: str, work: float | None) -> Iterator[str]:
    gpu, extrapolate = GPUS[config.hardware.gpu], result.extrapolate
    flops = extrapolate(lambda record: record.phases[phase].flops)
    yield f"{result.phase_peak(phase) / GIB:.2f}"
    yield f"{flops / 1e12:.2f}"
    yield "" if work is None else f"{work / 1e12:.2f}"
    yield f"{flops / gpu.flops[config.train.dtype]:.2f}"
    yield f"{extrapolate(lambda record: record.phases[phase].seconds):.2f}"
    yield f"{extrapolate(partial(_sending, config=config, phase=phase)):.2f}"
    yield f"{_expected(config, result, phase):.2f}"
    yield f"{extrapolate(lambda record: record.phases[phase].syncs):.0f}"
    yield f"{result.per_layer(lambda record: record.phases[phase].syncs):.1f}"


def _expected(config: RunConfig, result: DryRunResult, phase: str) -> float:
    """Seconds at the efficiencies that the plan assumes: those of the slowest of products with attention, the GPU's
    memory, and links."""
    assume, extrapolate = Assumptions.of(config, "cuda"), result.extrapolate
    peak = GPUS[config.hardware.gpu].flops[config.train.dtype]
    attention = extrapolate(lambda record: record.phases[phase].attention)
    products = extrapolate(lambda record: record.phases[phase].flops) - attention
    return max(
        attention / peak / assume["attention"] + products / peak / assume["products"],
        extrapolate(lambda record: record.phases[phase].seconds) / assume["memory"],
        extrapolate(partial(_sending, config=config, phase=phase)) / assume["links"],
    )


def _sending(record: RankRecord, config: RunConfig, phase: str) -> float:
    """Seconds of a phase's collectives at link speed, one after the other."""
    rates = {name: _rate(config, ranks) for name, ranks in record.groups.items()}
    network = GPUS[config.hardware.gpu].network
    return sum(size / rates.get(name, network) for name, size in record.phases[phase].sent.items())


def _spans_nodes(config: RunConfig, ranks: list[int]) -> bool:
    return len({rank // config.hardware.gpus_per_node for rank in ranks}) > 1


def _rate(config: RunConfig, ranks: list[int]) -> float:
    """Bytes per second that a rank sends in a group."""
    gpu: Gpu = GPUS[config.hardware.gpu]
    return gpu.network if _spans_nodes(config, ranks) else gpu.link


def _owners(result: DryRunResult, plan: PlannedFigures) -> Table:
    """Memory by owner at each phase's peak; the planned row refers to the update."""
    owners = [owner for owner in _OWNERS if any(p.owners.get(owner) for p in result.records[-1].phases.values())]
    table = _table("memory by owner at a phase's peak, GiB", *owners)
    for phase in result.records[0].phases:
        sizes = (result.extrapolate(partial(_owned, phase=phase, owner=owner)) for owner in owners)
        table.add_row(phase, *(f"{size / GIB:.2f}" for size in sizes))
    rank = plan.rank
    expected: dict[Owner, int] = {
        "weights": rank.weights, "gradients": rank.gradients, "optimizer": rank.optimizer,
        "activations": rank.activations, "temporaries": rank.peak + rank.borrowed,
    }  # fmt: skip
    table.add_row("planned", *(f"{expected[owner] / GIB:.2f}" if owner in expected else "" for owner in owners))
    return table


def _owned(record: RankRecord, phase: str, owner: Owner) -> int:
    return record.phases[phase].owners.get(owner, 0)


def _groups(config: RunConfig, result: DryRunResult, plan: PlannedFigures) -> Table:
    columns = ("ranks", "across nodes", "a step", "planned", "s", "weights out", "s")
    table = _table("sent by this rank, by group", *columns)
    for name, ranks in result.records[-1].groups.items():
        step, out = (
            result.extrapolate(partial(sent_by, group=name, phases=phases)) for phases in (STEP_PHASES, WEIGHT_PHASES)
        )
        expected = gib(plan.step.exchanged) if "expert" in name.split(", ") else ""
        over, rate = "yes" if _spans_nodes(config, ranks) else "no", _rate(config, ranks)
        if step or out:
            seconds = f"{step / rate:.2f}", f"{out / rate:.2f}"
            table.add_row(name, str(len(ranks)), over, gib(step), expected, seconds[0], gib(out), seconds[1])
    return table


def _lines(config: RunConfig, result: DryRunResult, plan: PlannedFigures) -> Iterator[str]:
    rank = plan.rank
    for name, simulated, expected in (
        ("weights, gradients and optimizer", result.extrapolate(lambda record: record.static), rank.static),
        ("peak", result.peak, plan.peak),
    ):
        yield (
            f"{name}: {simulated / GIB:.2f} GiB simulated, {expected / GIB:.2f} planned: ratio planned to simulated "
            f"{expected / simulated:.2f}"
        )
    if buckets := result.extrapolate(lambda record: record.phases["publish"].calls.get(ENGINE_GROUP, 0)):
        size = result.extrapolate(lambda record: record.phases["publish"].sent[ENGINE_GROUP])
        beside = max(record.phases["publish"].peak - record.static for record in result.records)
        yield (
            f"weight sync: {gib(size)} in {buckets:.0f} buckets of {config.engine.bucket_mb(cuda=True):g} MiB, "
            f"{gib(beside)} beside the state; planned {gib(plan.publish.bytes)} in {plan.publish.buckets}, "
            f"{gib(plan.publish.memory)}"
        )
    retained, pinned = (result.extrapolate(attrgetter(name)) for name in ("retained", "pinned"))
    yield f"retained after a step: {gib(retained)}; pinned host memory: {gib(pinned)}"


def sent_by(record: RankRecord, group: str, phases: tuple[str, ...] = STEP_PHASES) -> int:
    """Returns the bytes that the rank sent in ``group`` during ``phases``."""
    return sum(phase.sent.get(group, 0) for name, phase in record.phases.items() if name in phases)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    return table
