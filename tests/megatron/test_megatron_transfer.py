"""Borrowed experts equal their owners', their gradients are returned, and the planned number of bytes moves.

Pools: one per node, not read while they change, and removed with their ranks however these end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import pool_kill
import pool_worker
import torch
import transfer_worker as worker

from r3.balance import ExpertLayout

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

RANKS, LAYERS = 4, range(worker.LAYERS)
LAYOUT = ExpertLayout(worker.EXPERTS, RANKS, worker.SLOTS, placement=worker.HOME)
Case = tuple[str, str, bool, bool]
EVERY_CASE = pytest.mark.parametrize("case", worker.CASES, ids=lambda case: "-".join(map(str, case)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of every rank."""
    return worker.launch(pool_worker.__file__, RANKS, tmp_path_factory.mktemp("transfer"))


def owners(layer: int, experts: torch.Tensor) -> list[tuple[int, int]]:
    """The owner of each expert and its slot there."""
    order = worker.HOME[layer].tolist()
    return [divmod(order.index(expert), LAYOUT.experts_per_rank) for expert in experts.tolist()]


@EVERY_CASE
def test_borrowed_experts_are_bit_identical(results: Any, case: Case) -> None:
    dtype = getattr(torch, case[1])
    for rank, seed in product(range(RANKS), range(2)):
        layers = [*LAYERS, *reversed(LAYERS)]
        for layer, got in zip(layers, results[rank]["cases"][case]["fetched"][seed], strict=True):
            experts = worker.live(worker.random_plans(LAYOUT, seed, lopsided=case[3])[layer], rank)
            for weight, whole in zip(got, worker.every_weight(layer, dtype), strict=True):
                assert torch.equal(weight, whole[experts]), f"rank {rank}, layer {layer}"


@EVERY_CASE
def test_gradients_are_returned_once(results: Any, case: Case) -> None:
    dtype = getattr(torch, case[1])
    for layer in LAYERS:
        wanted = [[torch.ones_like(grad) for grad in rank["cases"][case]["grads"][layer]] for rank in results]
        for seed, rank in product(range(2), range(RANKS)):
            experts = worker.live(worker.random_plans(LAYOUT, seed, lopsided=case[3])[layer], rank)
            shares = worker.gradient(layer, rank, experts, dtype, seed)
            for which, share in enumerate(shares):
                for place, (owner, slot) in enumerate(owners(layer, experts)):
                    wanted[owner][which][slot] += share[place]
        for rank, grads in enumerate(wanted):
            found = results[rank]["cases"][case]["grads"][layer]
            assert all(map(torch.equal, found, grads)), f"rank {rank}, layer {layer}"


@EVERY_CASE
def test_the_planned_number_of_bytes_moves(results: Any, case: Case) -> None:
    expert = 3 * worker.INNER * worker.HIDDEN * getattr(torch, case[1]).itemsize
    for rank in range(RANKS):
        plans = [plan for seed in range(2) for plan in worker.random_plans(LAYOUT, seed, lopsided=case[3]).values()]
        borrowed = sum(len(worker.live(plan, rank)) for plan in plans)
        fetched, returned, exposed, _ = results[rank]["cases"][case]["stats"]
        assert (fetched, returned) == (2 * borrowed * expert, borrowed * expert)
        assert exposed > 0


def check(got: Any, layers: Sequence[int], rank: int, ranks: int, change: float = 0.0, seed: int = 0) -> None:
    """``got`` of ``layers`` is what ``rank`` borrows there, after ``change`` was added to all weights."""
    layout = ExpertLayout(worker.EXPERTS, ranks, worker.SLOTS, placement=worker.HOME)
    for layer, weights in zip(layers, got, strict=True):
        experts = worker.live(worker.random_plans(layout, seed, lopsided=True)[layer], rank)
        for weight, whole in zip(weights, worker.every_weight(layer, weights[0].dtype), strict=True):
            assert torch.equal(weight, whole[experts] + change), f"rank {rank}, layer {layer}"


@pytest.mark.parametrize("kind", ["exchange", "pool"])
def test_transfers_of_several_micro_batches_start_at_once(results: Any, kind: str) -> None:
    for rank, found in enumerate(results):
        fetched, weights = found[kind]
        for seed in pool_worker.SEEDS:
            check(weights[seed * len(LAYERS) : (seed + 1) * len(LAYERS)], LAYERS, rank, 4, seed=seed)
        each = sum(weight.nbytes for weight in weights[0])
        assert fetched == (len(weights) + 1) * each


@pytest.mark.parametrize("case", ["one machine", "two machines"])
def test_no_rank_reads_a_partly_refreshed_pool(results: Any, case: str) -> None:
    for rank, found in enumerate(results):
        check(found[case]["before"], LAYERS, rank, 4)
        check(found[case]["after"], LAYERS, rank, 4, change=1.0)
        assert found[case]["refresh_ms"] > 0
    check(results[pool_worker.SLOW][case]["stale"], LAYERS, pool_worker.SLOW, 4)


@pytest.mark.parametrize(("case", "pools"), [("groups", 1), ("groups over machines", 2)])
def test_expert_groups_of_a_node_share_its_pool(results: Any, case: str, pools: int) -> None:
    for rank, found in enumerate(results):
        check(found[case]["fetched"], LAYERS, rank % 2, 2)
        assert len(found[case]["memory"]) == 2 * worker.LAYERS
        assert found[case]["left"] == set()
    assert len(set().union(*(found[case]["memory"] for found in results))) == 2 * worker.LAYERS * pools


def test_pipeline_stages_have_pools_of_their_own_layers(results: Any) -> None:
    for rank, found in enumerate(results):
        for stages, got in zip(pool_worker.STAGES, found["stages"], strict=True):
            check(got, stages[rank // 2], rank % 2, 2)


def test_a_pool_larger_than_free_memory_is_refused_on_every_rank(results: Any) -> None:
    for found in results:
        line = r"train.balance.transfer: a pool of all experts needs [\d.]+ GiB of .* [\d.]+ GiB are free: set it"
        assert re.match(line, found["too large"]), found["too large"]


@pytest.mark.long
@pytest.mark.bubblewrap
def test_killed_ranks_leave_nothing_and_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    """In a sandbox whose ``/dev/shm`` has 64 KiB, less than the pool."""
    (tmp_path / "first").mkdir()
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "once").touch()
    small = ["bwrap", "--dev-bind", "/", "/", "--size", str(64 << 10), "--tmpfs", "/dev/shm"]
    kill = [*small, sys.executable, pool_kill.__file__, str(tmp_path / "first")]
    seen = json.loads(subprocess.run(kill, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert seen == {"used": [], "killed": []}
    for rank, found in enumerate(worker.launch(pool_kill.__file__, 2, tmp_path / "again", inside=small)):
        check(found["fetched"], LAYERS, rank, 2)
        assert found["shared"] == []
        pool = sum(held.nbytes for layer in LAYERS for held in worker.every_weight(layer, torch.float32))
        assert found["size"] < pool
