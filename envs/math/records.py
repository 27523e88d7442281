"""Reads rows of common math data sets (GSM8K, MATH, verl's format) as problems with one correct answer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any, TypeGuard

from pydantic import BaseModel, ConfigDict

from envs.math.grader import Grader, extract_answer
from envs.rows import BrokenRowsError, read_rows
from envs.types import TaskRecordError


class Problem(BaseModel):
    """One problem. ``messages`` are the initial messages of a row that has them, else empty. ``answer`` is LaTeX
    without delimiters. Only generated problems have ``family`` and ``level``."""

    model_config = ConfigDict(frozen=True)

    id: str
    question: str
    answer: str
    messages: tuple[dict[str, str], ...] = ()
    family: str = ""
    level: int = 0


_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """The distinct problems of a source, an error line for each skipped broken row, and the number of duplicate
    rows."""

    problems: Sequence[Problem]
    broken: Sequence[str] = ()
    repeated: int = 0


def read_problems(
    source: str,
    grader: Grader,
    *,
    split: str | None = None,
    skip_broken: bool = False,
    where: Mapping[str, Any] = MappingProxyType({}),
) -> ProblemSet:
    """The problems of a file or a data set, of the rows whose fields have the values in ``where``.

    Raises ``BrokenRowsError`` for rows without a question or a parsable answer, unless ``skip_broken``;
    ``TaskRecordError`` for a source that cannot be read or has no problem.
    """
    problems: dict[str, tuple[int, Problem]] = {}
    faults: dict[int, str] = {}
    repeated = 0
    for number, row in read_rows(source, split):
        if where and not (isinstance(row, Mapping) and where.items() <= row.items()):
            continue
        try:
            problem = _problem(row)
        except ValueError as error:
            faults[number] = str(error)
            continue
        first, known = problems.setdefault(problem.id, (number, problem))
        if known.answer != problem.answer:
            faults[number] = f"answer: {problem.answer!r}, but {known.answer!r} in row {first} with the same question"
        elif first != number:
            repeated += 1
    unparsable = set(grader.unparsable(list(dict.fromkeys(problem.answer for _, problem in problems.values()))))
    for number, problem in problems.values():
        if problem.answer in unparsable:
            faults[number] = f"answer: {problem.answer[:80]!r} cannot be parsed; expected a number or an expression"
    broken = [f"row {number}: {faults[number]}" for number in sorted(faults)]
    if broken and not skip_broken:
        raise BrokenRowsError(source, broken)
    valid = [problem for number, problem in problems.values() if number not in faults]
    if not valid:
        raise TaskRecordError(f"{source}: no {'valid ' if broken else ''}problem")
    return ProblemSet(valid, broken, repeated)


def _problem(row: Mapping[str, Any] | str) -> Problem:
    """Raises ValueError with the name of the missing or wrong field."""
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
        raise ValueError("question: missing; expected a text in question or problem, or messages in prompt")
    if not _is_text(fields[name]):
        raise ValueError(f"{name}: {_describe(fields[name])}; expected a text that is not empty")
    return str(fields[name])


def _answer(fields: Mapping[str, Any]) -> str:
    r"""The field ``answer`` (GSM8K: the text after ``####``), else the ``\boxed{}`` of ``solution`` (MATH)."""
    if fields.get("answer") is not None:
        text = _answer_text("answer", fields["answer"])
        return text.rpartition("####")[2].strip()
    if fields.get("solution") is None:
        raise ValueError(r"answer: missing; expected answer, or a solution with \boxed{}")
    solution = _answer_text("solution", fields["solution"])
    boxed = extract_answer(solution) if r"\boxed" in solution else None
    if boxed is None:
        raise ValueError(r"solution: no \boxed{...}, and there is no field answer")
    return boxed


def _ground_truth(fields: Mapping[str, Any]) -> str:
    judge = fields.get("reward_model")
    if not isinstance(judge, Mapping) or judge.get("ground_truth") is None:
        raise ValueError('reward_model.ground_truth: missing; expected {"ground_truth": "42"} in reward_model')
    return _answer_text("reward_model.ground_truth", judge["ground_truth"])


def _prompt(fields: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """The messages of ``prompt``, in verl's format; the last is the user's."""
    prompt = fields.get("prompt")
    parts: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    is_valid = isinstance(parts, Sequence) and len(parts) > 0 and all(map(_is_message, parts))
    if not is_valid or parts[-1]["role"] != "user":
        raise ValueError(
            f'prompt: {_describe(prompt)}; expected messages, the last of them {{"role": "user", "content": TEXT}}'
        )
    return tuple({"role": part["role"], "content": part["content"]} for part in parts)


def _is_message(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("role") in _ROLES and _is_text(part.get("content"))


def _is_text(value: object) -> TypeGuard[str]:
    """Whether ``value`` is a non-blank text without lone surrogates."""
    return isinstance(value, str) and bool(value.strip()) and not any("\ud800" <= sign <= "\udfff" for sign in value)


def _answer_text(name: str, value: object) -> str:
    """An answer as text. Integers and floats become decimals, never ``1e-07``, which would be parsed as a product with
    the number e."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{Decimal(str(value)):f}"
    if not _is_text(value):
        raise ValueError(f"{name}: {_describe(value)}; expected a text or a number")
    return value.strip()


def _describe(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}" if value is not None else "missing"
