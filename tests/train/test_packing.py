"""Packing of samples whose rows are all different."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.errors import TrainerError
from agent_rl.train.batching.packing import pack, pack_weighted
from agent_rl.train.batching.partition import partition_sequences, split_step
from agent_rl.types import Sample
from r3.kept_tokens import KeptTokens

lengths_of = st.lists(st.integers(2, 40), min_size=1, max_size=30)


def distinct(length: int, index: int) -> Sample:
    """Token i of sample s is s * 100 + i, and so is its log-prob."""
    rows = index * 100 + np.arange(length)
    logprobs = rows.astype(np.float32)
    kept = KeptTokens.from_rows(kept_rows(rows[rows % 3 == 0])) if index % 3 else None
    return Sample(rows.astype(np.int32), rows % 3 == 0, logprobs, index - 0.5, None, weight=1.0 + index, kept=kept)


def kept_rows(tokens: np.ndarray) -> list[list[int]]:
    """The kept ids of sampled tokens; every fifth one is drawn from the whole vocabulary."""
    return [[token, *range(token % 4)] if token % 5 else [] for token in tokens.tolist()]


@given(lengths_of, st.integers(1, 3))
def test_packed_rows_are_those_of_their_samples(lengths: list[int], ranks: int) -> None:
    samples = [distinct(length, index) for index, length in enumerate(lengths)]
    batches = [pack(samples, ids) for rank in partition_sequences(lengths, budget=64, ranks=ranks) for ids in rank]

    def returned(name: str) -> dict[int, np.ndarray]:
        pieces: list[tuple[int, np.ndarray]] = []
        for batch in batches:
            pieces += zip(batch.sample_ids, np.split(getattr(batch, name), batch.cu_seqlens[1:-1]), strict=True)
        assert sorted(index for index, _ in pieces) == list(range(len(samples))), "every sample exactly once"
        return dict(pieces)

    for index, sample in enumerate(samples):
        np.testing.assert_array_equal(returned("tokens_T")[index], sample.tokens)
        np.testing.assert_array_equal(returned("logprobs_T")[index], sample.logprobs)
        np.testing.assert_array_equal(returned("mask_T")[index][1:], sample.loss_mask[1:])
        assert not returned("mask_T")[index][0]
        assert set(returned("advantages_T")[index]) == {np.float32(sample.advantage)}
        assert set(returned("weights_T")[index]) == {np.float32(sample.weight)}


@given(lengths_of, st.randoms())
def test_kept_tokens_follow_their_tokens_through_packing_and_slices(lengths: list[int], rng: random.Random) -> None:
    """Each rank takes the rows of its own tokens, in any order."""
    samples = [distinct(length, index) for index, length in enumerate(lengths)]
    batch = pack(samples, rng.sample(range(len(samples)), len(samples)))
    taken = np.array(rng.sample(range(batch.tokens), rng.randrange(batch.tokens + 1)), np.int64)
    if batch.kept_T is None:
        assert len(samples) == 1
        return
    slice_of = batch.kept_T.take(taken)
    rows = [row.tolist() for row in np.split(slice_of.ids, np.cumsum(slice_of.counts))[:-1]]
    for token, row in zip(batch.tokens_T[taken], rows, strict=True):
        masked = token % 3 == 0 and token // 100 % 3
        assert row == (kept_rows(np.array([token]))[0] if masked else [])


@pytest.mark.parametrize("wrong", ["one row less", "another id"])
def test_kept_tokens_of_other_tokens_are_refused(wrong: str) -> None:
    sample = distinct(9, 1)
    rows = kept_rows(sample.tokens[sample.loss_mask])[:2] if wrong == "one row less" else [[0]] * 3
    message = "sample 0: 2 rows of kept tokens, expected 3" if len(rows) < 3 else "sample 0: token 2, id 102, is not"
    with pytest.raises(TrainerError, match=message):
        pack([replace(sample, kept=KeptTokens.from_rows(rows))], (0,))


@pytest.mark.parametrize("field", ["logprobs", "loss_mask"])
def test_samples_of_uneven_lengths_are_refused(field: str) -> None:
    good = distinct(5, 0)
    with pytest.raises(TrainerError, match=f"5 tokens and 4 entries of {field}"):
        pack([replace(good, **{field: getattr(good, field)[1:]})], (0,))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_rollout_log_prob_that_is_not_finite_is_refused_where_a_token_was_sampled(value: float) -> None:
    sample = distinct(6, 0)
    spoiled = np.where(sample.loss_mask, sample.logprobs, value).astype(np.float32)
    pack([replace(sample, logprobs=spoiled)], (0,))
    spoiled[3] = value
    with pytest.raises(TrainerError, match="sample 0 has a rollout log-prob of a sampled token that is not a finite"):
        pack([replace(sample, logprobs=spoiled)], (0,))


@given(lengths_of, st.integers(1, 4), st.integers(1, 3))
def test_split_step_uses_every_sample_in_exactly_one_mini_step(lengths: list[int], mini_steps: int, ranks: int) -> None:
    samples = [distinct(length, index) for index, length in enumerate(lengths)]
    shares = split_step(samples, mini_steps=mini_steps, budget=64, ranks=ranks)
    assert len({len(rank) for rank in shares}) == 1
    seen = [i for rank in shares for share in rank for ids in share.micro_batches for i in ids]
    assert sorted(seen) == list(range(len(samples)))
    for step in range(len(shares[0])):
        batches = [pack(samples, ids) for rank in shares for ids in rank[step].micro_batches]
        assert {rank[step].sampled_tokens for rank in shares} == {sum(int(b.drawn_T.sum()) for b in batches)}


def test_a_token_with_one_kept_id_is_not_counted() -> None:
    """A grammar forced tokens 2 and 4; token 3 was drawn from two ids, token 5 from the whole vocabulary."""
    mask = np.array([False, False, True, True, True, True])
    kept = KeptTokens.from_rows([[12], [13, 20], [14], []])
    sample = Sample(np.arange(10, 16, dtype=np.int32), mask, np.zeros(6, np.float32), 1.0, None, kept=kept)
    batch = pack([sample], (0,))
    assert batch.mask_T.tolist() == mask.tolist()
    assert batch.drawn_T.tolist() == [False, False, False, True, False, True]
    ((share,),) = split_step([sample], mini_steps=1, budget=64, ranks=1)
    assert (share.sampled_tokens, share.sequences, share.weight) == (2, 1, 2.0)


def test_weighted_sequences_are_packed_in_the_given_order() -> None:
    first = (np.array([5, 6, 7], np.int32), np.array([1, 0.2, 1], np.float32))
    sequences = [first, (np.array([8, 9], np.int32), np.array([0.2, 1], np.float32))]
    batch = pack_weighted(sequences, (1, 0))
    assert batch.tokens_T.tolist() == [8, 9, 5, 6, 7]
    assert batch.weights_T.tolist() == pytest.approx([0, 1, 0, 0.2, 1])
    assert first[1][0] == 1, "the caller's weights are unchanged"
    with pytest.raises(TrainerError, match="sequence 0 has 2 tokens and 3 loss weights"):
        pack_weighted([(np.array([1, 2], np.int32), np.ones(3, np.float32))], (0,))
