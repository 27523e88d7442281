"""Rows of the usual data sets of mathematics as problems: what is asked, and the one answer that is right."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict

from envs.math.grader import Grader, answer_of
from envs.rows import BrokenRowsError, read_rows
from envs.types import TaskRecordError


class Problem(BaseModel):
    """``question`` in the words of the row. ``messages`` is the whole opening where the row brings it, else empty.
    ``answer`` is LaTeX without delimiters. ``family`` and ``level`` are a generated problem's."""

    model_config = ConfigDict(frozen=True)

    id: str
    question: str
    answer: str
    messages: tuple[dict[str, str], ...] = ()
    family: str = ""
    level: int = 0


_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Problems:
    """What was read: the problems, each once, a line for every row that was left out as broken, and how many rows said
    the same as one before them."""

    problems: Sequence[Problem]
    broken: Sequence[str] = ()
    repeated: int = 0


def read_problems(source: str, grader: Grader, *, split: str | None = None, skip_broken: bool = False) -> Problems:
    """The problems of a file or a data set. Raises ``BrokenRowsError`` for rows that have no question or no answer that
    can be read, unless ``skip_broken``; ``TaskRecordError`` for a source that cannot be read or holds nothing."""
    found: dict[str, tuple[int, Problem]] = {}
    faults: dict[int, str] = {}
    repeated = 0
    for number, row in read_rows(source, split):
        try:
            problem = _problem(row)
        except ValueError as error:
            faults[number] = str(error)
            continue
        first, known = found.setdefault(problem.id, (number, problem))
        if known.answer != problem.answer:
            faults[number] = f"answer: {problem.answer!r}, and {known.answer!r} in row {first}, which asks the same"
        elif first != number:
            repeated += 1
    unreadable = set(grader.unreadable(list(dict.fromkeys(problem.answer for _, problem in found.values()))))
    for number, problem in found.values():
        if problem.answer in unreadable:
            faults[number] = f"answer: {problem.answer[:80]!r} can't be read; right would be a number or an expression"
    broken = [f"row {number}: {faults[number]}" for number in sorted(faults)]
    if broken and not skip_broken:
        raise BrokenRowsError(source, broken)
    whole = [problem for number, problem in found.values() if number not in faults]
    if not whole:
        raise TaskRecordError(f"{source}: holds no problem" + (" that is whole" if broken else ""))
    return Problems(whole, broken, repeated)


def _problem(row: Mapping[str, Any] | str) -> Problem:
    """Raises ValueError naming the field that is absent or wrong."""
    if isinstance(row, str):
        raise ValueError(row)
    fields = {key.lower(): value for key, value in row.items()}
    if "reward_model" in fields or ("prompt" in fields and not {"question", "problem"} & fields.keys()):
        messages, answer = _prompt(fields), _ground_truth(fields)
        question = next(message["content"] for message in reversed(messages) if message["role"] == "user")
    else:
        messages, question, answer = (), _question(fields), _answer(fields)
    digest = hashlib.sha256(repr((question, messages)).encode()).hexdigest()[:16]
    return Problem(id=digest, question=question, answer=answer, messages=messages)


def _question(fields: Mapping[str, Any]) -> str:
    name = next((name for name in ("question", "problem") if fields.get(name) is not None), None)
    if name is None:
        raise ValueError("question: missing; right would be a text in question or problem, or messages in prompt")
    if not _is_text(fields[name]):
        raise ValueError(f"{name}: {_shown(fields[name])}; right would be a text that is not empty")
    return str(fields[name])


def _answer(fields: Mapping[str, Any]) -> str:
    r"""The field ``answer``: of GSM8K what follows ``####``; without it what ``solution`` sandboxes, as MATH does."""
    if fields.get("answer") is not None:
        text = _written("answer", fields["answer"])
        return text.rpartition("####")[2].strip()
    if fields.get("solution") is None:
        raise ValueError(r"answer: missing; right would be answer, or a solution with \boxed{}")
    solution = _written("solution", fields["solution"])
    sandboxed = answer_of(solution) if r"\boxed" in solution else None
    if sandboxed is None:
        raise ValueError(
            r"solution: sandboxes no answer, and there is no field answer; right would be \boxed{...} in it"
        )
    return sandboxed


def _ground_truth(fields: Mapping[str, Any]) -> str:
    judge = fields.get("reward_model")
    if not isinstance(judge, Mapping) or judge.get("ground_truth") is None:
        raise ValueError('reward_model.ground_truth: missing; right would be {"ground_truth": "42"} in reward_model')
    return _written("reward_model.ground_truth", judge["ground_truth"])


def _prompt(fields: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """The messages of ``prompt``, as verl's rows have them; the last is the user's."""
    prompt = fields.get("prompt")
    parts: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    fine = isinstance(parts, Sequence) and len(parts) > 0 and all(map(_is_message, parts))
    if not fine or parts[-1]["role"] != "user":
        raise ValueError(
            f'prompt: {_shown(prompt)}; right would be messages, the last of them {{"role": "user", "content": TEXT}}'
        )
    return tuple({"role": part["role"], "content": part["content"]} for part in parts)


def _is_message(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("role") in _ROLES and _is_text(part.get("content"))


def _is_text(value: object) -> TypeGuard[str]:
    """Whether ``value`` is a text that can be written as UTF-8, and not blank."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= sign <= "\udfff" for sign in value)


def _written(name: str, value: object) -> str:
    """An answer as text: whole numbers and decimals may stand in a row as such. Never as ``1e-07``, which is read as a
    product with the number e."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{Decimal(str(value)):f}"
    if not _is_text(value):
        raise ValueError(f"{name}: {_shown(value)}; right would be a text or a number")
    return value.strip()


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}" if value is not None else "missing"
