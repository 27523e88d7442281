"""Grids and plans: what fits together, who computes whose tokens, and that ranks notice different plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from balance_grids import any_plans, grids, skewed_counts
from hypothesis import given
from hypothesis import strategies as st

from r3.balance import Grid, Plan, PlanError, Plans

seeds = st.integers(0, 2**32 - 1)


@given(grid=grids(), seed=seeds)
def test_quotas_conserve_every_source_and_fill_every_target(grid: Grid, seed: int) -> None:
    plans = any_plans(grid, skewed_counts(grid, seed), seed)
    plans.check()
    plan = plans.of(1, 0)
    quotas = np.stack([plan.quota(source) for source in range(grid.ranks)])
    assert quotas.dtype == np.int32
    assert (quotas >= 0).all()
    np.testing.assert_array_equal(quotas.sum(axis=2), plan.counts)
    np.testing.assert_array_equal(quotas.sum(axis=0), plan.load)


@given(grid=grids(), seed=seeds)
def test_a_target_takes_its_own_tokens_first_then_its_machines(grid: Grid, seed: int) -> None:
    plan = any_plans(grid, skewed_counts(grid, seed), seed).of(0, 0)
    quotas = np.stack([plan.quota(source) for source in range(grid.ranks)])
    own = quotas[np.arange(grid.ranks), :, np.arange(grid.ranks)].T
    np.testing.assert_array_equal(own, np.minimum(plan.counts.T, plan.load))
    same = np.equal.outer(grid.machine, grid.machine)
    for machine in range(grid.machines):
        inside = np.array(grid.machine) == machine
        least = np.minimum(plan.counts[inside].sum(axis=0), plan.load[:, inside].sum(axis=1))
        kept = (quotas * same[:, None])[inside].sum(axis=(0, 2))
        np.testing.assert_array_equal(kept, least, "tokens leave a machine only where it computes too few of theirs")


@given(grid=grids(), seed=seeds)
def test_the_identity_plan_borrows_nothing_and_computes_at_home(grid: Grid, seed: int) -> None:
    counts = skewed_counts(grid, seed)[0, 0]
    grid = grid.layer(0)
    plan = Plan.identity(grid, counts)
    plan.check()
    assert (plan.borrowed == -1).all()
    assert plan.borrowed.shape == (grid.ranks, grid.slots)
    np.testing.assert_array_equal(plan.load[np.arange(grid.experts), grid.home_rank], counts.sum(axis=0))
    assert Plan.identity(grid).load.sum() == 0


@given(grid=grids(), seed=seeds)
def test_slots_of_a_plan_are_homes_first_and_name_every_holder_once(grid: Grid, seed: int) -> None:
    plan = any_plans(grid, skewed_counts(grid, seed), seed).of(0, 1)
    grid = plan.grid
    stride = grid.homes + grid.slots
    table = np.full(grid.ranks * stride, -1)
    experts, ranks = np.nonzero(plan.slot_of >= 0)
    table[plan.slot_of[experts, ranks]] = experts
    np.testing.assert_array_equal(table.reshape(-1, stride)[:, : grid.homes].ravel(), grid.home)
    np.testing.assert_array_equal(table.reshape(-1, stride)[:, grid.homes :], plan.borrowed)
    assert (plan.slot_of[experts, ranks] // stride == ranks).all()


@given(grid=grids(), seed=seeds)
def test_unforeseen_tokens_go_to_the_last_slot_with_load_or_home(grid: Grid, seed: int) -> None:
    plan = any_plans(grid, skewed_counts(grid, seed), seed).of(0, 0)
    grid = plan.grid
    for expert in range(grid.experts):
        live = [plan.slot_of[expert, rank] for rank in range(grid.ranks) if plan.load[expert, rank]]
        home = plan.slot_of[expert, grid.home_rank[expert]]
        assert plan.fallback_slot[expert] == (max(live) if live else home)


@given(grid=grids(), seed=seeds)
def test_checksums_differ_in_the_layer_that_differs(grid: Grid, seed: int) -> None:
    plans = any_plans(grid, skewed_counts(grid, seed), seed)
    load = plans.load.copy()
    load[-1, 1, 0, 0] += 1
    before, after = plans.checksum(), replace(plans, load=load).checksum()
    assert before[0] == after[0]
    assert before[1] != after[1]
    halves = [Plans(grid, *(a[m : m + 1] for a in (plans.borrowed, plans.load, plans.counts))) for m in range(2)]
    np.testing.assert_array_equal(Plans.join(halves).checksum(), before)


def test_a_checksum_is_the_same_in_every_process() -> None:
    counts = np.arange(16, dtype=np.int32).reshape(1, 1, 2, 8)
    assert Plans.identity(Grid(8, 2, 1), counts).checksum().tolist() == [4734088626393267835]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"experts": 7, "ranks": 2, "slots": 1}, "7 experts on 2 ranks"),
        ({"experts": 8, "ranks": 2, "slots": -1}, "negative"),
        ({"experts": 8, "ranks": 4, "slots": 1, "machine": (0, 1, 0, 1)}, "ascend from 0"),
        ({"experts": 8, "ranks": 4, "slots": 1, "machine": (0, 1, 1, 1)}, "equally many"),
        ({"experts": 8, "ranks": 4, "slots": 1, "machine": (1, 1, 1, 1)}, "ascend from 0"),
        ({"experts": 2, "ranks": 2, "slots": 0, "home": np.array([0, 0])}, "exactly once"),
    ],
)
def test_grids_that_cannot_be_are_refused(grid: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Grid(**grid)


def _plan() -> Plan:
    counts = np.array([[4, 0, 2, 2], [8, 0, 0, 0]], np.int32)
    return Plan(Grid(4, 2, 2), np.array([[-1, -1], [0, -1]]), np.array([[5, 7], [0, 0], [0, 2], [0, 2]]), counts)


@pytest.mark.parametrize(
    ("name", "at", "value", "message"),
    [
        ("load", (0, 1), 6, "expert 0 does not compute each"),
        ("borrowed", (1, 0), -1, "expert 0 is not held, but computed, by rank 1"),
        ("borrowed", (1, 1), 0, "expert 0 is held twice by rank 1"),
        ("borrowed", (0, 0), 1, "expert 1 is held twice by rank 0"),
        ("borrowed", (0, 0), 4, r"in \[-1, 4\)"),
        ("load", (1, 0), -1, "negative"),
    ],
)
def test_plans_that_cannot_be_are_refused(name: str, at: tuple[int, int], value: int, message: str) -> None:
    plan = _plan()
    plan.check()
    getattr(plan, name)[at] = value
    with pytest.raises(PlanError, match=message):
        plan.check()


def test_a_plan_of_another_shape_is_refused() -> None:
    with pytest.raises(PlanError, match="borrowed is"):
        replace(_plan(), borrowed=np.full((2, 1), -1)).check()
