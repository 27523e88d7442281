"""Several saved evaluations side by side: labels that differ, pooled repetitions, and a matrix of tasks and models."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from agent_rl.evaluation.paired import Score
from agent_rl.evaluation.saved import Effort, SavedEvaluation
from agent_rl.evaluation.usage import total

MAX_LABEL = 24
"""Characters of a label; a longer label loses what it has in common with all others at its start."""


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One task: the score in each evaluation; None where it was not evaluated."""

    task_id: str
    scores: tuple[Score | None, ...]

    @property
    def disagreement(self) -> float:
        """The largest difference between the shares of resolved samples of two evaluations."""
        rates = [score.resolved / score.graded for score in self.scores if score is not None and score.graded]
        return max(rates, default=0.0) - min(rates, default=0.0)


def matrix(evaluations: Sequence[SavedEvaluation]) -> list[MatrixRow]:
    """All tasks of ``evaluations``, those with the largest disagreement first."""
    tasks = set[str]().union(*(one.scores for one in evaluations))
    rows = [MatrixRow(task, tuple(one.scores.get(task) for one in evaluations)) for task in tasks]
    return sorted(rows, key=lambda row: (-row.disagreement, row.task_id))


def pool(evaluations: Sequence[SavedEvaluation]) -> list[list[SavedEvaluation]]:
    """The evaluations with equal settings together, in the order of their first members."""
    groups: dict[str, list[SavedEvaluation]] = defaultdict(list)
    for one in evaluations:
        groups[json.dumps([one.model, one.settings], sort_keys=True)].append(one)
    return list(groups.values())


def merge(group: Sequence[SavedEvaluation]) -> SavedEvaluation:
    """Repeated evaluations as one with all their samples."""
    scores: dict[str, Score] = {}
    for one in group:
        for task, score in one.scores.items():
            known = scores.get(task, Score(0, 0))
            scores[task] = Score(known.resolved + score.resolved, known.graded + score.graded)
    efforts = {task: _merge_efforts([one.efforts[task] for one in group if task in one.efforts]) for task in scores}
    first = group[0]
    known_efforts = {task: effort for task, effort in efforts.items() if effort is not None}
    return SavedEvaluation(" + ".join(one.name for one in group), scores, first.settings, first.model, known_efforts)


def _merge_efforts(efforts: Sequence[Effort]) -> Effort | None:
    if not efforts:
        return None
    costs = [effort.cost for effort in efforts]
    return Effort(
        turns=statistics.fmean(effort.turns for effort in efforts),
        seconds=_mean([effort.seconds for effort in efforts]),
        usage=total(effort.usage for effort in efforts),
        cost=None if None in costs else sum(cost for cost in costs if cost is not None),
    )


def labels(evaluations: Sequence[SavedEvaluation]) -> list[str]:
    """A different label for each evaluation: the model's name, and the part of the path that differs where models are
    equal."""
    models, parts = [one.model for one in evaluations], _differing_parts([one.name for one in evaluations])
    if len(set(models)) == 1 and len(evaluations) > 1:
        named = parts
    else:
        counts = Counter(models)
        named = [
            f"{model} {part}".strip() if counts[model] > 1 or not model else model
            for model, part in zip(models, parts, strict=True)
        ]
    return _numbered(_shortened(named))


def _differing_parts(names: Sequence[str]) -> list[str]:
    """``names`` without the components that all have in common at the start and at the end."""
    split = [re.split(r"[/:]+", name.rstrip("/")) for name in names]
    start = _common(split)
    end = _common([parts[start:][::-1] for parts in split])
    return ["/".join(parts[start : len(parts) - end]) or parts[-1] for parts in split]


def _common(rows: Sequence[Sequence[str]]) -> int:
    """The number of equal components at the start of all ``rows``."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))


def _shortened(names: Sequence[str]) -> list[str]:
    if max(map(len, names)) <= MAX_LABEL or len(set(names)) == 1:
        return list(names)
    words = [re.findall(r"[^-/_. ]*[-/_. ]|.+$", name) for name in names]
    start = min(_common(words), min(map(len, words)) - 1)
    return ["".join(["..." if start else "", *each[start:]]) for each in words]


def _numbered(names: Sequence[str]) -> list[str]:
    """``names``, the second of two equal ones with #2, and so on."""
    seen: Counter[str] = Counter()
    result = list[str]()
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return result


def mean_effort(evaluation: SavedEvaluation, tasks: Sequence[str]) -> dict[str, float | None]:
    """Means over ``tasks``: turns and seconds of a sample; tokens in, tokens out and cost of a task. None if the value
    of a task is unknown."""
    efforts = [evaluation.efforts.get(task) for task in tasks]
    usages = [None if effort is None else effort.usage for effort in efforts]
    return {
        "turns": _mean([None if effort is None else effort.turns for effort in efforts]),
        "seconds": _mean([None if effort is None else effort.seconds for effort in efforts]),
        "prompt_tokens": _mean([None if usage is None else usage.prompt for usage in usages]),
        "completion_tokens": _mean([None if usage is None else usage.completion for usage in usages]),
        "cost": _mean([None if effort is None else effort.cost for effort in efforts]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None
