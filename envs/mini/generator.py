"""Generated repositories with one seeded bug each: unlimited in number, the same for the same seed.

The splits are disjoint by content, not by luck: a task belongs to the held-out side if a hash of its broken function
says so, whatever seed drew it. ``heldout_family`` holds the bug families that no train task has.
The record of a task has the shape of all software-engineering tasks: R2E-Gym's row and our own fields.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from envs.mini.functions import Bug, Case, Function, build_function, draw_arguments, run_case
from envs.mini.templates import HELDOUT_FAMILIES, MODULES, TEMPLATES
from envs.swe.calls import Call
from envs.swe.diff.git_diff import diff_files
from envs.swe.records import SweRecord, parse_record

GENERATOR_VERSION = 1
SPLITS = ("train", "heldout", "heldout_family")
_HELDOUT_SHARE = 8  # one in so many functions is held out
_CASES = 3  # tests a function


@dataclass(frozen=True, slots=True)
class MiniTask:
    """One repository: its broken ``files``, the ``fixed`` ones, and what the tests expect of every function.

    ``path`` is the broken file; ``old`` and ``new`` are its wrong line and the right one, without indentation, and
    ``decoys`` are further wrong lines that could stand there (what a careless fix might write).
    """

    id: str
    split: str
    family: str
    template: str
    files: dict[str, str]
    fixed: dict[str, str]
    path: str
    old: str
    new: str
    decoys: tuple[str, ...]
    issue: str
    cases: dict[str, tuple[tuple[str, tuple[Case, ...]], ...]]


def generate(split: str, count: int, seed: int) -> list[MiniTask]:
    """The first ``count`` tasks of ``split`` under ``seed``."""
    return list(islice(stream(split, seed), count))


def stream(split: str, seed: int) -> Iterator[MiniTask]:
    """Tasks of ``split`` without end, no two with the same broken function."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
    rng = random.Random(f"mini/{GENERATOR_VERSION}/{split}/{seed}")
    seen: set[str] = set()
    index = 0
    while True:
        task = _draw(split, f"mini-{split}-{seed}-{index:05d}", rng)
        if task is None or task.files[task.path] in seen:
            continue
        seen.add(task.files[task.path])
        index += 1
        yield task


def _draw(split: str, task_id: str, rng: random.Random) -> MiniTask | None:
    """One try at a task; None where the draw is of another split, ambiguous, or shows no symptom."""
    taken: set[str] = set()
    repository: dict[str, list[Function]] = {}
    templates = iter(rng.sample(TEMPLATES, 6))
    for module in rng.sample(MODULES, rng.choices((1, 2, 3), (5, 4, 1))[0]):
        functions = [build_function(next(templates), rng, taken) for _ in range(rng.choice((1, 2)))]
        taken.update(function.name for function in functions)
        repository[f"{module}.py"] = functions
    path = rng.choice(list(repository))
    target = rng.choice(repository[path])
    family = rng.choice(sorted({bug.family for bug in target.bugs}))
    if family == "missing_return" and rng.random() < 0.6:  # nearly every function has one: keep it one family of many
        return None
    bug = rng.choice([bug for bug in target.bugs if bug.family == family])
    if not _belongs(split, bug):
        return None
    fixed = {name: "\n".join(function.source for function in functions) for name, functions in repository.items()}
    broken = fixed | {path: fixed[path].replace(target.source, bug.source)}
    line = _changed_line(target.source, bug.source)
    symptom = _symptom(target, bug, rng)
    if line is None or symptom is None or broken[path].count(line[0]) != 1:
        return None
    cases = {
        name: tuple((function.name, _cases(function, rng)) for function in functions)
        for name, functions in repository.items()
    }
    cases[path] = tuple((name, (symptom[1], *kept) if name == target.name else kept) for name, kept in cases[path])
    changes = (_changed_line(target.source, other.source) for other in target.bugs if other is not bug)
    decoys = tuple(change[0] for change in changes if change and change[1] == line[1] and change[0] != line[0])
    issue = _issue(path, *symptom, rng)
    return MiniTask(task_id, split, bug.family, target.template, broken, fixed, path, *line, decoys, issue, cases)


def _belongs(split: str, bug: Bug) -> bool:
    if split == "heldout_family":
        return bug.family in HELDOUT_FAMILIES
    held_out = hashlib.sha256(bug.source.encode()).digest()[0] % _HELDOUT_SHARE == 0
    return bug.family not in HELDOUT_FAMILIES and held_out == (split == "heldout")


def _changed_line(good: str, bad: str) -> tuple[str, str] | None:
    pairs = [
        (wrong.strip(), right.strip())
        for wrong, right in zip(bad.splitlines(), good.splitlines(), strict=True)
        if wrong != right
    ]
    return pairs[0] if len(pairs) == 1 else None


def _symptom(target: Function, bug: Bug, rng: random.Random) -> tuple[Case, Case] | None:
    """A call on which the broken and the right function differ: (what it gives, what it should give)."""
    for _ in range(40):
        arguments = draw_arguments(target.kinds, rng)
        right = run_case(target.source, target.name, arguments)
        wrong = run_case(bug.source, target.name, arguments)
        if right.result.startswith("raises") or len(right.result) > 30:
            continue
        if wrong.result != right.result and len(wrong.result) <= 30:
            return wrong, right
    return None


def _cases(function: Function, rng: random.Random) -> tuple[Case, ...]:
    """Calls of the right function that raise nothing, at most one on each result where that can be had."""
    found: dict[str, Case] = {}
    for _ in range(24):
        case = run_case(function.source, function.name, draw_arguments(function.kinds, rng))
        if not case.result.startswith("raises"):
            found.setdefault(case.result, case)
        if len(found) == _CASES:
            break
    return tuple(found.values())


def _issue(path: str, wrong: Case, right: Case, rng: random.Random) -> str:
    if wrong.result.startswith("raises"):
        return f"{path}: `{wrong.call}` {wrong.result}, expected {right.result}."
    return rng.choice(_PHRASES).format(path=path, call=wrong.call, wrong=wrong.result, right=right.result)


_PHRASES = (
    "{path}: `{call}` returns {wrong}, expected {right}.",
    "`{call}` in {path} gives {wrong} but should give {right}.",
    "In {path}, `{call}` should be {right}, not {wrong}.",
    "{path}: `{call}` is {wrong} instead of {right}.",
)


def to_record(task: MiniTask) -> SweRecord:
    """The record of ``task``: what the agent starts from, the hidden tests, and the true fix."""
    calls = _calls(task)
    row: dict[str, Any] = {
        "repo_name": task.id,
        "commit_hash": hashlib.sha256(json.dumps(task.files, sort_keys=True).encode()).hexdigest()[:40],
        "expected_output_json": json.dumps(dict.fromkeys(calls, "PASSED")),
        "problem_statement": f"[ISSUE]\n{task.issue}\n[/ISSUE]",
        "task_id": task.id,
        "files": task.files,
        "calls": calls,
        "gold_patch": diff_files(task.files, task.fixed),
    }
    return parse_record(row, task.id)


def _calls(task: MiniTask) -> dict[str, Call]:
    """The hidden tests by node ids such as pytest would give them."""
    return {
        f"tests/test_{path}::test_{name}_{index}": Call(
            module=path.removesuffix(".py"), call=case.call, result=case.result
        )
        for path, functions in task.cases.items()
        for name, cases in functions
        for index, case in enumerate(cases)
    }
