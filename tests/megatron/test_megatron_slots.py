"""Which token goes to which slot, and products whose bits do not depend on how an expert's rows were shared out."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import numpy as np
import torch
from torch import Tensor

from agent_rl.errors import TrainerError
from r3.balance import Grid, Plan

pytestmark = pytest.mark.megatron

GRID = Grid(experts=8, ranks=2, slots=2)
"""Experts 0 to 3 live in slots 0 to 3, 4 to 7 in slots 6 to 9; slots 4, 5, 10 and 11 are borrowed."""


def shared_out() -> Plan:
    """Rank 0 borrows expert 5 and takes all its tokens, rank 1 borrows expert 1 for 7 of its 10 tokens."""
    counts = np.full((2, 8), 5, np.int32)
    load = np.zeros((8, 2), np.int32)
    load[:4, 0] = load[4:, 1] = 10
    load[5], load[1] = (10, 0), (3, 7)
    plan = Plan(GRID, np.array([[5, -1], [-1, 1]], np.int32), load, counts)
    plan.check()
    return plan


def placement(source: int, plan: Plan) -> Any:
    from agent_rl.train.expert_balancing.borrowed_experts import Placement
    from agent_rl.train.expert_balancing.plan_feed import placement_table

    return Placement(*torch.from_numpy(placement_table(plan, source)))


def chosen(tokens: int) -> Tensor:
    """A map of two experts a token, ``[T, 8]``: each has ``tokens / 4`` tokens."""
    experts = torch.stack((torch.arange(tokens) % 8, (torch.arange(tokens) + 3) % 8), dim=1)
    return torch.zeros(tokens, 8, dtype=torch.bool).scatter_(1, experts, True)


def test_tokens_go_where_the_quota_says_and_those_not_foreseen_to_the_last_live_slot() -> None:
    plan, routing_map = shared_out(), chosen(32)  # 8 tokens an expert, of which 5 were foreseen
    quota = plan.quota(0)
    held = placement(0, plan).counts(routing_map.sum(0)).tolist()
    assert held[:4] == [8, quota[1, 0], 8, 8]
    assert held[11] == 8 - quota[1, 0]  # expert 1's last live slot
    assert (held[4], held[7]) == (8, 0)  # expert 5 has moved, with what was not foreseen
    assert (held[5], held[10], sum(held)) == (0, 0, 64)


def test_fewer_tokens_than_foreseen_are_taken_in_the_order_of_ranks() -> None:
    plan, counts = shared_out(), torch.ones(8, dtype=torch.int64)
    held = placement(1, plan).counts(counts)
    assert int(held.sum()) == 8
    assert bool((held <= 1).all())


@pytest.mark.parametrize("source", [0, 1])
def test_the_order_of_rows_is_that_of_the_map_of_slots(source: int) -> None:
    routing_map = chosen(32)
    placed = placement(source, shared_out())
    probs = torch.rand(32, 8) * routing_map
    spread, slots = placed.spread(probs, routing_map)
    by_expert = probs.T[routing_map.T]
    order = placed.order(routing_map.sum(0), 64)
    assert torch.equal(by_expert[order], spread.T[slots.T])
    assert torch.equal(order.sort().values, torch.arange(64))
    assert torch.equal(slots.sum(0), placed.counts(routing_map.sum(0)))
    assert not bool(spread[~slots].any())


@pytest.mark.parametrize("parts", [(1, 39), (15, 25), (3, 3, 34), (1, 2)])
def test_a_product_in_parts_has_the_bits_of_the_whole(parts: tuple[int, ...]) -> None:
    from agent_rl.train.expert_balancing.borrowed_experts import Rows

    torch.manual_seed(0)
    tokens, weight = torch.randn(sum(parts), 512), torch.randn(1, 256, 512).transpose(1, 2)
    least = torch.tensor([min(16, sum(parts))])

    def product(rows: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(rows, weight, offs=torch.tensor([len(rows)], dtype=torch.int32))

    found = []
    for part in tokens.split(parts):
        rows = Rows(torch.tensor([len(part)]), least)
        found.append(rows.cut(product(rows.fill(part))))
    assert torch.equal(torch.cat(found), product(tokens))


def test_rows_are_filled_only_where_an_expert_has_some() -> None:
    from agent_rl.train.expert_balancing.borrowed_experts import Rows

    rows = Rows(torch.tensor([2, 0, 5]), torch.tensor([3, 3, 0]))
    assert rows.restore.tolist() == [3, 0, 5]
    assert rows.fill(torch.arange(1.0, 8.0)).tolist() == [1, 2, 0, 3, 4, 5, 6, 7]
    assert rows.cut(rows.fill(torch.arange(7.0))).tolist() == list(range(7))


def test_only_experts_shared_out_are_filled_and_not_beyond_their_tokens() -> None:
    from agent_rl.train.expert_balancing.plan_feed import local_slots

    held, least = local_slots(shared_out(), 0, 16)
    assert held.tolist() == [True, True, True, True, True, False]
    assert least.tolist()[:5] == [0, 10, 0, 0, 0]
    assert local_slots(shared_out(), 1, 4)[1].tolist()[-1] == 4


def test_plans_are_refused_by_a_model_that_borrows_nothing(build: Any) -> None:
    from agent_rl.train.megatron.packed_batch import PackedBatch

    with pytest.raises(TrainerError, match="not built with balance"):
        build().forward_logprobs([PackedBatch.from_sequences([[1, 2, 3]])], None, plans=[])


def test_each_forward_pass_has_its_plan_and_each_recomputation_its_own(build: Any) -> None:
    from agent_rl.train.expert_balancing.moe_layer import BalancedMoELayer
    from agent_rl.train.expert_balancing.plan_feed import Balancing
    from agent_rl.train.megatron.packed_batch import PackedBatch

    nothing: Any = None  # no plan, so nothing is ever fetched
    model = build(recompute="full", balance=Balancing(Grid(8, 1, 1), lambda _: (nothing, nothing)))
    model.forward_logprobs([PackedBatch.from_sequences([[1, 2, 3]])], None, plans=[])
    layer = next(part for part in model.modules[0].modules() if isinstance(part, BalancedMoELayer))
    with pytest.raises(TrainerError, match="layer 1: recomputed more often than it was run forward"):
        layer(torch.zeros(2, 1, model.config.hidden_size))
    with pytest.raises(TrainerError, match="micro-batches, not 2"):
        model.balancer.finish(2)
    with model.balancer.forward(0, None, backward=True):
        pass
    with pytest.raises(TrainerError, match="kept for a recomputation that did not come"):
        model.balancer.finish(1)
    model.balancer.finish(0)
