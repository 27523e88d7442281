"""Prints a plan as tables or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from agent_rl.planner.memory_model import parameters
from agent_rl.planner.plan import Item, PlannedResource, RunPlan, gib


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


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Returns the plan with its totals, sizes in bytes."""
    resources = [asdict(resource) | {"total": resource.total, "fits": resource.fits} for resource in plan.resources]
    return asdict(plan) | {"parameters": parameters(plan.model), "resources": resources, "refusal": plan.refusal()}


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
