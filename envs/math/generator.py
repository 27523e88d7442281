"""Generates problems with exact answers, deterministically for each seed.

The splits are disjoint for all seeds: a hash of the question decides whether a problem is held out. A family has one
wording for each question, so that no problem is in both splits in different words.
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
"""One of 8 questions is held out."""
_MAX_REPEATS = 10_000


def generate(split: str, count: int, seed: int, levels: Sequence[int] = tuple(LEVELS)) -> list[Problem]:
    """The first ``count`` problems of ``split`` under ``seed``. Raises ValueError if there are fewer."""
    problems = list(islice(stream(split, seed, levels), count))
    if len(problems) < count:
        raise ValueError(f"levels {list(levels)} have {len(problems)} {split} problems under seed {seed}, not {count}")
    return problems


def stream(split: str, seed: int, levels: Sequence[int] = tuple(LEVELS)) -> Iterator[Problem]:
    """Problems of ``split`` and ``levels`` without duplicates. The stream ends after 10,000 draws without a new
    question.

    Raises ValueError for an unknown split or level.
    """
    if split not in SPLITS or not levels or not set(levels) <= set(LEVELS):
        raise ValueError(f"split {split!r}, levels {list(levels)}: one of {', '.join(SPLITS)}, and some of 1 to 5")
    rng = random.Random(f"maths/{GENERATOR_VERSION}/{split}/{seed}")
    seen: set[str] = set()
    repeats = 0
    while repeats < _MAX_REPEATS:
        family, level = rng.choice(list(FAMILIES)), rng.choice(list(levels))
        question, answer = FAMILIES[family](rng, level)
        if question in seen or _is_held_out(question) != (split == "heldout"):
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


def _is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % _HELDOUT_SHARE == 0
