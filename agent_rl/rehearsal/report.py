"""A rehearsal as tables: memory, work and waits by phase, bytes by group, beside what ``agent-rl plan`` says."""

from __future__ import annotations

from functools import partial

from rich.console import Console
from rich.table import Table

from agent_rl.capacity.plan import GIB, gib
from agent_rl.config import RunConfig
from agent_rl.rehearsal.job import RankRecord
from agent_rl.rehearsal.run import Rehearsed, planned


def print_rehearsal(config: RunConfig, results: list[Rehearsed]) -> None:
    """Print to standard output, rank by rank."""
    console, plan = Console(soft_wrap=True), planned(config)
    for result in results:
        depths = " and ".join(str(record.layers) for record in result.records)
        seconds = sum(record.seconds for record in result.records)
        console.print(
            f"rank {result.rank} of {config.train.parallel.world_size}: {config.train.microbatch_tokens} tokens, "
            f"{depths} layers rehearsed in {seconds:.0f} s, said of {result.depth}; not run on a GPU",
            highlight=False,
        )
        if result.fault is not None:
            continue
        console.print(_phases(result))
        console.print(_groups(result, config.hardware.gpus_per_host))
        static = plan.weights + plan.gradients + plan.optimizer
        for name, found, said in (
            ("weights, gradients and optimizer", result.whole(lambda record: record.static), static),
            ("peak", result.whole(lambda record: record.peak), plan.total),
        ):
            console.print(
                f"{name}: {found / GIB:.2f} GiB rehearsed, {said / GIB:.2f} planned: planned over rehearsed "
                f"{said / found:.2f}",
                highlight=False,
            )
        left, pinned = result.whole(lambda record: record.left), result.whole(lambda record: record.pinned)
        console.print(f"left of a step after it: {gib(left)}; host memory locked: {gib(pinned)}", highlight=False)


def _phases(result: Rehearsed) -> Table:
    table = Table(title="phase", title_justify="left")
    for column in ("", "peak, GiB", "TFLOP", "waits of the host", "waits a layer"):
        table.add_column(column, justify="right" if column else "left")
    for name in result.records[0].phases:
        table.add_row(name, *_row(result, name))
    return table


def _row(result: Rehearsed, name: str) -> tuple[str, ...]:
    return (
        f"{result.whole(lambda record: record.phases[name].peak) / GIB:.2f}",
        f"{result.whole(lambda record: record.phases[name].flops) / 1e12:.2f}",
        f"{result.whole(lambda record: record.phases[name].syncs):.0f}",
        f"{result.a_layer(lambda record: record.phases[name].syncs):.1f}",
    )


def _groups(result: Rehearsed, gpus_per_host: int) -> Table:
    table = Table(title="sent in a step and its snapshot and export, by group", title_justify="left")
    for column in ("group", "ranks", "over hosts", "sent"):
        table.add_column(column, justify="right" if column in ("ranks", "sent") else "left")
    for name, ranks in result.records[-1].groups.items():
        size = result.whole(partial(sent_by, group=name))
        if size:
            over = len({rank // gpus_per_host for rank in ranks}) > 1
            table.add_row(name, str(len(ranks)), "yes" if over else "no", gib(size))
    return table


def sent_by(record: RankRecord, group: str) -> int:
    """Bytes that left the rank in ``group``, in all phases."""
    return sum(phase.sent.get(group, 0) for phase in record.phases.values())
