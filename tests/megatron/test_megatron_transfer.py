"""Borrowed experts arrive as they are at home, their gradients come home, and as many bytes move as were planned."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
import transfer_worker as worker

from r3.balance import Grid

pytestmark = pytest.mark.megatron

RANKS = 4
GRID = Grid(worker.EXPERTS, RANKS, worker.SLOTS, home=worker.HOME)
Case = tuple[str, str, bool, bool]
EVERY_CASE = pytest.mark.parametrize(
    "case",
    worker.CASES,
    ids=[
        f"{kind}-{dtype}{'-prefetch' * ahead}{'-lopsided' * lopsided}" for kind, dtype, ahead, lopsided in worker.CASES
    ],
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Case, Any]]:
    """What each rank of one world got in every case."""
    return worker.launch(worker.__file__, RANKS, tmp_path_factory.mktemp("transfer"))


def plans(seed: int, lopsided: bool) -> dict[int, Any]:
    """The plans of a micro-batch, by layer."""
    return {layer: worker.random_plan(GRID, 10 * seed + layer, lopsided=lopsided) for layer in range(worker.LAYERS)}


def home_places(experts: torch.Tensor) -> tuple[list[int], list[int]]:
    """The home rank of each expert and its slot there."""
    places = [int(torch.from_numpy(worker.HOME).tolist().index(expert)) for expert in experts.tolist()]
    return [place // GRID.homes for place in places], [place % GRID.homes for place in places]


@EVERY_CASE
def test_every_rank_gets_what_it_borrows_bit_for_bit(results: Any, case: Case) -> None:
    dtype = getattr(torch, case[1])
    for rank, seed in product(range(RANKS), range(2)):
        layers = [*range(worker.LAYERS), *reversed(range(worker.LAYERS))]
        for layer, got in zip(layers, results[rank][case]["fetched"][seed], strict=True):
            experts = worker.live(plans(seed, case[3])[layer], rank)
            for weight, whole in zip(got, worker.every_weight(layer, dtype), strict=True):
                assert torch.equal(weight, whole[experts]), f"rank {rank}, layer {layer}"


@EVERY_CASE
def test_gradients_come_home_once(results: Any, case: Case) -> None:
    dtype = getattr(torch, case[1])
    for layer in range(worker.LAYERS):
        wanted = [[torch.ones_like(grad) for grad in rank[case]["grads"][layer]] for rank in results]
        for seed, rank in product(range(2), range(RANKS)):
            experts = worker.live(plans(seed, case[3])[layer], rank)
            shares = worker.gradient(layer, rank, experts, dtype, seed)
            for which, share in enumerate(shares):
                for place, (home, slot) in enumerate(zip(*home_places(experts), strict=True)):
                    wanted[home][which][slot] += share[place]
        for rank, grads in enumerate(wanted):
            assert all(map(torch.equal, results[rank][case]["grads"][layer], grads)), f"rank {rank}, layer {layer}"


@EVERY_CASE
def test_as_many_bytes_move_as_are_planned(results: Any, case: Case) -> None:
    expert = 3 * worker.INNER * worker.HIDDEN * getattr(torch, case[1]).itemsize
    for rank in range(RANKS):
        borrowed = sum(len(worker.live(plan, rank)) for seed in range(2) for plan in plans(seed, case[3]).values())
        fetched, returned, exposed, _ = results[rank][case]["stats"]
        assert (fetched, returned) == (2 * borrowed * expert, borrowed * expert)
        assert exposed > 0
