"""Expert layouts and plans: validation, quotas, slots and checksums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from balance_grids import any_plans, layouts, skewed_counts
from hypothesis import given
from hypothesis import strategies as st

from r3.balance import ExpertLayout, LayerPlan, PlanArrays, PlanError

seeds = st.integers(0, 2**32 - 1)


drawn_plans = st.builds(lambda layout, seed: any_plans(layout, skewed_counts(layout, seed), seed), layouts(), seeds)
"""Random plans for skewed counts."""


@given(plans=drawn_plans)
def test_quotas_conserve_every_source_and_fill_every_target(plans: PlanArrays) -> None:
    plans.check()
    plan = plans.layer_plan(1, 0)
    quotas = np.stack([plan.quota(source) for source in range(plan.layout.ranks)])
    assert quotas.dtype == np.int32
    assert (quotas >= 0).all()
    np.testing.assert_array_equal(quotas.sum(axis=2), plan.counts)
    np.testing.assert_array_equal(quotas.sum(axis=0), plan.load)


@given(plans=drawn_plans)
def test_a_target_takes_its_own_tokens_first_then_those_of_its_node(plans: PlanArrays) -> None:
    layout, plan = plans.layout, plans.layer_plan(0, 0)
    quotas = np.stack([plan.quota(source) for source in range(layout.ranks)])
    own = quotas[np.arange(layout.ranks), :, np.arange(layout.ranks)].T
    np.testing.assert_array_equal(own, np.minimum(plan.counts.T, plan.load))
    same = np.equal.outer(layout.node_of_rank, layout.node_of_rank)
    for node in range(layout.nodes):
        inside = np.array(layout.node_of_rank) == node
        least = np.minimum(plan.counts[inside].sum(axis=0), plan.load[:, inside].sum(axis=1))
        kept = (quotas * same[:, None])[inside].sum(axis=(0, 2))
        np.testing.assert_array_equal(kept, least, "tokens leave a node only if it computes too few of them")


@given(layout=layouts(), seed=seeds)
def test_the_identity_plan_borrows_nothing_and_computes_on_owner_ranks(layout: ExpertLayout, seed: int) -> None:
    counts = skewed_counts(layout, seed)[0, 0]
    layout = layout.layer(0)
    plan = LayerPlan.identity(layout, counts)
    plan.check()
    assert (plan.borrowed == -1).all()
    assert plan.borrowed.shape == (layout.ranks, layout.slots)
    np.testing.assert_array_equal(plan.load[np.arange(layout.experts), layout.owner_rank], counts.sum(axis=0))
    assert LayerPlan.identity(layout).load.sum() == 0


@given(plans=drawn_plans)
def test_parameter_slots_come_first_and_each_holder_has_one_slot(plans: PlanArrays) -> None:
    plan = plans.layer_plan(0, 1)
    layout = plan.layout
    stride = layout.experts_per_rank + layout.slots
    table = np.full(layout.ranks * stride, -1)
    experts, ranks = np.nonzero(plan.slot_of >= 0)
    table[plan.slot_of[experts, ranks]] = experts
    np.testing.assert_array_equal(table.reshape(-1, stride)[:, : layout.experts_per_rank].ravel(), layout.placement)
    np.testing.assert_array_equal(table.reshape(-1, stride)[:, layout.experts_per_rank :], plan.borrowed)
    assert (plan.slot_of[experts, ranks] // stride == ranks).all()


@given(plans=drawn_plans)
def test_unforeseen_tokens_go_to_the_last_slot_with_load_or_the_parameter_slot(plans: PlanArrays) -> None:
    plan = plans.layer_plan(0, 0)
    layout = plan.layout
    for expert in range(layout.experts):
        live = [plan.slot_of[expert, rank] for rank in range(layout.ranks) if plan.load[expert, rank]]
        parameter_slot = plan.slot_of[expert, layout.owner_rank[expert]]
        assert plan.fallback_slot[expert] == (max(live) if live else parameter_slot)


@given(plans=drawn_plans)
def test_checksums_differ_in_the_layer_that_differs(plans: PlanArrays) -> None:
    layout, load = plans.layout, plans.load.copy()
    load[-1, 1, 0, 0] += 1
    before, after = plans.checksum(), replace(plans, load=load).checksum()
    assert before[0] == after[0]
    assert before[1] != after[1]
    halves = [PlanArrays(layout, *(a[m : m + 1] for a in (plans.borrowed, plans.load, plans.counts))) for m in range(2)]
    np.testing.assert_array_equal(PlanArrays.concatenate(halves).checksum(), before)


def test_a_checksum_is_the_same_in_every_process() -> None:
    counts = np.arange(16, dtype=np.int32).reshape(1, 1, 2, 8)
    assert PlanArrays.identity(ExpertLayout(8, 2, 1), counts).checksum().tolist() == [4734088626393267835]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"experts": 7, "ranks": 2, "slots": 1}, "7 experts on 2 ranks"),
        ({"experts": 8, "ranks": 2, "slots": -1}, "negative"),
        ({"experts": 8, "ranks": 4, "slots": 1, "node_of_rank": (0, 1, 0, 1)}, "ascend from 0"),
        ({"experts": 8, "ranks": 4, "slots": 1, "node_of_rank": (0, 1, 1, 1)}, "equally many"),
        ({"experts": 8, "ranks": 4, "slots": 1, "node_of_rank": (1, 1, 1, 1)}, "ascend from 0"),
        ({"experts": 2, "ranks": 2, "slots": 0, "placement": np.array([0, 0])}, "exactly once"),
    ],
)
def test_invalid_layouts_are_refused(layout: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ExpertLayout(**layout)


def _plan() -> LayerPlan:
    borrowed, load = np.array([[-1, -1], [0, -1]]), np.array([[5, 7], [0, 0], [0, 2], [0, 2]])
    return LayerPlan(ExpertLayout(4, 2, 2), borrowed, load, np.array([[4, 0, 2, 2], [8, 0, 0, 0]], np.int32))


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("load", (0, 1), 6, "expert 0 does not compute each"),
        ("borrowed", (1, 0), -1, "expert 0 is computed, but not held, by rank 1"),
        ("borrowed", (1, 1), 0, "expert 0 is held twice by rank 1"),
        ("borrowed", (0, 0), 1, "expert 1 is held twice by rank 0"),
        ("borrowed", (0, 0), 4, r"in \[-1, 4\)"),
        ("load", (1, 0), -1, "negative"),
    ],
)
def test_invalid_plans_are_refused(name: str, at: tuple[int, int], value: int, message: str) -> None:
    plan = _plan()
    plan.check()
    getattr(plan, name)[at] = value
    with pytest.raises(PlanError, match=message):
        plan.check()
    with pytest.raises(PlanError, match="borrowed is"):
        replace(_plan(), borrowed=np.full((2, 1), -1)).check()
