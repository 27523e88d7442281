"""Plans of the paper's stages, measured placements, and the planner on captured routes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from balance_grids import layouts, skewed_counts
from hypothesis import given
from hypothesis import strategies as st
from support.balance_workloads import REGIMES, Pass, captured, node_floor, skewed_steps

from benchmarks.balance_stages import Stages, staged, update_within_machine
from r3.balance import ExpertLayout, PlanArrays, PlannerOptions, TimeModel, plan_pass
from r3.balance.cost import imbalance, rank_load
from r3.balance.placement import joint_placement
from r3.balance.plan import Ints
from r3.balance.planners import Reach, by_source_node, layer_times, transport

seeds = st.integers(0, 2**32 - 1)
EP16 = ExpertLayout(128, 16, 10, tuple(rank // 8 for rank in range(16)))


def two_steps(microbatches: int = 4, layers: int = 12) -> tuple[Ints, Ints]:
    steps = skewed_steps(REGIMES["main"], EP16, Pass(microbatches, layers), 2)
    return next(steps), next(steps)


def measured(step: Ints, layout: ExpertLayout) -> ExpertLayout:
    return replace(layout, placement=joint_placement(by_source_node(step, layout), layout, 2.0))


@given(layout=layouts(), seed=seeds)
def test_staged_plans_and_those_of_algorithm_3_are_valid(layout: ExpertLayout, seed: int) -> None:
    counts = skewed_counts(layout, seed)
    staged(counts, layout, Stages()).check()
    roomy = replace(layout, slots=layout.experts_per_rank + 1)
    plans = update_within_machine(counts, roomy, 1)
    plans.check()
    node = np.array(layout.node_of_rank)
    assert not (plans.load * (node != node[layout.owner_rank][..., None])).any()


@given(layout=layouts(), seed=seeds)
def test_measured_placements_are_permutations_and_deterministic(layout: ExpertLayout, seed: int) -> None:
    sources = by_source_node(skewed_counts(layout, seed), layout)
    placement = joint_placement(sources, layout, 1.0)
    assert placement.shape == (sources.shape[1], layout.experts)
    replace(layout, placement=placement)
    np.testing.assert_array_equal(placement, joint_placement(sources.astype(np.int64), layout, 1.0))
    assert (np.diff(placement.reshape(len(placement), layout.ranks, -1)) > 0).all(), "a rank's experts ascend"


def test_measured_placements_lower_the_imbalance_within_a_node() -> None:
    step, counts = two_steps(16, 6)
    layout = measured(step, EP16)
    assert np.median(node_floor(EP16, counts)) > 1.09
    assert np.median(node_floor(layout, counts)) <= 1.05
    assert np.median(node_floor(layout, step)) <= 1.02, "of the step that it was chosen by"


def test_joint_placements_keep_tokens_in_their_node() -> None:
    """Ranks of node 0 use the first half of the experts, which node 1 owns, and the other way round."""
    layout = ExpertLayout(16, 4, 1, (0, 0, 1, 1), np.roll(np.arange(16), 8))
    counts = np.full((3, 1, 4, 16), 2, np.int32)
    counts[:, :, :2, :8] = counts[:, :, 2:, 8:] = 50
    sources = by_source_node(counts, layout)
    moved = replace(layout, placement=joint_placement(sources, layout, 1.0))
    owners = np.array(layout.node_of_rank)[moved.owner_rank[0]]
    assert owners.tolist() == [0] * 8 + [1] * 8
    assert layer_times(sources, moved, TimeModel()) < layer_times(sources, layout, TimeModel())
    np.testing.assert_array_equal(joint_placement(sources, moved, 1.0), moved.placement)


def test_plans_on_measured_placements_are_even() -> None:
    step, counts = two_steps()
    layout = replace(measured(step, EP16), slots=4)
    for reach in (Reach(True, 4), Reach(False, 4, 16)):
        plans = transport(counts, layout, reach, TimeModel(link=0))
        plans.check()
        floor = node_floor(layout, counts) if reach.within_node else 1.0
        assert np.quantile(imbalance(rank_load(plans)) / floor, 0.95) <= 1.005


@pytest.mark.parametrize(("ranks", "before", "worst"), [(2, 1.15, 1.005), (4, 1.3, 1.07)])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_captured_routes_of_the_quickstart_are_balanced(ranks: int, before: float, worst: float, slots: int) -> None:
    counts, layout = captured(ranks), ExpertLayout(8, ranks, slots)
    balanced = imbalance(rank_load(plan_pass(counts, layout, PlannerOptions())))
    assert np.median(imbalance(rank_load(PlanArrays.identity(layout, counts)))) >= before
    assert np.median(balanced) <= 1.005
    assert np.quantile(balanced, 0.95) <= worst
