"""Prints a plan as tables or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from agent_rl.planner.memory_model import parameters
from agent_rl.planner.plan import Item, PhaseTime, PlannedResource, RunPlan, TimePlan, gib


def print_plan(plan: RunPlan, *, json: bool) -> None:
    """Print ``plan`` to standard output."""
    if json:
        print(orjson.dumps(as_json(plan), option=orjson.OPT_INDENT_2).decode())
        return
    console = Console(soft_wrap=True)
    model = plan.model
    console.print(
        f"{plan.name}: {parameters(model) / 1e6:,.1f} million parameters, {model.num_layers} layers, "
        f"{len(model.moe_layer_ids)} with {model.num_experts} experts, top-{model.top_k}; {plan.device}",
        highlight=False,
    )
    for resource in plan.resources:
        console.print(_resource_table(resource))
    console.print(_table("traffic", plan.traffic))
    for advice in plan.advice:
        outcome = "fits" if advice.enough else "is still too much"
        console.print(f"{advice.resource}: {advice.change} gives {gib(advice.total)}, which {outcome}", highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False)
    if plan.time is not None:
        for table in _time_tables(plan.time):
            console.print(table)
        console.print(_total(plan.time), highlight=False)
        console.print(_assumptions(plan.time))


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Returns the plan with its totals, sizes in bytes."""
    resources = [asdict(resource) | {"total": resource.total, "fits": resource.fits} for resource in plan.resources]
    values = asdict(plan) | {"parameters": parameters(plan.model), "resources": resources, "refusal": plan.refusal()}
    if plan.time is not None:
        values["time"] |= {"step": plan.time.step, "hours": plan.time.hours, "gpu_hours": plan.time.gpu_hours}
    return values


def _time_tables(time: TimePlan) -> Iterator[Table]:
    """The phases of a step, and what is outside of the steps."""
    total = sum(phase.seconds for phase in time.phases)
    yield _phase_table("seconds of a step", time.phases, total)
    yield _phase_table("seconds outside of the steps", time.outside, sum(phase.seconds for phase in time.outside))


def _phase_table(title: str, phases: tuple[PhaseTime, ...], total: float) -> Table:
    table = Table("phase", title=title, title_justify="left", min_width=60)
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("bound by", overflow="fold")
    for phase in phases:
        table.add_row(phase.name, f"{phase.seconds:,.2f}", f"{phase.seconds / total:.0%}", phase.bound)
    return table


def _total(time: TimePlan) -> str:
    ahead = ", rollout and training at once" if time.ahead else ""
    gpu_hours = f"; {time.gpu_hours:,.0f} GPU hours on {time.gpus} GPUs" if time.gpus else ""
    return f"time: {time.step:,.1f} s a step{ahead}; {time.hours:,.2f} hours for {time.steps} steps{gpu_hours}"


def _assumptions(time: TimePlan) -> Table:
    table = Table("assumption", title="assumptions (--assume NAME=VALUE)", title_justify="left", min_width=60)
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("source", overflow="fold")
    for each in time.assumptions:
        value = f"{each.value:,.0f}" if 1000 <= each.value < 1e6 else f"{each.value:.4g}"
        table.add_row(each.name, value, each.unit, each.source)
    return table


def _resource_table(resource: PlannedResource) -> Table:
    count = f" (x {resource.count})" if resource.count > 1 else ""
    table = _table(f"{resource.name}{count}", resource.items)
    limit = "" if resource.capacity is None else f"of {gib(resource.capacity)}"
    table.add_section()
    style = "" if resource.fits else "bold red"
    table.add_row("total", gib(resource.total), limit + ("" if resource.fits else ": does not fit"), style=style)
    return table


def _table(title: str, items: tuple[Item, ...]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    table.add_column(min_width=18)
    table.add_column(justify="right", min_width=11)
    table.add_column()
    for item in items:
        table.add_row(item.what, gib(item.size), item.note)
    return table
