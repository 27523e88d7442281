"""The report of an evaluation: Pass@1 with an interval and Pass@k; infrastructure failures are counted separately.

Each episode becomes an :class:`EpisodeResult`. A report is a function of the results, including those that an earlier,
killed process wrote.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agent_rl.evaluation.usage import Usage, total
from agent_rl.rollout.metrics import grade_metrics
from agent_rl.utils.run_files import write_json
from envs import Task

Z95 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One sample of a task. ``resolved`` is None after an infrastructure failure beyond the retry budget and, with
    ``stop`` "undecidable", for a task that cannot be graded. ``failures`` counts the infrastructure failures. ``usage``
    includes the tokens of failed episodes; None if they are unknown. ``parts``, ``metrics``: of the grade."""

    task_id: str
    sample: int
    resolved: bool | None
    stop: str
    turns: int
    seconds: float
    failures: int = 0
    patch: str = ""
    suspected_hack: tuple[str, ...] = ()
    error: str = ""
    usage: Usage | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The samples of one task: graded and resolved samples, and infrastructure failures.

    ``turns_mean`` and ``seconds_mean`` are means over graded samples. ``usage`` and ``cost`` (USD) are sums over all
    samples; None if unknown.
    """

    task_id: str
    repo: str
    graded: int
    resolved: int
    infrastructure_failures: int
    suspected_hacks: int
    stops: tuple[str, ...]
    turns_mean: float
    error: str = ""
    seconds_mean: float = 0.0
    usage: Usage | None = None
    cost: float | None = None

    @property
    def pass_rate(self) -> float:
        return self.resolved / self.graded


class Counted(Protocol):
    """The samples of a task: the number of graded ones, and of those that resolved it."""

    @property
    def graded(self) -> int: ...

    @property
    def resolved(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PassAtK:
    """Pass@k: the mean ``rate`` over ``tasks`` tasks, with Wilson's 95 % ``interval`` with the tasks as trials.

    With k samples a task, the trials are binary as Wilson's are. With more, the interval is wider than needed, because
    a task's estimate varies less than a binary trial.
    """

    rate: float
    interval: tuple[float, float]
    tasks: int


@dataclass(frozen=True, slots=True)
class RepoOutcome:
    """The tasks of one repository: graded and ungraded tasks, and Pass@1."""

    graded: int
    ungraded: int
    pass_at_1: float


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Pass@1 of ``policy`` on ``env``.

    ``pass_at_1`` is the mean over graded tasks of the share of resolved samples; NaN without graded tasks. ``interval``
    is Wilson's 95 % interval with the graded *tasks* as trials, because samples of one task are not independent.
    ``ungraded`` tasks had only infrastructure failures and are excluded. ``pass_at_k`` has k = 1, 2, 4, ... up to
    ``samples``, over the tasks with at least k graded samples (:func:`pass_at_ks`). ``suspected_hacks`` counts samples
    whose patch changes files that affect the grading. ``usage`` and ``cost`` (USD, at ``price``) are sums over the
    ``usage_tasks`` tasks whose tokens are known. ``model``: its name, or the policy's without a model.
    ``grades``: the mean of each part of the reward and of each metric over the graded samples, as ``reward/NAME`` and
    ``env/NAME``. ``available``: tasks of the split that the policy can run; ``requested``: tasks that the user
    requested, None for all.
    """

    policy: str
    env: str
    tasks: int
    samples: int
    graded: int
    ungraded: int
    infrastructure_failures: int
    suspected_hacks: int
    pass_at_1: float
    interval: tuple[float, float]
    pass_at_k: dict[str, PassAtK]
    turns_mean: float
    seconds: float
    stops: dict[str, int]
    by_repo: dict[str, RepoOutcome]
    outcomes: tuple[TaskOutcome, ...]
    model: str = ""
    seconds_mean: float = 0.0
    available: int | None = None
    requested: int | None = None
    usage: Usage | None = None
    usage_tasks: int = 0
    cost: float | None = None
    price: Mapping[str, Any] | None = None
    grades: Mapping[str, float] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the report as JSON, atomically; NaN becomes null."""
        write_json(path, asdict(self))


def report(
    results: Iterable[EpisodeResult], tasks: Sequence[Task], *, policy: str, samples: int, seconds: float
) -> EvalReport:
    """The report of ``results``, with outcomes in the order of ``tasks``."""
    by_task: dict[str, list[EpisodeResult]] = {task.id: [] for task in tasks}
    results = list(results)
    for result in results:
        by_task[result.task_id].append(result)
    outcomes = [_outcome(task, by_task[task.id]) for task in tasks]
    graded = [outcome for outcome in outcomes if outcome.graded]
    rate = _mean(outcome.pass_rate for outcome in graded)
    usages = [outcome.usage for outcome in outcomes if outcome.usage is not None]
    return EvalReport(
        policy=policy,
        env=tasks[0].env if tasks else "",
        tasks=len(tasks),
        samples=samples,
        graded=len(graded),
        ungraded=len(outcomes) - len(graded),
        infrastructure_failures=sum(outcome.infrastructure_failures for outcome in outcomes),
        suspected_hacks=sum(outcome.suspected_hacks for outcome in outcomes),
        pass_at_1=rate,
        interval=wilson_interval(rate, len(graded)),
        pass_at_k=pass_at_ks(outcomes, samples),
        turns_mean=statistics.fmean(outcome.turns_mean for outcome in graded) if graded else 0.0,
        seconds=seconds,
        stops=dict(sorted(Counter(stop for outcome in outcomes for stop in outcome.stops).items())),
        by_repo=_by_repo(outcomes),
        outcomes=tuple(outcomes),
        seconds_mean=statistics.fmean(outcome.seconds_mean for outcome in graded) if graded else 0.0,
        usage=total(usages) if usages else None,
        usage_tasks=len(usages),
        grades=grade_metrics(result for result in results if result.resolved is not None),
    )


def _outcome(task: Task, results: Sequence[EpisodeResult]) -> TaskOutcome:
    graded = [result for result in results if result.resolved is not None]
    return TaskOutcome(
        task_id=task.id,
        repo=repository(task),
        graded=len(graded),
        resolved=sum(bool(result.resolved) for result in graded),
        infrastructure_failures=sum(result.failures for result in results),
        suspected_hacks=sum(bool(result.suspected_hack) for result in graded),
        stops=tuple(result.stop for result in graded),
        turns_mean=statistics.fmean(result.turns for result in graded) if graded else 0.0,
        error=next((result.error for result in results if result.error), ""),
        seconds_mean=statistics.fmean(result.seconds for result in graded) if graded else 0.0,
        usage=total(result.usage for result in results) if results else None,
    )


def repository(task: Task) -> str:
    """The repository in a task's record (R2E-Gym's or SWE-bench's field); empty without one."""
    return str(task.record.get("repo_name") or task.record.get("repo") or "")


def _by_repo(outcomes: Sequence[TaskOutcome]) -> dict[str, RepoOutcome]:
    by_repo: dict[str, list[TaskOutcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.repo:
            by_repo[outcome.repo].append(outcome)
    if len(by_repo) == len(outcomes):
        return {}  # one task for each repository: the same as the outcomes
    return {
        repo: RepoOutcome(
            graded=sum(bool(outcome.graded) for outcome in members),
            ungraded=sum(not outcome.graded for outcome in members),
            pass_at_1=_mean(outcome.pass_rate for outcome in members if outcome.graded),
        )
        for repo, members in sorted(by_repo.items())
    }


@dataclass(frozen=True, slots=True)
class BestStep:
    """The evaluated step of a run with the highest mean Pass@1 over its sources, of ``steps`` evaluated steps.

    ``sources``: Pass@1 of each; "" is the environment of the section ``env``. The highest of several noisy rates is
    above the step's true rate on average.
    """

    step: int
    pass_at_1: float
    sources: Mapping[str, float]
    steps: int


def best_step(evaluations: Mapping[str, Mapping[str, Any]]) -> BestStep | None:
    """The best step of a run's sampled ``evaluations``, by their key in the run's state; the first of equal ones. Steps
    at which a source was not evaluated, or has no rate, do not count. None without such a step."""
    rates: dict[int, dict[str, float]] = defaultdict(dict)
    for key, report in evaluations.items():
        step, *source, decoding = key.split("/")
        if decoding == "sampled" and isinstance(rate := report.get("pass_at_1"), float | int):
            rates[int(step.removeprefix("step-"))]["/".join(source)] = float(rate)
    every = {source for of_step in rates.values() for source in of_step}
    means = {step: statistics.fmean(own.values()) for step, own in sorted(rates.items()) if own.keys() == every}
    if not means:
        return None
    best = max(means, key=lambda step: means[step])
    return BestStep(best, means[best], rates[best], len(means))


def pass_at_k(samples: int, resolved: int, k: int) -> float:
    """The probability that at least one of k samples, drawn without replacement, is resolved: the unbiased estimate
    ``1 - C(n - c, k) / C(n, k)`` of Chen et al. 2021 (arXiv 2107.03374, equation 1). Raises ValueError for k > n."""
    if not 1 <= k <= samples:
        raise ValueError(f"Pass@{k} needs at least {k} samples of a task, it has {samples}")
    return 1.0 - math.comb(samples - resolved, k) / math.comb(samples, k)


def pass_at_ks(tasks: Sequence[Counted], samples: int) -> dict[str, PassAtK]:
    """Pass@k for k = 1, 2, 4, ... up to ``samples``, each over the tasks with at least k graded samples."""
    result = dict[str, PassAtK]()
    for k in (1 << power for power in range(samples.bit_length())):
        rates = [pass_at_k(task.graded, task.resolved, k) for task in tasks if task.graded >= k]
        rate = _mean(rates)
        result[str(k)] = PassAtK(rate, wilson_interval(rate, len(rates)), len(rates))
    return result


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return statistics.fmean(numbers) if numbers else math.nan


def wilson_interval(rate: float, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share ``rate`` of ``trials``; (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    spread = z * z / trials
    centre = (rate + spread / 2) / (1 + spread)
    half = z * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))  # rounding may exclude the rate
