"""Partitions of sequences: complete, within the budget, even in cost; and the cost model against counted operations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_sizes import DENSE_SIZES, EXPERT_SIZES

from agent_rl.config import ParallelConfig
from agent_rl.errors import TrainerError
from agent_rl.models.spec import ModelSpec
from agent_rl.train.batching.cost import TOKENS, SequenceCost, expert_loads, sequence_cost
from agent_rl.train.batching.partition import Partition, differencing, lockstep_ranks, partition_sequences
from r3.routing import Routing

BUDGET = 128
lengths_of = st.lists(st.integers(2, BUDGET), min_size=1, max_size=40)
COST = SequenceCost(linear=100.0, quadratic=1.0)
SHAPE = {**DENSE_SIZES, **EXPERT_SIZES, "num_hidden_layers": 3, "head_dim": 16, "mlp_only_layers": [1]}


def rank_costs(parts: Partition, lengths: list[int], cost: SequenceCost = COST) -> list[float]:
    return [sum(cost.of([lengths[i] for ids in rank for i in ids])) for rank in parts]


@given(lengths_of, st.sampled_from([(1, 1), (3, 1), (4, 1), (4, 2), (4, 4)]), st.sampled_from([TOKENS, COST]))
def test_every_sequence_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], ranks: tuple[int, int], cost: SequenceCost
) -> None:
    count, lockstep = ranks
    parts = partition_sequences(lengths, budget=BUDGET, ranks=count, cost=cost, lockstep=lockstep)
    assert len(parts) == count
    micro_batches = [ids for rank in parts for ids in rank]
    assert sorted(i for ids in micro_batches for i in ids) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in ids) <= BUDGET for ids in micro_batches)
    assert parts == partition_sequences(lengths, budget=BUDGET, ranks=count, cost=cost, lockstep=lockstep)
    for start in range(0, count, lockstep):
        counts = [len(rank) for rank in parts[start : start + lockstep]]
        assert max(counts) - min(counts) <= 1, "ranks that share experts take equally many micro-batches"


@settings(max_examples=40)
@given(st.lists(st.integers(2, BUDGET), min_size=1, max_size=6), st.integers(1, 3))
def test_ranks_are_near_the_best_of_all_divisions(lengths: list[int], ranks: int) -> None:
    """Differencing stays within 4/3 - 1/(3 k) of the best division into k parts (Michiels et al., 2003)."""
    costs = COST.of(lengths)
    found = max(rank_costs(partition_sequences(lengths, budget=BUDGET, ranks=ranks, cost=COST), lengths))
    best = min(
        max(sum(c for c, at in zip(costs, places, strict=True) if at == rank) for rank in range(ranks))
        for places in itertools.product(range(ranks), repeat=len(costs))
    )
    assert found <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-6


@settings(max_examples=20)
@given(st.lists(st.integers(8, BUDGET), min_size=64, max_size=128), st.sampled_from([2, 4, 8]))
def test_ranks_are_even_in_cost_not_in_tokens(lengths: list[int], ranks: int) -> None:
    costs = rank_costs(partition_sequences(lengths, budget=BUDGET, ranks=ranks, cost=COST), lengths)
    assert max(costs) <= 1.03 * np.mean(costs)


def test_differencing_of_karmarkar_and_karps_example() -> None:
    """4, 5, 6, 7, 8: differencing gives 14 and 16, the best is 15 and 15."""
    parts = differencing([4.0, 5.0, 6.0, 7.0, 8.0], 2)
    assert sorted(sum((4, 5, 6, 7, 8)[i] for i in part) for part in parts) == [14, 16]


def test_a_sequence_that_is_too_long_or_too_short_is_refused_in_one_line() -> None:
    reason = r"^sequence 1 has 300 tokens and train.microbatch_tokens is 256: raise it to 300 .*rollout.max_tokens$"
    for lengths, message in (([10, 300], reason), ([1, 30], "sequence 0 has 1 token"), ([], "no sequences")):
        with pytest.raises(TrainerError, match=message):
            partition_sequences(lengths, budget=256, ranks=1)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"world_size": 4}, 1),
        ({"world_size": 4, "expert": 2}, 2),
        ({"world_size": 8, "expert": 8, "tensor": 2}, 4),
        ({"world_size": 8, "expert": 2, "tensor": 2}, 1),  # tensor peers share a data rank
        ({"world_size": 8, "expert": 2, "tensor": 2, "context": 2}, 1),
        ({"world_size": 12, "expert": 3, "tensor": 2}, 6),  # groups straddle data ranks
        ({"world_size": 8, "expert": 4, "pipeline": 2}, 4),
    ],
)
def test_number_of_ranks_in_lockstep(layout: dict[str, int], expected: int) -> None:
    assert lockstep_ranks(ParallelConfig(**layout)) == expected


def specialized(length: int, expert_rank: int) -> Routing:
    """All tokens of one layer use experts 0 and 1 (rank 0 of 2) or 2 and 3 (rank 1)."""
    experts = np.tile(np.array([0, 1], np.uint8) + 2 * expert_rank, (length, 1, 1))
    return Routing(experts, np.ones(length, bool), (), 4)


def test_expert_loads_count_tokens_times_experts() -> None:
    assert expert_loads(specialized(100, 1), 2).tolist() == [[0, 200]]
    absent = Routing(np.zeros((100, 3, 2), np.uint8), np.zeros(100, bool), (), 4)
    assert expert_loads(absent, 2).tolist() == [[100, 100]] * 3


def test_micro_batches_that_use_the_same_expert_rank_do_not_run_together() -> None:
    """Four equal micro-batches, two at a time."""
    lengths, used = [BUDGET] * 4, [0, 0, 1, 1]
    loads = [expert_loads(specialized(BUDGET, rank), 2) for rank in used]
    cost = SequenceCost(linear=100.0, quadratic=1.0, expert=20.0)
    blind = partition_sequences(lengths, budget=BUDGET, ranks=2, cost=cost, lockstep=2)
    assert {used[first[0]] == used[second[0]] for first, second in zip(*blind, strict=True)} == {True}
    parts = partition_sequences(lengths, budget=BUDGET, ranks=2, cost=cost, lockstep=2, loads=loads)
    assert {used[first[0]] == used[second[0]] for first, second in zip(*parts, strict=True)} == {False}


def test_cost_equals_the_operations_of_a_real_forward_pass() -> None:
    """Of transformers' model by torch's counter, which counts attention as not causal."""
    torch = pytest.importorskip("torch", reason="torch is not installed (the train extra)")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.Qwen3MoeConfig(**SHAPE, norm_topk_prob=True, tie_word_embeddings=True)
    config._attn_implementation = config._experts_implementation = "eager"
    model, tokens = transformers.Qwen3MoeForCausalLM(config), 40
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(tokens)[None], use_cache=False)
    cost = sequence_cost(ModelSpec.of({"model_type": "qwen3_moe", "decoder_sparse_step": 1, **SHAPE}))
    layers, queries = SHAPE["num_hidden_layers"], SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    above_the_diagonal = layers * 2 * queries * (2 * tokens**2 - tokens * (tokens + 1))
    assert cost.of([tokens])[0] + above_the_diagonal == counter.get_total_flops()
