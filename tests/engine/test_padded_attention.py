"""The attention of a batch in one call, as our CPU servers compute it, against a call a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agent_rl.engine.cpu.cpu_kernels import attend, is_batched_attention_faster

pytestmark = pytest.mark.megatron
ENTRIES, HEADS, KEYS_OF, SIZE = 512, 4, 2, 16


def cache(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ENTRIES, KEYS_OF, SIZE).to(dtype), torch.randn(ENTRIES, KEYS_OF, SIZE).to(dtype)


def one_by_one(
    queries: Tensor, keys: Tensor, values: Tensor, places: Tensor, lengths: Sequence[int], asked: Sequence[int]
) -> Tensor:
    made = []
    for query, own, length, count in zip(queries.split(list(asked)), places, lengths, asked, strict=True):
        seen = torch.ones(length, length, dtype=torch.bool).tril()[-count:]
        k, v = (
            part[own[:length].long()].repeat_interleave(HEADS // KEYS_OF, 1).transpose(0, 1) for part in (keys, values)
        )
        made.append(
            scaled_dot_product_attention(query.transpose(0, 1), k, v, attn_mask=seen, scale=0.3).transpose(0, 1)
        )
    return torch.cat(made)


@pytest.mark.parametrize(
    ("lengths", "asked"),
    [([5, 30, 17], [1, 1, 1]), ([5, 30, 17], [5, 3, 12]), ([40], [7]), ([9, 9], [9, 9]), ([64] * 20, [2] * 20)],
    ids=["a new token each", "behind prefixes", "one sequence", "no prefix", "many"],
)
def test_batched_attention_equals_one_call_per_sequence(lengths: list[int], asked: list[int]) -> None:
    keys, values = cache(torch.float32)
    places = torch.randint(0, ENTRIES, (len(lengths), max(lengths)), dtype=torch.int32)
    queries = torch.randn(sum(asked), HEADS, SIZE)
    found = attend(queries, keys, values, places, torch.tensor(lengths), torch.tensor(asked), 0.3)
    torch.testing.assert_close(found, one_by_one(queries, keys, values, places, lengths, asked), rtol=1e-5, atol=1e-6)


def test_entries_after_a_sequence_are_not_read() -> None:
    keys, values = cache(torch.bfloat16)
    keys[7], values[7] = float("nan"), float("nan")
    places = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 7]], dtype=torch.int32)
    queries = torch.randn(3, HEADS, SIZE).bfloat16()
    found = attend(queries, keys, values, places, torch.tensor([4, 2]), torch.tensor([1, 2]), None)
    assert found.dtype == torch.bfloat16
    assert bool(found.isfinite().all())


def test_batched_attention_is_used_where_it_is_faster() -> None:
    def at_once(lengths: list[int], asked: list[int]) -> bool:
        return is_batched_attention_faster(torch.tensor(lengths), torch.tensor(asked), HEADS)

    assert at_once([150] * 64, [1] * 64)
    assert at_once([400], [30])
    assert not at_once([400], [1])
    assert not at_once([4000] + [10] * 63, [1] * 64)
    assert not at_once([4096], [4096])
