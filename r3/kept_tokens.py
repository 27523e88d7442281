"""Kept tokens: the ids from which each token was drawn, where the sampler excludes a part of the vocabulary.

Top-p, top-k, min-p and grammars do so. The trainer normalizes over the same ids, because the engine's log-probs do
("keep sampling mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1). Three tokens, the second drawn from the whole
vocabulary::

    counts   2    0  3
    ids      5 7     1 2 9
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class KeptTokensError(ValueError):
    """Kept tokens that belong to other tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """``counts`` int32 ``[n]``: kept ids of each of n tokens, 0 for a token drawn from the whole vocabulary. ``ids``
    int32 ``[sum(counts)]``. Raises KeptTokensError if their lengths differ."""

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]

    def __post_init__(self) -> None:
        if (self.counts < 0).any() or self.counts.sum(dtype=np.int64) != len(self.ids):
            raise KeptTokensError(f"{len(self.ids)} kept ids, expected {self.counts.sum(dtype=np.int64)}")

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> KeptTokens:
        """From one list of ids per token."""
        counts = np.fromiter(map(len, rows), np.int32, len(rows))
        return cls(counts, np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(counts.sum())))

    @classmethod
    def join(cls, parts: Sequence[tuple[int, KeptTokens | None]]) -> KeptTokens | None:
        """The rows of all parts, each with its number of tokens; a part of None has empty rows. None if all parts are.
        Raises KeptTokensError for another number of rows."""
        if all(kept is None for _, kept in parts):
            return None
        empty = np.zeros(0, np.int32)
        counts = [np.zeros(tokens, np.int32) if kept is None else kept.counts for tokens, kept in parts]
        for (tokens, _), rows in zip(parts, counts, strict=True):
            if len(rows) != tokens:
                raise KeptTokensError(f"{len(rows)} rows of kept tokens, expected {tokens}")
        return cls(np.concatenate(counts), np.concatenate([empty if kept is None else kept.ids for _, kept in parts]))

    def spread(self, mask: NDArray[np.bool_]) -> KeptTokens:
        """``[len(mask)]``: one row for each True, in order, and empty rows elsewhere. Raises KeptTokensError for
        another number of rows."""
        if np.count_nonzero(mask) != len(self.counts):
            raise KeptTokensError(f"{len(self.counts)} rows of kept tokens, expected {np.count_nonzero(mask)}")
        counts = np.zeros(len(mask), np.int32)
        counts[mask] = self.counts
        return KeptTokens(counts, self.ids)

    def take(self, rows: NDArray[np.integer]) -> KeptTokens:
        """The rows with these numbers, in this order."""
        counts, starts = self.counts[rows], (np.cumsum(self.counts) - self.counts)[rows]
        within = np.arange(counts.sum(dtype=np.int64)) - np.repeat(np.cumsum(counts) - counts, counts)
        return KeptTokens(counts, self.ids[np.repeat(starts, counts) + within])

    def check(self, tokens: Sequence[int] | NDArray[np.int32], vocab_size: int | None = None) -> None:
        """Raise KeptTokensError unless every token is among the ids of its row, if that has any, and all ids are below
        ``vocab_size``."""
        if len(tokens) != len(self.counts):
            raise KeptTokensError(f"{len(self.counts)} rows of kept tokens, expected {len(tokens)}")
        rows = np.repeat(np.arange(len(tokens)), self.counts)
        drawn = np.asarray(tokens, np.int32)
        missing = self.counts > 0
        missing[rows[self.ids == drawn[rows]]] = False
        if missing.any():
            row = int(missing.argmax())
            raise KeptTokensError(f"token {row}, id {drawn[row]}, is not among its {self.counts[row]} kept ids")
        if vocab_size is not None and len(self.ids) and not 0 <= self.ids.min() <= self.ids.max() < vocab_size:
            raise KeptTokensError(f"kept ids {self.ids.min()} to {self.ids.max()}, expected 0 to {vocab_size - 1}")
