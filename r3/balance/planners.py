"""One function for all planners that a config can name (``train.balance.planner``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from r3.balance.baselines import eplb_fixed_owners, sequential, shadow
from r3.balance.plan import ExpertLayout, Ints, PlanArrays, PlanError
from r3.balance.transport import transport

Planner = Literal["foremoe", "eplb", "shadow", "sequential"]


@dataclass(frozen=True, eq=False)
class PlannerOptions:
    """How a pass is planned.

    ``link_slots``: how many of a rank's X borrowed slots ``foremoe`` uses to reduce traffic between nodes (None: half
    of them, at most 2). ``within_node``: ``foremoe`` borrows no expert from another node, as an update requires whose
    weights and gradients are exchanged within nodes. ``expected``: ``[L, E]``, the loads of the last step, by which
    ``eplb`` places replicas (None, in the first step: no replicas).
    """

    planner: Planner = "foremoe"
    link_slots: int | None = None
    within_node: bool = False
    expected: Ints | None = None

    def slots_for_links(self, layout: ExpertLayout) -> int:
        """Returns ``link_slots`` or its default. Raises PlanError if it exceeds the layout's borrowed slots."""
        if self.link_slots is None:
            return min(layout.slots // 2, 2)
        if not 0 <= self.link_slots <= layout.slots:
            raise PlanError(
                f"{self.link_slots} slots for links, a rank borrows {layout.slots}: expected 0 to {layout.slots}"
            )
        return self.link_slots


def plan_pass(counts: Ints, layout: ExpertLayout, options: PlannerOptions) -> PlanArrays:
    """Returns plans for the foreseen tokens ``counts``, int32 ``[M, L, R, E]``: equal counts give equal plans.

    Raises PlanError if the shape of ``counts`` does not match ``layout``, and for an unknown planner.
    """
    if counts.ndim != 4 or counts.shape[2:] != (layout.ranks, layout.experts):
        raise PlanError(f"counts are {counts.shape}, expected [M, L, {layout.ranks}, {layout.experts}]")
    match options.planner:
        case "foremoe":
            links = options.slots_for_links(layout)
            return transport(counts, layout, link_slots=links, within_node=options.within_node)
        case "shadow":
            return shadow(counts, layout)
        case "eplb" if options.expected is not None:
            return eplb_fixed_owners(counts, layout, options.expected)
        case "eplb" | "sequential":
            return sequential(counts, layout)
    raise PlanError(f"planner {options.planner!r} is not known: expected foremoe, eplb, shadow or sequential")
