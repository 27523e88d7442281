"""Every planner on any layout: valid plans, equal in every process, as even as the slots allow."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from balance_grids import layouts, skewed_counts
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.balance_workloads import REGIMES, Pass, node_floor, skewed_steps

from r3.balance import ExpertLayout, PlanArrays, PlanError, PlannerOptions, plan_pass
from r3.balance.baselines import eplb, eplb_fixed_owners
from r3.balance.cost import borrowed, busiest_link, imbalance, links, rank_load
from r3.balance.plan import Ints
from r3.balance.transport import EVEN

seeds = st.integers(0, 2**32 - 1)
EP16 = ExpertLayout(128, 16, 4, tuple(rank // 8 for rank in range(16)))


def options(planner: str, counts: Ints, *, within_node: bool = False) -> PlannerOptions:
    return PlannerOptions(planner, within_node=within_node, expected=counts.sum(axis=(0, 2)))  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", ["foremoe", "eplb", "shadow", "sequential"])
@pytest.mark.parametrize("within_node", [False, True])
@given(layout=layouts(), seed=seeds)
def test_plans_hold_each_expert_once_and_compute_each_token_once(
    planner: str, within_node: bool, layout: ExpertLayout, seed: int
) -> None:
    counts = skewed_counts(layout, seed)
    plans = plan_pass(counts, layout, options(planner, counts, within_node=within_node))
    plans.check()
    np.testing.assert_array_equal(plans.counts, counts)
    assert all(array.dtype == np.int32 for array in (plans.borrowed, plans.load, plans.counts))
    unbalanced = rank_load(PlanArrays.identity(layout, counts)).max(axis=2)
    if planner in ("foremoe", "shadow") and not within_node:
        assert (rank_load(plans).max(axis=2) <= unbalanced).all(), "the fullest rank became fuller"


@given(layout=layouts(), seed=seeds)
def test_enough_slots_give_an_even_load(layout: ExpertLayout, seed: int) -> None:
    counts = skewed_counts(layout, seed)
    roomy = replace(layout, slots=layout.experts)
    load = rank_load(plan_pass(counts, roomy, PlannerOptions()))
    even = -(-counts.sum(axis=(2, 3)) // layout.nodes)
    minimum = -(-even * layout.nodes // layout.ranks)
    assert ((load.max(axis=2) <= minimum) | (layout.nodes == 1) & needs_no_balancing(load)).all()


@given(layout=layouts(), seed=seeds)
def test_plans_within_a_node_move_nothing_between_nodes(layout: ExpertLayout, seed: int) -> None:
    counts = skewed_counts(layout, seed)
    plans = plan_pass(counts, layout, PlannerOptions(within_node=True))
    node = np.array(layout.node_of_rank)
    away = node != node[layout.owner_rank][..., None]
    assert not (plans.load * away).any()
    roomy = plan_pass(counts, replace(layout, slots=layout.experts), PlannerOptions(within_node=True))
    minimum = node_floor(layout, counts) * rank_load(plans).mean(axis=2)
    load = rank_load(roomy)
    assert ((load.max(axis=2) <= np.ceil(minimum - 1e-6)) | needs_no_balancing(load)).all()


def needs_no_balancing(load: Ints) -> NDArray[np.bool_]:
    """Which of the ranks' loads ``[M, L, R]`` are even enough to borrow nothing."""
    return 100 * load.max(axis=2) <= EVEN * load.mean(axis=2)


def test_too_few_slots_leave_experts_on_owner_ranks() -> None:
    layout = ExpertLayout(24, 8, 1, tuple(rank // 2 for rank in range(8)))
    counts = skewed_counts(layout, 22, (4, 2))  # of these one instance has too few slots
    unbalanced = rank_load(PlanArrays.identity(layout, counts)).max(axis=2)
    plans = plan_pass(counts, layout, PlannerOptions())
    plans.check()
    assert (rank_load(plans).max(axis=2) <= unbalanced).all()


@given(layout=layouts(), seed=seeds)
def test_links_are_what_quotas_send(layout: ExpertLayout, seed: int) -> None:
    plans = plan_pass(skewed_counts(layout, seed), layout, PlannerOptions())
    sent = np.zeros((layout.nodes, layout.nodes), int)
    for source in range(layout.ranks):
        quota = plans.layer_plan(0, 0).quota(source).sum(axis=0).reshape(layout.nodes, -1).sum(axis=1)
        sent[layout.node_of_rank[source]] += quota
    np.fill_diagonal(sent, 0)
    np.testing.assert_array_equal(links(plans)[0, 0], sent)


def test_the_same_counts_give_the_same_plans_in_another_process_with_other_threads_and_hashes() -> None:
    code = (
        "from r3.balance import ExpertLayout, PlannerOptions, plan_pass; from support.balance_workloads import *;"
        "layout = ExpertLayout(128, 16, 4, tuple(rank // 8 for rank in range(16)));"
        "counts = next(skewed_steps(REGIMES['main'], layout, Pass(2, 3), 0));"
        "expected = counts.sum(axis=(0, 2));"
        "print([plan_pass(counts, layout, PlannerOptions(p, expected=expected)).checksum().tolist()"
        " for p in ('foremoe', 'eplb', 'shadow')])"
    )
    results = set()
    for threads, seed in (("1", "0"), ("2", "7")):
        env = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        results.add(ran.stdout)
    assert len(results) == 1


def test_plans_of_a_micro_batch_do_not_depend_on_the_others() -> None:
    counts = next(skewed_steps(REGIMES["vol"], EP16, Pass(3, 2), 0))
    together = plan_pass(counts, EP16, PlannerOptions())
    alone = PlanArrays.concatenate([plan_pass(counts[[at]], EP16, PlannerOptions()) for at in range(3)])
    np.testing.assert_array_equal(together.checksum(), alone.checksum())


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("experts", "ranks", "nodes"), [(128, 8, 1), (128, 16, 2), (256, 32, 4)])
def test_an_even_load_with_four_slots(regime: str, experts: int, ranks: int, nodes: int) -> None:
    layout = ExpertLayout(experts, ranks, 4, tuple(rank * nodes // ranks for rank in range(ranks)))
    counts = next(skewed_steps(REGIMES[regime], layout, Pass(2, 24), 0))
    anywhere, inside = (plan_pass(counts, layout, PlannerOptions(within_node=within)) for within in (False, True))
    balanced = imbalance(rank_load(anywhere))
    assert np.median(balanced) <= 1.005
    assert np.quantile(balanced, 0.95) <= 1.01
    assert borrowed(anywhere).mean() <= 3.2
    assert np.median(imbalance(rank_load(inside)) / node_floor(layout, counts)) <= 1.005


def test_slots_for_links_spare_the_links() -> None:
    counts = next(skewed_steps(REGIMES["main"], EP16, Pass(2, 12), 0))
    owner_mask = np.median(busiest_link(PlanArrays.identity(EP16, counts)))
    medians = [np.median(busiest_link(plan_pass(counts, EP16, PlannerOptions(link_slots=slots)))) for slots in range(4)]
    assert medians == sorted(medians, reverse=True)
    assert medians[0] < 0.9 * owner_mask
    assert medians[2] < 0.45 * owner_mask


def test_eplb_with_foresight_is_even_and_borrows_nearly_everything() -> None:
    counts = next(skewed_steps(REGIMES["main"], EP16, Pass(1, 12), 0))
    free = eplb(counts, replace(EP16, slots=10), counts.sum(axis=2), 2)
    free.check()
    assert np.median(imbalance(rank_load(free))) <= 1.01
    assert borrowed(free).mean() > 9
    kept = eplb_fixed_owners(counts, EP16, counts.sum(axis=2))
    assert np.median(imbalance(rank_load(kept))) > np.median(imbalance(rank_load(free)))


def test_eplb_without_a_last_step_borrows_nothing() -> None:
    counts = skewed_counts(EP16, 0)
    assert (plan_pass(counts, EP16, PlannerOptions("eplb")).borrowed == -1).all()


def test_the_cost_of_a_plan_is_its_fullest_rank_and_its_busiest_link() -> None:
    layout = ExpertLayout(4, 4, 0, (0, 0, 1, 1))
    counts = np.array([[[[1, 0, 8, 0], [0, 0, 0, 5], [2, 0, 0, 0], [0, 0, 1, 0]]]], np.int32)
    plans = PlanArrays.identity(layout, counts)
    assert rank_load(plans).max(axis=-1).tolist() == [[9]]
    assert busiest_link(plans).tolist() == [[13]]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 1, 16, 64), PlannerOptions(), r"expected \[M, L, 16, 128\]"),
        ((1, 16, 128), PlannerOptions(), "counts are"),
        ((1, 1, 16, 128), PlannerOptions("best"), "planner 'best' is not known"),  # type: ignore[arg-type]
        ((1, 1, 16, 128), PlannerOptions(link_slots=5), "expected 0 to 4"),
    ],
)
def test_what_cannot_be_planned_is_refused(shape: tuple[int, ...], options: PlannerOptions, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_pass(np.zeros(shape, np.int32), EP16, options)


@pytest.mark.parametrize(("most", "moves"), [(1010, False), (1011, True)])
def test_ranks_that_are_even_borrow_nothing(most: int, moves: bool) -> None:
    """For a gain of one percent: what borrowing costs a pass is more."""
    layout = ExpertLayout(4, 2, 1, (0, 0))
    counts = np.array([most - 600, 600, 500, 1500 - most], np.int32).reshape(1, 1, 1, 4)
    plans = plan_pass(np.concatenate([counts, counts], axis=2), layout, PlannerOptions())
    assert bool((plans.borrowed >= 0).any()) == moves
