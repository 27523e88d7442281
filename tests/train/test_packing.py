"""Packing with samples whose every row can be told apart: what goes in comes out, in place and once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.errors import TrainerError
from agent_rl.train.batching.packing import pack, pack_weighted
from agent_rl.train.batching.partition import partition_sequences, split_step
from agent_rl.types import Sample

lengths_of = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def distinct(length: int, index: int) -> Sample:
    """Token i of sample s is s * 100 + i, and so is its log-prob."""
    rows = index * 100 + np.arange(length)
    return Sample(
        tokens=rows.astype(np.int32),
        loss_mask=rows % 3 == 0,
        logprobs=rows.astype(np.float32),
        advantage=float(index) - 0.5,
        routing=None,
        weight=1.0 + index,
    )


@given(lengths_of, st.integers(1, 3))
def test_round_trip(lengths: list[int], ranks: int) -> None:
    samples = [distinct(length, index) for index, length in enumerate(lengths)]
    batches = [pack(samples, ids) for rank in partition_sequences(lengths, budget=64, ranks=ranks) for ids in rank]

    def returned(name: str) -> dict[int, np.ndarray]:
        pieces = [
            (index, getattr(batch, name)[batch.cu_seqlens[at] : batch.cu_seqlens[at + 1]])
            for batch in batches
            for at, index in enumerate(batch.sample_ids)
        ]
        assert sorted(index for index, _ in pieces) == list(range(len(samples))), "every sample exactly once"
        return dict(pieces)

    for index, sample in enumerate(samples):
        np.testing.assert_array_equal(returned("tokens_T")[index], sample.tokens)
        np.testing.assert_array_equal(returned("logprobs_T")[index], sample.logprobs)
        np.testing.assert_array_equal(returned("mask_T")[index][1:], sample.loss_mask[1:])
        assert not returned("mask_T")[index][0]
        assert set(returned("advantages_T")[index]) == {np.float32(sample.advantage)}
        assert set(returned("weights_T")[index]) == {np.float32(sample.weight)}


def test_what_does_not_line_up_raises() -> None:
    good = distinct(5, 0)
    for bad, message in (
        (replace(good, logprobs=good.logprobs[1:]), "5 tokens and 4 entries of logprobs"),
        (replace(good, loss_mask=good.loss_mask[1:]), "5 tokens and 4 entries of loss_mask"),
    ):
        with pytest.raises(TrainerError, match=message):
            pack([bad], (0,))


@given(lengths_of, st.integers(1, 4), st.integers(1, 3))
def test_split_step_uses_every_sample_in_exactly_one_mini_step(lengths: list[int], mini_steps: int, ranks: int) -> None:
    samples = [distinct(length, index) for index, length in enumerate(lengths)]
    shares = split_step(samples, mini_steps=mini_steps, budget=64, ranks=ranks)
    assert len({len(rank) for rank in shares}) == 1
    seen = [i for rank in shares for share in rank for ids in share.micro_batches for i in ids]
    assert sorted(seen) == list(range(len(samples)))
    for step in range(len(shares[0])):
        batches = [pack(samples, ids) for rank in shares for ids in rank[step].micro_batches]
        assert {rank[step].sampled_tokens for rank in shares} == {sum(int(b.mask_T.sum()) for b in batches)}


def test_weighted_sequences() -> None:
    sequences = [
        (np.array([5, 6, 7], np.int32), np.array([1, 0.2, 1], np.float32)),
        (np.array([8, 9], np.int32), np.array([0.2, 1], np.float32)),
    ]
    batch = pack_weighted(sequences, (1, 0))
    assert batch.tokens_T.tolist() == [8, 9, 5, 6, 7]
    assert batch.weights_T.tolist() == pytest.approx([0, 1, 0, 0.2, 1])
    assert sequences[0][1][0] == 1, "the caller's weights stay as they were"
    with pytest.raises(TrainerError, match="sequence 0 has 2 tokens and 3 loss weights"):
        pack_weighted([(np.array([1, 2], np.int32), np.ones(3, np.float32))], (0,))
