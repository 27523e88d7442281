"""Computes diff hunks in nearly linear time, also for adversarial texts (patience diff)."""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

_MAX_ANCHORED = 100_000
_Chain = tuple[tuple[int, int], Any]
"""A pair of indices, and the chain before it or None."""


def hunks(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The hunk lines of a unified diff. ``old`` and ``new`` are lines with their line ends."""
    lines: list[str] = []
    for group in _Matcher(old, new).get_grouped_opcodes():
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        lines.append(f"@@ -{_range(i1, i2)} +{_range(j1, j2)} @@\n")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [f" {line}" for line in old[i1:i2]]
            else:
                lines += [f"-{line}" for line in old[i1:i2]]
                lines += [f"+{line}" for line in new[j1:j2]]
    return lines


def _range(start: int, stop: int) -> str:
    length = stop - start
    return f"{start + 1}" if length == 1 else f"{start + 1 if length else start},{length}"


class _Matcher(difflib.SequenceMatcher[str]):
    """Matches two texts from the lines that are unique in both (patience diff). The base class's search takes cubic
    time on texts with few distinct lines."""

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        super().__init__()  # without the texts: the base class would index them
        self._old, self._new = old, new

    def get_matching_blocks(self) -> list[difflib.Match]:
        return [*_blocks(self._old, self._new), difflib.Match(len(self._old), len(self._new), 0)]


def _blocks(old: Sequence[str], new: Sequence[str]) -> Iterator[difflib.Match]:
    """Maximal runs of equal lines around the anchors and around the starts and ends of the texts."""
    end_old = end_new = 0
    for i, j in [(0, 0), *_anchors(old, new), (len(old), len(new))]:
        if i < end_old or j < end_new:
            continue
        before = after = 0
        while min(i - end_old, j - end_new) > before and old[i - before - 1] == new[j - before - 1]:
            before += 1
        while i + after < len(old) and j + after < len(new) and old[i + after] == new[j + after]:
            after += 1
        if before + after:
            yield difflib.Match(i - before, j - before, before + after)
            end_old, end_new = i + after, j + after


def _anchors(old: Sequence[str], new: Sequence[str]) -> list[tuple[int, int]]:
    """The longest increasing sequence of (old, new) indices of lines that are unique in both texts.

    Empty for texts of more than 100,000 lines in total, whose diff then only has a common start and end.
    """
    if len(old) + len(new) > _MAX_ANCHORED:
        return []
    old_counts, new_counts = Counter(old), Counter(new)
    old_index = {line: index for index, line in enumerate(old) if old_counts[line] == 1}
    pairs = [(old_index[line], index) for index, line in enumerate(new) if new_counts[line] == 1 and line in old_index]
    ends: list[int] = []
    chains: list[_Chain] = []  # by length, the increasing sequence with the smallest end
    for index, new_index in pairs:
        length = bisect_left(ends, index)
        ends[length : length + 1] = [index]
        chains[length : length + 1] = [((index, new_index), chains[length - 1] if length else None)]
    found = []
    chain: _Chain | None = chains[-1] if chains else None
    while chain:
        pair, chain = chain
        found.append(pair)
    return found[::-1]
