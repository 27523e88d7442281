"""Every planner on any layout: valid plans, equal in every process, as even as the slots allow."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from balance_grids import layouts, skewed_counts
from hypothesis import given, settings
from hypothesis import strategies as st
from support.balance_workloads import REGIMES, Pass, node_floor, skewed_steps

from r3.balance import ExpertLayout, PlanArrays, PlanError, PlannerOptions, plan_pass
from r3.balance.baselines import eplb, eplb_fixed_owners
from r3.balance.cost import borrowed, busiest_link, imbalance, rank_load
from r3.balance.planners import WORTHWHILE, Planner, Reach, by_source_node, layer_times, transport
from r3.balance.time_model import ExpertShape, Hardware, TimeModel, work_of

seeds = st.integers(0, 2**32 - 1)
EP16 = ExpertLayout(128, 16, 4, tuple(rank // 8 for rank in range(16)))


LOAD_ONLY = TimeModel(link=0)
times = st.builds(TimeModel, *[st.integers(0, 100)] * 5)


def across(layout: ExpertLayout) -> Reach:
    """The last of a layout's choices: the only one on one node, else across nodes with all slots."""
    return Reach.choices(layout)[-1]


@pytest.mark.parametrize("planner", ["foremoe", "eplb", "shadow", "sequential"])
@given(layout=layouts(), seed=seeds, time=times)
def test_plans_hold_each_expert_once_and_compute_each_token_once(
    planner: Planner, layout: ExpertLayout, seed: int, time: TimeModel
) -> None:
    counts = skewed_counts(layout, seed)
    plans = plan_pass(counts, layout, PlannerOptions(planner, time, counts.sum(axis=(0, 2))))
    plans.check()
    np.testing.assert_array_equal(plans.counts, counts)
    assert all(array.dtype == np.int32 for array in (plans.borrowed, plans.load, plans.counts))


@settings(max_examples=30)
@given(layout=layouts(), seed=seeds, time=times)
def test_no_micro_batch_takes_longer_than_without_borrowing(layout: ExpertLayout, seed: int, time: TimeModel) -> None:
    counts = skewed_counts(layout, seed)
    unbalanced = time.time(work_of(PlanArrays.identity(layout, counts)))
    for reach in Reach.choices(layout):
        plans = transport(counts, layout, reach, time)
        plans.check()
        assert (time.time(work_of(plans)) <= unbalanced).all()


@settings(max_examples=30)
@given(layout=layouts(), seed=seeds)
def test_a_pass_takes_the_shortest_of_its_choices(layout: ExpertLayout, seed: int) -> None:
    counts, time = skewed_counts(layout, seed), TimeModel(pair=3, link=2, crossing=150, returned=20, fetch=40)
    took = [time.time(work_of(transport(counts, layout, reach, time))).sum() for reach in Reach.choices(layout)]
    chosen = time.time(work_of(plan_pass(counts, layout, PlannerOptions(time=time)))).sum()
    assert 100 * chosen <= WORTHWHILE * min(took)
    assert 100 * layer_times(by_source_node(counts, layout), layout, time).sum() <= WORTHWHILE * min(took)


def test_fast_links_let_a_pass_cross_nodes_and_slow_ones_do_not() -> None:
    counts = next(skewed_steps(REGIMES["main"], EP16, Pass(2, 4), 0))
    node = np.array(EP16.node_of_rank)
    for crossing, crosses in ((0, True), (10**7, False)):
        plans = plan_pass(counts, EP16, PlannerOptions(time=TimeModel(crossing=crossing)))
        away = plans.load * (node != node[EP16.owner_rank][:, None])
        assert away.any() == crosses


@given(layout=layouts(), seed=seeds)
def test_enough_slots_give_an_even_load(layout: ExpertLayout, seed: int) -> None:
    counts = skewed_counts(layout, seed)
    roomy = replace(layout, slots=layout.experts)
    load = rank_load(transport(counts, roomy, across(roomy), LOAD_ONLY))
    even = -(-counts.sum(axis=(2, 3)) // layout.nodes)
    minimum = -(-even * layout.nodes // layout.ranks)
    assert (100 * load.max(axis=2) <= WORTHWHILE * minimum).all()


@given(layout=layouts(), seed=seeds)
def test_plans_within_a_node_move_nothing_between_nodes(layout: ExpertLayout, seed: int) -> None:
    counts = skewed_counts(layout, seed)
    plans = transport(counts, layout, Reach(True, layout.slots), LOAD_ONLY)
    node = np.array(layout.node_of_rank)
    away = node != node[layout.owner_rank][..., None]
    assert not (plans.load * away).any()
    roomy = transport(counts, replace(layout, slots=layout.experts), Reach(True, layout.experts), LOAD_ONLY)
    minimum = node_floor(layout, counts) * rank_load(plans).mean(axis=2)
    load = rank_load(roomy)
    assert (100 * load.max(axis=2) <= WORTHWHILE * np.ceil(minimum - 1e-6)).all()


def test_too_few_slots_leave_experts_on_owner_ranks() -> None:
    layout = ExpertLayout(24, 8, 1, tuple(rank // 2 for rank in range(8)))
    counts = skewed_counts(layout, 22, (4, 2))  # of these one instance has too few slots
    unbalanced = rank_load(PlanArrays.identity(layout, counts)).max(axis=2)
    plans = transport(counts, layout, across(layout), LOAD_ONLY)
    plans.check()
    assert (rank_load(plans).max(axis=2) <= unbalanced).all()


@given(layout=layouts(), seed=seeds)
def test_the_busiest_link_is_what_quotas_send(layout: ExpertLayout, seed: int) -> None:
    plans = transport(skewed_counts(layout, seed), layout, across(layout), TimeModel())
    sent = np.zeros((layout.nodes, layout.nodes), int)
    for source in range(layout.ranks):
        quota = plans.layer_plan(0, 0).quota(source).sum(axis=0).reshape(layout.nodes, -1).sum(axis=1)
        sent[layout.node_of_rank[source]] += quota
    np.fill_diagonal(sent, 0)
    assert busiest_link(plans)[0, 0] == max(sent.sum(axis=0).max(), sent.sum(axis=1).max())


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
    together, *parts = (transport(part, EP16, across(EP16), TimeModel()) for part in (counts, *counts[:, None]))
    alone = PlanArrays.concatenate(parts)
    np.testing.assert_array_equal(together.checksum(), alone.checksum())


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("experts", "ranks", "nodes"), [(128, 8, 1), (128, 16, 2), (256, 32, 4)])
def test_an_even_load_with_four_slots(regime: str, experts: int, ranks: int, nodes: int) -> None:
    layout = ExpertLayout(experts, ranks, 4, tuple(rank * nodes // ranks for rank in range(ranks)))
    counts = next(skewed_steps(REGIMES[regime], layout, Pass(2, 24), 0))
    anywhere, inside = (transport(counts, layout, reach, LOAD_ONLY) for reach in (across(layout), Reach(True, 4)))
    balanced = imbalance(rank_load(anywhere))
    assert np.median(balanced) <= 1.005
    assert np.quantile(balanced, 0.95) <= 1.01
    assert borrowed(anywhere).mean() <= 3.2
    assert np.median(imbalance(rank_load(inside)) / node_floor(layout, counts)) <= 1.005


def test_imports_spare_the_links() -> None:
    counts = next(skewed_steps(REGIMES["main"], EP16, Pass(2, 12), 0))
    owner_mask = np.median(busiest_link(PlanArrays.identity(EP16, counts)))
    reaches = [Reach(False, 4, imports) for imports in (0, 8, 16, 24)]
    medians = [np.median(busiest_link(transport(counts, EP16, reach, TimeModel()))) for reach in reaches]
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


def test_an_update_takes_longer_than_a_forward_pass_and_a_pool_spares_the_network() -> None:
    shape, speeds = ExpertShape(1000, 500, 2), Hardware(flops=3e12, local=4e9, network=1e9, host=2e9)
    forward, update, pool = (
        TimeModel.of(shape, speeds, 8, update=update, pool=pool)
        for update, pool in ((False, False), (True, False), (False, True))
    )
    assert forward == TimeModel(10**6, 5 * 10**5, 3 * 10**9, 0, 75 * 10**7)
    assert update == TimeModel(3 * 10**6, 10**6, 9 * 10**9, 75 * 10**7, 15 * 10**8)
    assert pool == TimeModel(10**6, 5 * 10**5, 0, 0, 15 * 10**8)
