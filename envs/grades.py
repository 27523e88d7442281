"""Checks the grades that environments return, and weighs the parts of a reward."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from envs.types import Grade, ProtocolError

MAX_NAMES = 32
"""Parts of a reward, and metrics, that one grade may have."""
PART_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,39}$"
RESERVED_PARTS = frozenset({"mean", "std", "pass_rate", "groups_uniform"})
"""Names of metrics ``reward/NAME`` that every run has."""


def checked_grade(grade: object, turns: int | None = None) -> Grade:
    """``grade`` with plain types. Raises ProtocolError if records and the trainer cannot represent it. ``turns``: the
    agent's number of turns; None: not known."""
    if not isinstance(grade, Grade):
        raise ProtocolError(f"grade returned a {type(grade).__name__}, not a Grade")
    reward = float(grade.reward)
    if not math.isfinite(reward):
        raise ProtocolError(f"the reward is {reward}: it must be finite")
    texts = (grade.patch, grade.log, *grade.suspected_hack, *grade.tests.keys(), *grade.tests.values())
    if not all(isinstance(text, str) for text in texts):
        raise ProtocolError("grade returned a Grade whose patch, log, tests or suspected_hack are not strings")
    parts, metrics = _checked_numbers(grade.parts, "parts"), _checked_numbers(grade.metrics, "metrics")
    if reserved := sorted(RESERVED_PARTS & parts.keys()):
        raise ProtocolError(f"the grade's part {reserved[0]!r} has the name of a metric of every run: rename it")
    rewards = _checked_turns(grade.turn_rewards, turns)
    return replace(
        grade, reward=reward, resolved=bool(grade.resolved), parts=parts, metrics=metrics, turn_rewards=rewards
    )


def weighted(grade: Grade, weights: Mapping[str, float]) -> Grade:
    """``grade`` with the sum of its parts times ``weights`` as its reward; without weights as it is. Raises
    ProtocolError where it lacks a part that has a weight."""
    if not weights:
        return grade
    if missing := [name for name in weights if name not in grade.parts]:
        named = ", ".join(grade.parts) or "none"
        raise ProtocolError(f"reward_weights names the part {missing[0]!r}; the grade's parts are: {named}")
    return replace(grade, reward=math.fsum(weight * grade.parts[name] for name, weight in weights.items()))


def _checked_turns(rewards: object, turns: int | None) -> tuple[float, ...]:
    if not isinstance(rewards, Sequence) or isinstance(rewards, str):
        raise ProtocolError(f"the grade's turn_rewards are a {type(rewards).__name__}; expected a list of numbers")
    for number, reward in enumerate(rewards, 1):
        if not isinstance(reward, bool | int | float) or not math.isfinite(reward):
            raise ProtocolError(f"the grade's reward of turn {number} is {str(reward)[:60]}; expected a finite number")
    if rewards and turns is not None and len(rewards) != turns:
        raise ProtocolError(
            f"the grade's turn_rewards are {len(rewards)} numbers; the agent took {turns} turns: give one for each"
        )
    return tuple(float(reward) for reward in rewards)


def _checked_numbers(numbers: object, field: str) -> dict[str, float]:
    if not isinstance(numbers, Mapping) or len(numbers) > MAX_NAMES:
        raise ProtocolError(f"the grade's {field} must be a dict of at most {MAX_NAMES} names and numbers")
    for name, number in numbers.items():
        if not isinstance(name, str) or not re.match(PART_NAME, name):
            raise ProtocolError(
                f"the grade's {field} have the name {str(name)[:60]!r}; a name is a letter, then up to 39 letters, "
                "digits, _, . or -"
            )
        if not isinstance(number, bool | int | float) or not math.isfinite(number):
            raise ProtocolError(f"the grade's {field} have {name} = {str(number)[:60]}; expected a finite number")
    return {name: float(number) for name, number in numbers.items()}
