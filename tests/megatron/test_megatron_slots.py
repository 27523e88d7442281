"""The slot of every token, and products whose bits do not depend on how ranks share an expert's rows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import megatron_tiny as tiny
import numpy as np
import torch
from torch import Tensor

from agent_rl.errors import TrainerError
from r3.balance import ExpertLayout, LayerPlan

pytestmark = pytest.mark.megatron

LAYOUT = ExpertLayout(experts=8, ranks=2, slots=2)
"""Experts 0 to 3 have slots 0 to 3, 4 to 7 slots 6 to 9; slots 4, 5, 10 and 11 are borrowed."""


def shared_out() -> LayerPlan:
    """Rank 0 borrows expert 5 and takes all its tokens, rank 1 borrows expert 1 for 7 of its 10 tokens."""
    counts = np.full((2, 8), 5, np.int32)
    load = np.zeros((8, 2), np.int32)
    load[:4, 0] = load[4:, 1] = 10
    load[5], load[1] = (10, 0), (3, 7)
    plan = LayerPlan(LAYOUT, np.array([[5, -1], [-1, 1]], np.int32), load, counts)
    plan.check()
    return plan


def assignment(source: int, plan: LayerPlan) -> Any:
    from agent_rl.train.expert_balancing.borrowed_experts import SlotAssignment
    from agent_rl.train.expert_balancing.plan_feed import slot_assignment_table

    return SlotAssignment(*torch.from_numpy(slot_assignment_table(plan, source)))


def row_padding(counts: Tensor, min_rows: Tensor) -> Any:
    from agent_rl.train.expert_balancing.borrowed_experts import RowPadding

    return RowPadding(counts, min_rows)


def chosen(tokens: int) -> Tensor:
    """A map of two experts a token, ``[T, 8]``: each has ``tokens / 4`` tokens."""
    experts = torch.stack((torch.arange(tokens) % 8, (torch.arange(tokens) + 3) % 8), dim=1)
    return torch.zeros(tokens, 8, dtype=torch.bool).scatter_(1, experts, True)


def slot_map(assigned: Any, routing_map: Tensor) -> Tensor:
    """Which slots each token uses, bool ``[T, P]``: the definition of a slot's ``first`` and ``stop``."""
    rank_in_expert = (routing_map.cumsum(0) - 1)[:, assigned.expert]
    return routing_map[:, assigned.expert] & (rank_in_expert >= assigned.first) & (rank_in_expert < assigned.stop)


def test_tokens_follow_the_quota_and_unforeseen_tokens_use_the_last_slot() -> None:
    plan, routing_map = shared_out(), chosen(32)  # 8 tokens an expert, of which 5 were foreseen
    quota = plan.quota(0)
    slot_counts = assignment(0, plan).slot_counts(routing_map.sum(0)).tolist()
    assert slot_counts[:4] == [8, quota[1, 0], 8, 8]
    assert slot_counts[11] == 8 - quota[1, 0]  # expert 1's last live slot
    assert (slot_counts[4], slot_counts[7]) == (8, 0)  # expert 5 has moved, with what was not foreseen
    assert (slot_counts[5], slot_counts[10], sum(slot_counts)) == (0, 0, 64)


def test_fewer_tokens_than_foreseen_fill_the_first_slots() -> None:
    plan, counts = shared_out(), torch.ones(8, dtype=torch.int64)
    slot_counts = assignment(1, plan).slot_counts(counts)
    assert int(slot_counts.sum()) == 8
    assert bool((slot_counts <= 1).all())


@pytest.mark.parametrize("source", [0, 1])
def test_expert_order_matches_the_slot_map(source: int) -> None:
    routing_map = chosen(32)
    assigned = assignment(source, shared_out())
    probs = torch.rand(32, 8) * routing_map
    slots = slot_map(assigned, routing_map)
    slot_probs = torch.where(slots, probs[:, assigned.expert], 0.0)
    by_expert = probs.T[routing_map.T]
    order = assigned.expert_order(routing_map.sum(0), 64)
    assert torch.equal(by_expert[order], slot_probs.T[slots.T])
    assert torch.equal(order.sort().values, torch.arange(64))
    assert torch.equal(slots.sum(0), assigned.slot_counts(routing_map.sum(0)))


@pytest.mark.parametrize("parts", [(1, 39), (15, 25), (3, 3, 34), (1, 2)])
def test_padded_parts_of_a_product_equal_the_whole_bit_for_bit(parts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tokens, weight = torch.randn(sum(parts), 512), torch.randn(1, 256, 512).transpose(1, 2)
    min_rows = torch.tensor([min(16, sum(parts))])

    def product(rows: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(rows, weight, offs=torch.tensor([len(rows)], dtype=torch.int32))

    outputs = []
    for part in tokens.split(parts):
        padding = row_padding(torch.tensor([len(part)]), min_rows)
        outputs.append(padding.unpad(product(padding.pad(part))))
    assert torch.equal(torch.cat(outputs), product(tokens))


def test_experts_without_rows_are_not_padded() -> None:
    padding = row_padding(torch.tensor([2, 0, 5]), torch.tensor([3, 3, 0]))
    assert padding.padded_counts.tolist() == [3, 0, 5]
    assert padding.pad(torch.arange(1.0, 8.0)).tolist() == [1, 2, 0, 3, 4, 5, 6, 7]
    assert padding.unpad(padding.pad(torch.arange(7.0))).tolist() == list(range(7))


def test_only_shared_experts_are_padded_up_to_their_tokens() -> None:
    from agent_rl.train.expert_balancing.plan_feed import slot_products

    products = slot_products(shared_out(), 0, 16)
    assert (products.expert >= 0).tolist() == [True, True, True, True, True, False]
    assert products.min_rows.tolist()[:5] == [0, 10, 0, 0, 0]
    assert products.short
    assert slot_products(shared_out(), 1, 4).min_rows.tolist()[-1] == 4
    counted = products.counted(torch.tensor([5, 12, *[99] * 6]))
    assert counted.min_rows.tolist()[:5] == [0, 12, 0, 0, 0], "ten foreseen tokens and two others"


def test_a_model_without_balancing_refuses_plans(build: Any) -> None:
    with pytest.raises(TrainerError, match="not built with balance"):
        build().forward_logprobs([tiny.packed()], None, plans=[])


def test_every_forward_pass_and_recomputation_must_have_its_plan(build: Any) -> None:
    from agent_rl.train.expert_balancing.moe_layer import BalancedMoELayer
    from agent_rl.train.expert_balancing.plan_feed import BalancingSpec

    nothing: Any = None  # no plan, so nothing is ever fetched
    model = build(recompute="full", balance=BalancingSpec(ExpertLayout(8, 1, 1), lambda _: (nothing, nothing)))
    model.forward_logprobs([tiny.packed()], None, plans=[])
    layer = next(part for part in model.modules[0].modules() if isinstance(part, BalancedMoELayer))
    with pytest.raises(TrainerError, match="layer 1: recomputed more often"):
        layer(torch.zeros(2, 1, model.config.hidden_size))
    with pytest.raises(TrainerError, match="micro-batches, not 2"):
        model.balancer.finish(2)
    with model.balancer.forward(0, None, backward=True):
        pass
    with pytest.raises(TrainerError, match="kept for a recomputation that did not come"):
        model.balancer.finish(1)
    model.balancer.finish(0)
