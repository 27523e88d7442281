"""How even plans make the load of expert ranks, what crosses the links, and how long planning takes.

``python benchmarks/bench_balance.py`` prints tables for docs/research/benchmarks.md and one JSON object; with
``--quick`` on a quarter of the layers. Load is the fullest rank's over the mean, median and 95th percentile over the
micro-batches and layers of one step; link is the busiest one from one machine to another, in thousands of tokens, the
median; borrowed is the mean a rank; time is one core's processor time an instance (a micro-batch of a layer) in a batch
of 768, the fastest of some rounds. Counts come from the generator of ``tests/support/balance_workloads.py``, as large
models are not at hand, and from routes of the quickstart that were captured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import checkout  # noqa: F401
import numpy as np
from balance_stages import Stages, staged, update_within_machine
from support.balance_workloads import REGIMES, Pass, captured, node_floor, skewed_steps
from timing import fastest

from r3.balance import ExpertLayout, PlanArrays, PlannerOptions, plan_pass
from r3.balance.baselines import eplb, eplb_fixed_owners, sequential
from r3.balance.cost import borrowed, busiest_link, by_node, imbalance, rank_load
from r3.balance.plan import Ints, measured_placement

SEED, ROUNDS = 2, 5
GRIDS = {"EP8": (128, 8, 1), "EP16": (128, 16, 2), "EP32": (256, 32, 4)}


def grid_of(name: str, slots: int = 4) -> ExpertLayout:
    experts, ranks, nodes = GRIDS[name]
    return ExpertLayout(experts, ranks, slots, tuple(rank * nodes // ranks for rank in range(ranks)))


def two_steps(regime: str, layout: ExpertLayout, size: Pass) -> tuple[Ints, Ints]:
    steps = skewed_steps(REGIMES[regime], layout, size, SEED)
    return next(steps), next(steps)


def milliseconds(plan: Callable[[], PlanArrays], instances: int, rounds: int) -> float:
    """Processor time of one instance, the fastest of ``rounds``."""
    return 1e3 * fastest({"plan": plan}, rounds)["plan"] / instances


class Report:
    """Markdown tables as they come, and every figure by name."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, float]] = {}

    def head(self, title: str, *columns: str) -> None:
        print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")

    def row(self, name: str, plan: Callable[[], PlanArrays], floor: float = 1.0, rounds: int = 1) -> None:
        plans = plan()
        plans.check()
        load = imbalance(rank_load(plans)) / floor
        link = float(np.median(busiest_link(plans))) / 1e3
        spent = milliseconds(plan, load.size, rounds)
        figures = {"median": np.median(load), "p95": np.quantile(load, 0.95), "link": link}
        figures |= {"borrowed": borrowed(plans).mean(), "ms": spent}
        self.figures[name] = {key: round(float(value), 4) for key, value in figures.items()}
        print(
            f"| {name} | {figures['median']:.3f} | {figures['p95']:.3f} | {link:.0f}K | {figures['borrowed']:.1f} "
            f"| {spent:.3f} |",
            flush=True,
        )


COLUMNS = ("median load", "p95", "link", "borrowed a rank", "ms")


def planner_table(report: Report, size: Pass) -> None:
    report.head("The planner, 4 slots", "experts, regime, pass", *COLUMNS)
    for name in GRIDS:
        for regime in REGIMES:
            layout = grid_of(name)
            _, counts = two_steps(regime, layout, size)
            case = f"{name}, {regime}"
            report.row(f"{case}, unbalanced", lambda c=counts, g=layout: sequential(c, g))
            report.row(
                f"{case}, recompute", lambda c=counts, g=layout: plan_pass(c, g, PlannerOptions()), rounds=ROUNDS
            )
            if layout.nodes > 1:
                inside = PlannerOptions(within_node=True)
                floor = node_floor(layout, counts)
                report.row(
                    f"{case}, update within a machine, load over its floor of {np.median(floor):.3f}",
                    lambda c=counts, g=layout, o=inside: plan_pass(c, g, o),
                    floor,
                    ROUNDS,
                )


def comparison(layout: ExpertLayout, last: Ints, counts: Ints) -> Iterator[tuple[str, Callable[[], PlanArrays]]]:
    """Others' planners by name."""
    loads, now, free = last.sum(axis=(0, 2)), counts.sum(axis=2), replace(layout, slots=layout.experts_per_rank + 2)
    yield "sequential", lambda: sequential(counts, layout)
    yield "EPLB, last step, 2 replicas a rank", lambda: eplb(counts, free, loads, 2)
    yield "EPLB, with foresight", lambda: eplb(counts, free, now, 2)
    yield "EPLB around homes, last step (`planner: eplb`)", lambda: eplb_fixed_owners(counts, layout, loads)
    yield "EPLB around homes, with foresight", lambda: eplb_fixed_owners(counts, layout, now)
    yield "shadowing (`planner: shadow`)", lambda: plan_pass(counts, layout, PlannerOptions("shadow"))
    yield "transport (`planner: foremoe`)", lambda: plan_pass(counts, layout, PlannerOptions())
    yield "transport without slots for links", lambda: plan_pass(counts, layout, PlannerOptions(link_slots=0))


def compared_table(report: Report, size: Pass) -> None:
    layout = grid_of("EP16")
    last, counts = two_steps("main", layout, size)
    report.head("Against others, EP16 on 2 machines, regime main", "planner", *COLUMNS)
    for name, plan in comparison(layout, last, counts):
        report.row(name, plan)
    sources = by_node(layout, counts.sum(axis=3))
    sent = np.maximum(sources - sources.mean(axis=2, keepdims=True), 0).max(axis=2)
    print(f"| oracle: every expert everywhere | 1.000 | 1.000 | {np.median(sent) / 1e3:.0f}K | 120.0 | |")


def ablation_table(report: Report, size: Pass) -> None:
    contiguous = grid_of("EP16", slots=10)
    last, counts = two_steps("main", contiguous, size)
    layout, all_four = replace(contiguous, placement=measured_placement(last.sum(axis=(0, 2)), contiguous)), Stages()
    report.head("The paper's stages, EP16 on 2 machines, regime main, 2 replicas a rank", "stages", *COLUMNS)
    report.row("1, 2, 3, 4", lambda: staged(counts, layout, all_four))
    report.row("without 1 (measured homes)", lambda: staged(counts, contiguous, all_four))
    report.row("without 2 (swaps)", lambda: staged(counts, layout, replace(all_four, swaps=0)))
    report.row("without 3 (replicas)", lambda: staged(counts, layout, replace(all_four, replicas=0)))
    report.row("without 4 (shares)", lambda: staged(counts, layout, replace(all_four, sweeps=0)))
    report.row("1 alone", lambda: staged(counts, layout, Stages(0, 0, 0)))
    report.row("update within a machine, Algorithm 3", lambda: update_within_machine(counts, layout, 2))
    inside, slots = PlannerOptions(within_node=True), replace(layout, slots=4)
    report.row("update within a machine, transport, 4 slots", lambda: plan_pass(counts, slots, inside))
    report.row("update across machines, transport, 4 slots", lambda: plan_pass(counts, slots, PlannerOptions()))
    floors = [float(np.median(node_floor(g, counts))) for g in (contiguous, layout)]
    report.figures["floor"] = {"contiguous": round(floors[0], 4), "measured": round(floors[1], 4)}
    print(f"\nFloor within a machine: {floors[0]:.3f} with contiguous homes, {floors[1]:.3f} with measured ones.")


def captured_table(report: Report) -> None:
    report.head("Captured routes of the quickstart, 8 experts, one borrowed slot a rank", "ranks, planner", *COLUMNS)
    for ranks in (2, 4):
        layout, counts = ExpertLayout(8, ranks, 1), captured(ranks)
        report.row(f"EP{ranks}, sequential", lambda c=counts, g=layout: sequential(c, g))
        last = counts.sum(axis=(0, 2))
        report.row(f"EP{ranks}, EPLB around homes", lambda c=counts, g=layout, e=last: eplb_fixed_owners(c, g, e))
        report.row(f"EP{ranks}, transport", lambda c=counts, g=layout: plan_pass(c, g, PlannerOptions()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="A quarter of the layers.")
    size, report = Pass(layers=12) if parser.parse_args().quick else Pass(), Report()
    planner_table(report, size)
    compared_table(report, size)
    ablation_table(report, size)
    captured_table(report)
    print(json.dumps(report.figures))


if __name__ == "__main__":
    main()
