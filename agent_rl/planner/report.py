"""A plan as tables, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from agent_rl.planner.memory_model import parameters
from agent_rl.planner.plan import Item, PlannedPlace, RunPlan, gib


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
    for place in plan.places:
        console.print(_place_table(place))
    console.print(_table("what travels", plan.traffic))
    for advice in plan.advice:
        outcome = "fits" if advice.enough else "is still too much"
        console.print(f"{advice.place}: {advice.change} makes it {gib(advice.total)}, which {outcome}", highlight=False)
    for note in plan.notes:
        console.print(f"note: {note}", highlight=False)


def as_json(plan: RunPlan) -> dict[str, Any]:
    """The plan with its totals, sizes in bytes."""
    places = [asdict(place) | {"total": place.total, "fits": place.fits} for place in plan.places]
    return asdict(plan) | {"parameters": parameters(plan.model), "places": places, "refusal": plan.refusal()}


def _place_table(place: PlannedPlace) -> Table:
    many = f" (x {place.count})" if place.count > 1 else ""
    table = _table(f"{place.name}{many}", place.items)
    limit = "" if place.capacity is None else f"of {gib(place.capacity)}"
    table.add_section()
    style = "" if place.fits else "bold red"
    table.add_row("total", gib(place.total), limit + ("" if place.fits else ": does not fit"), style=style)
    return table


def _table(title: str, items: tuple[Item, ...]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    table.add_column(min_width=18)
    table.add_column(justify="right", min_width=11)
    table.add_column()
    for item in items:
        table.add_row(item.what, gib(item.size), item.note)
    return table
