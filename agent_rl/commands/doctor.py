"""``agent-rl doctor``: checks the components and every task of a config.

Several runs of each task must agree: the reference fix is rewarded, and submitting nothing is not. If the environment
supports audits (:class:`envs.Audited`), no leak and no reward hack may succeed. Tasks that fail a check, and tasks that
can never be graded, go to the quarantine file. Infrastructure failures leave a task undecided; if no task at all could
be graded, no task is called ungradable. A stopped doctor resumes, because each of its parts is resumable.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from rich.table import Table
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    retry_if_not_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from agent_rl.commands.health import Check, check_parts, checks_table
from agent_rl.commands.policy import advance
from agent_rl.config import RunConfig
from agent_rl.controller.preflight import check_disk_space
from agent_rl.controller.rollout_runtime import TaskRuntime, open_task_runtime
from agent_rl.errors import ConfigError
from agent_rl.evaluation.directory import EvaluationDirectory
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.quarantine import write_quarantine
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.monitoring.console import Display, cell
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.group import Limiter
from agent_rl.rollout.scripted_policies import has_gold, solver_runner
from agent_rl.types import StopReason, Trajectory
from agent_rl.utils.directory_lock import lock_directory
from agent_rl.utils.run_files import write_json
from envs import Auditable, Environment, Finding, GradingError, Task, TaskRecordError, UndecidableError
from envs.swe import unverifiable_counts
from sandbox import SandboxError

MAX_ROWS = 20
"""Rows per kind in the table; doctor.json contains all tasks."""


@dataclass(frozen=True, slots=True)
class TaskDiagnosis:
    """The check results of one task.

    ``gold``, ``noop``: outcome of each run with the reference fix and without changes; None: not graded. ``reasons``:
    why it is quarantined. ``undecided``: checks that infrastructure failures prevented.
    """

    task_id: str
    gold: tuple[bool | None, ...] = ()
    noop: tuple[bool | None, ...] = ()
    findings: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()


async def run_doctor(
    config: RunConfig, *, tasks: int | None, split: str, repeats: int, audit: bool, out: Path | None
) -> bool:
    """Check ``config`` and print the results. Returns True if every check passed."""
    check_disk_space(config.runs_dir)
    directory = out or config.run_dir / "doctor"
    display = Display(f"doctor {config.name}")
    with lock_directory(directory), display:
        checks = await check_parts(config)
        display.table(checks_table(checks))
        if any(check.name.startswith("sandbox") and not check.ok for check in checks):
            return False
        async with open_task_runtime(config, display) as task_runtime:
            await task_runtime.env.prepare(split)
            # Includes quarantined tasks: they may be fixed by now.
            selected = list(task_runtime.env.tasks(split))[:tasks]
            if not selected:
                raise ConfigError(f"--split {split}: environment {task_runtime.env.name!r} has no tasks in this split")
            unreadable = _unreadable_tasks(task_runtime.env, selected)
            readable = [task for task in selected if task.id not in unreadable]
            runs = {
                policy: await _run_policy(config, task_runtime, policy, readable, repeats, directory, display)
                for policy in ("gold", "noop")
            }
            findings = await _audit_tasks(config, task_runtime, readable, directory, display) if audit else {}
    by_policy = [results for by_task in runs.values() for results in by_task.values()]
    grading_works = any(result.resolved is not None for results in by_policy for result in results)
    diagnoses = [
        unreadable.get(task.id)
        or diagnose(task, runs["gold"], runs["noop"], findings.get(task.id), grading_works=grading_works)
        for task in selected
    ]
    if counts := unverifiable_counts(task.record["verifiable"] for task in selected if "verifiable" in task.record):
        display.note(counts)
    return _write_report(display, directory, checks, diagnoses)


def _unreadable_tasks(env: Environment, tasks: Sequence[Task]) -> dict[str, TaskDiagnosis]:
    """Diagnoses of tasks whose record has no readable reference fix."""
    diagnoses: dict[str, TaskDiagnosis] = {}
    for task in tasks:
        try:
            has_gold(env, task)
        except TaskRecordError as error:
            diagnoses[task.id] = TaskDiagnosis(task.id, reasons=(str(error),))
    return diagnoses


async def _run_policy(
    config: RunConfig, runtime: TaskRuntime, policy: str, tasks: Sequence[Task], runs: int, target: Path, out: Display
) -> dict[str, list[EpisodeResult]]:
    """Results of ``runs`` runs of ``policy`` per task. Tasks without a reference fix are skipped for policy gold."""
    runnable = [_unverified(task) for task in tasks if policy != "gold" or has_gold(runtime.env, task)]
    evaluation = EvaluationDirectory(
        target / policy, {"policy": policy, "env": config.env.name, "options": _env_options(config)}
    )
    known = {task.id for task in runnable}
    results = [r for r in evaluation.results() if r.task_id in known and r.sample < runs]
    graded = sum(result.resolved is not None for result in results)
    out.stage(f"{policy}, {runs} run(s) per task", total=len(runnable) * runs - graded)
    fresh: list[EpisodeResult] = []

    def record(result: EpisodeResult, trajectory: Trajectory | None) -> None:
        evaluation.record(result, trajectory)
        fresh.append(result)

    await evaluate(
        runnable,
        solver_runner(runtime.env, policy, EpisodeRules.from_config(config)),
        policy=policy,
        limiter=Limiter(config.rollout.concurrency),
        samples=runs,
        retries=config.rollout.sandbox_retries,
        done=results,
        on_result=record,
        on_event=lambda event: advance(out, event),
    )
    return _by_task([*results, *fresh])


def _unverified(task: Task) -> Task:
    """The task without its ``verified`` mark. With the mark an empty patch would not be graded."""
    return replace(task, record={**task.record, "verified": False}) if "verified" in task.record else task


def _env_options(config: RunConfig) -> object:
    return config.env.model_dump(mode="json")["options"]


def _by_task(results: Iterable[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """The results by task. Only the last result of each sample counts."""
    last = {(result.task_id, result.sample): result for result in results}
    by_task: dict[str, list[EpisodeResult]] = defaultdict(list)
    for task_id, sample in sorted(last):
        by_task[task_id].append(last[task_id, sample])
    return by_task


async def _audit_tasks(
    config: RunConfig, task_runtime: TaskRuntime, tasks: Sequence[Task], directory: Path, display: Display
) -> dict[str, list[Finding] | str]:
    """Each task's findings, or the error of its audit. Audits stored in ``audits.jsonl`` are reused."""
    if not hasattr(task_runtime.env, "audit"):
        display.note(
            f"environment {task_runtime.env.name!r} does not support audits: leaks and reward hacks were not checked"
        )
        return {}
    env, file = cast(Auditable, task_runtime.env), directory / "audits.jsonl"
    stored = _read_audits(file)
    audits: dict[str, list[Finding] | str] = {task.id: stored[task.id] for task in tasks if task.id in stored}
    display.stage("audit", total=len(tasks) - len(audits))
    limiter = Limiter(config.rollout.concurrency)
    retrying = AsyncRetrying(
        retry=retry_if_exception_type((SandboxError, GradingError)) & retry_if_not_exception_type(UndecidableError),
        stop=stop_after_attempt(config.rollout.sandbox_retries + 1),
        wait=wait_random_exponential(multiplier=0.2, max=5.0),
        reraise=True,
    )

    async def audit(task: Task) -> None:
        async with limiter:
            try:
                findings: list[Finding] = list(await retrying(env.audit, task))
            except (SandboxError, GradingError) as error:
                audits[task.id] = f"{type(error).__name__}: {error}"
                return
        audits[task.id] = findings
        row = {"task_id": task.id, "findings": [asdict(finding) for finding in findings]}
        with file.open("ab") as lines:
            lines.write(json.dumps(row).encode() + b"\n")
        display.advance()

    async with asyncio.TaskGroup() as group:
        for task in tasks:
            if task.id not in audits:
                group.create_task(audit(task), name=f"audit-{task.id}")
    return audits


def _read_audits(file: Path) -> dict[str, list[Finding]]:
    """The audits of earlier starts. Removes a last line that a kill truncated; its audit runs again."""
    if not file.exists():
        return {}
    complete, _, truncated = file.read_bytes().rpartition(b"\n")
    if truncated:
        file.write_bytes(complete + b"\n" if complete else b"")
    rows = map(json.loads, complete.splitlines())
    return {row["task_id"]: [Finding(**finding) for finding in row["findings"]] for row in rows}


def diagnose(
    task: Task,
    gold: Mapping[str, Sequence[EpisodeResult]],
    noop: Mapping[str, Sequence[EpisodeResult]],
    findings: Sequence[Finding] | str | None,
    *,
    grading_works: bool = True,
) -> TaskDiagnosis:
    """Combine the results of one task. ``grading_works``: whether at least one task could be graded."""
    task_id, reasons, undecided = task.id, list[str](), list[str]()
    if task_id not in gold:
        undecided.append("the environment has no reference fix or solution")
    for name, runs, expected in (("gold", gold, True), ("no-op", noop, task.noop_resolves)):
        results = runs.get(task_id, ())
        outcomes = [result.resolved for result in results]
        error = next((result.error.partition("\n")[0] for result in results if result.resolved is None), None)
        if results and grading_works and all(result.stop == StopReason.UNDECIDABLE for result in results):
            reasons.append(f"{name} can never be graded: {error}")
        elif error is not None:
            undecided.append(f"{name} could not be graded: {error}")
        if {True, False} <= set(outcomes):
            reasons.append(f"flaky: {name} resolved in {outcomes.count(True)} of {len(outcomes)} runs")
        elif (not expected) in outcomes:
            reasons.append(
                "resolved without any change"
                if not expected
                else f"{'the reference fix or solution' if name == 'gold' else 'doing nothing'} does not resolve it"
            )
    if isinstance(findings, str):
        undecided.append(f"audit: {findings}")
    completed = () if findings is None or isinstance(findings, str) else tuple(findings)
    reasons += [f"{finding.check}: {finding.detail}" for finding in completed if not finding.ok]
    return TaskDiagnosis(
        task_id=task_id,
        gold=tuple(result.resolved for result in gold.get(task_id, ())),
        noop=tuple(result.resolved for result in noop.get(task_id, ())),
        findings=completed,
        reasons=tuple(reasons),
        undecided=tuple(undecided),
    )


def _write_report(display: Display, directory: Path, checks: Sequence[Check], found: Sequence[TaskDiagnosis]) -> bool:
    """Write doctor.json and the quarantine file and print a summary. Returns True if every check passed."""
    invalid = {item.task_id: item.reasons for item in found if item.reasons}
    undecided = [item for item in found if item.undecided and not item.reasons]
    write_json(
        directory / "doctor.json",
        {"checks": [asdict(check) for check in checks], "tasks": [asdict(item) for item in found]},
    )
    write_quarantine(directory / "quarantine.json", invalid)
    valid = len(found) - len(invalid) - len(undecided)
    display.note(f"{valid} of {len(found)} tasks valid, {len(invalid)} invalid, {len(undecided)} undecided")
    if invalid or undecided:
        display.table(tasks_table(invalid, undecided))
    display.note(f"report: {directory / 'doctor.json'}")
    if invalid:
        display.note(f"to skip the invalid tasks, set env.quarantine={directory / 'quarantine.json'}")
    return not invalid and not undecided and all(check.ok for check in checks)


def tasks_table(invalid: Mapping[str, Sequence[str]], undecided: Sequence[TaskDiagnosis]) -> Table:
    table = Table("task", "problem")
    for task_id, reasons in list(invalid.items())[:MAX_ROWS]:
        table.add_row(cell(task_id), cell("; ".join(reasons)))
    for item in undecided[:MAX_ROWS]:
        table.add_row(cell(item.task_id), cell("undecided: " + "; ".join(item.undecided)))
    if len(invalid) > MAX_ROWS or len(undecided) > MAX_ROWS:
        table.add_row("...", "doctor.json lists all")
    return table
