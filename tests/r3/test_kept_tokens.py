"""Kept tokens against lists of lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.kept_tokens import KeptTokens, KeptTokensError

rows_of = st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8)


def listed(kept: KeptTokens) -> list[list[int]]:
    return [row.tolist() for row in np.split(kept.ids, np.cumsum(kept.counts)[:-1])][: len(kept.counts)]


@given(st.lists(st.tuples(rows_of, st.booleans()), min_size=1, max_size=5))
def test_joined_parts_keep_their_rows_in_order(parts: list[tuple[list[list[int]], bool]]) -> None:
    joined = KeptTokens.join([(len(rows), KeptTokens.from_rows(rows) if masked else None) for rows, masked in parts])
    if joined is None:
        assert not any(masked for _, masked in parts)
    else:
        assert listed(joined) == [row if masked else [] for rows, masked in parts for row in rows]


@given(rows_of, st.randoms())
def test_spread_rows_are_at_the_sampled_tokens(rows: list[list[int]], rng: object) -> None:
    mask = [True] * len(rows) + [False] * 4
    rng.shuffle(mask)
    remaining = iter(rows)
    spread = KeptTokens.from_rows(rows).spread(np.array(mask, np.bool_))
    assert listed(spread) == [next(remaining) if sampled else [] for sampled in mask]


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=6)), max_size=8))
def test_a_token_must_be_among_its_kept_ids(drawn: list[tuple[int, list[int]]]) -> None:
    kept, tokens = KeptTokens.from_rows([row for _, row in drawn]), [token for token, _ in drawn]
    wrong = next((at for at, (token, row) in enumerate(drawn) if row and token not in row), None)
    if wrong is None:
        kept.check(tokens, 10)
    else:
        with pytest.raises(KeptTokensError, match=f"token {wrong}, id {tokens[wrong]}, is not among its"):
            kept.check(tokens, 10)


def test_misaligned_rows_are_refused() -> None:
    kept = KeptTokens.from_rows([[1], [2, 3]])
    with pytest.raises(KeptTokensError, match="3 kept ids, expected 4"):
        KeptTokens(np.array([1, 3], np.int32), kept.ids)
    with pytest.raises(KeptTokensError, match="2 rows of kept tokens, expected 3"):
        kept.check([1, 2, 3])
    with pytest.raises(KeptTokensError, match="2 rows of kept tokens, expected 1"):
        kept.spread(np.array([False, True]))
    with pytest.raises(KeptTokensError, match="2 rows of kept tokens, expected 1"):
        KeptTokens.join([(1, kept), (2, None)])
    with pytest.raises(KeptTokensError, match="kept ids 1 to 3, expected 0 to 2"):
        kept.check([1, 2], 3)
