"""Generated problems with exact answers: unlimited in number, the same for the same seed.

The splits are disjoint by content, not by luck: a problem is held out if a hash of its question says so, whatever seed
drew it. A family asks each question in one wording alone, so that no problem is in both splits in other words.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import islice

from envs.math.families import FAMILIES, LEVELS
from envs.math.records import Problem

GENERATOR_VERSION = 1
SPLITS = ("train", "heldout")
_HELDOUT_SHARE = 8
"""One in so many questions is held out."""
_MOST_REPEATS = 10_000


def generate(split: str, count: int, seed: int, levels: Sequence[int] = tuple(LEVELS)) -> list[Problem]:
    """The first ``count`` problems of ``split`` under ``seed``. Raises ValueError where there are not so many."""
    found = list(islice(stream(split, seed, levels), count))
    if len(found) < count:
        raise ValueError(f"levels {list(levels)} have {len(found)} {split} problems under seed {seed}, not {count}")
    return found


def stream(split: str, seed: int, levels: Sequence[int] = tuple(LEVELS)) -> Iterator[Problem]:
    """Problems of ``split`` of these ``levels``, no two with the same question. It ends where no new one is drawn any
    more. Raises ValueError for another split or level."""
    if split not in SPLITS or not levels or not set(levels) <= set(LEVELS):
        raise ValueError(f"split {split!r}, levels {list(levels)}: one of {', '.join(SPLITS)}, and some of 1 to 5")
    rng = random.Random(f"maths/{GENERATOR_VERSION}/{split}/{seed}")
    seen: set[str] = set()
    repeats = 0
    while repeats < _MOST_REPEATS:
        family, level = rng.choice(list(FAMILIES)), rng.choice(list(levels))
        question, answer = FAMILIES[family](rng, level)
        if question in seen or _held_out(question) != (split == "heldout"):
            repeats += 1
            continue
        repeats = 0
        seen.add(question)
        yield Problem(
            id=f"math-{split}-{seed}-{len(seen) - 1:05d}",
            question=question,
            answer=answer.latex,
            family=family,
            level=level,
        )


def _held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % _HELDOUT_SHARE == 0
