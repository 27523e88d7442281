"""The planners that a config may name, behind one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from r3.balance.baselines import eplb_around_homes, sequential, shadow
from r3.balance.plan import Grid, Ints, PlanError, Plans
from r3.balance.transport import transport

Planner = Literal["foremoe", "eplb", "shadow", "sequential"]


@dataclass(frozen=True, eq=False)
class Options:
    """How a pass is planned.

    ``link_slots``: how many of a rank's X borrowed slots the planner ``foremoe`` spends on sparing the links between
    machines (None: half of them, at most 2). ``within_node``: it borrows no expert from another machine, as an
    update must whose weights and gradients are exchanged within one. ``expected``: ``[L, E]``, the loads of the last
    step, by which ``eplb`` places replicas (None, as in the first step: it places none).
    """

    planner: Planner = "foremoe"
    link_slots: int | None = None
    within_node: bool = False
    expected: Ints | None = None

    def slots_for_links(self, grid: Grid) -> int:
        """``link_slots``, or what it is by default. Raises PlanError for more than a rank borrows."""
        if self.link_slots is None:
            return min(grid.slots // 2, 2)
        if not 0 <= self.link_slots <= grid.slots:
            raise PlanError(
                f"{self.link_slots} slots for links, a rank borrows {grid.slots}: expected 0 to {grid.slots}"
            )
        return self.link_slots


def plan_pass(counts: Ints, grid: Grid, options: Options) -> Plans:
    """Plans for the foreseen tokens ``counts``, int32 ``[M, L, R, E]``; ranks that have the same counts plan the same.

    Raises PlanError for counts of another shape than the grid's, and for a planner that is not known.
    """
    if counts.ndim != 4 or counts.shape[2:] != (grid.ranks, grid.experts):
        raise PlanError(f"counts are {counts.shape}, expected [M, L, {grid.ranks}, {grid.experts}]")
    match options.planner:
        case "foremoe":
            links = options.slots_for_links(grid)
            return transport(counts, grid, link_slots=links, within_node=options.within_node)
        case "shadow":
            return shadow(counts, grid)
        case "eplb" if options.expected is not None:
            return eplb_around_homes(counts, grid, options.expected)
        case "eplb" | "sequential":
            return sequential(counts, grid)
    raise PlanError(f"planner {options.planner!r} is not known: expected foremoe, eplb, shadow or sequential")
