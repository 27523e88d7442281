"""``agent-rl doctor``: can what a config names be trusted? The parts first, then every task.

For each task the gold patch must be rewarded and doing nothing must not, several times over with the same outcome, and
where the environment can audit itself (:class:`envs.Audited`) no leak and no hack may win. What fails is written to a
quarantine file, and so is a task that can't be graded for a reason of its own, each time again; what the infrastructure
did is no such reason, and none is believed where no task at all was graded. A doctor that was stopped goes on where it
was: each of its parts is resumable by itself.
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
from agent_rl.controller.preflight import check_room
from agent_rl.controller.rollout_runtime import TaskRuntime, open_task_runtime
from agent_rl.errors import ConfigError
from agent_rl.evaluation.directory import EvaluationDirectory
from agent_rl.evaluation.evaluate import evaluate
from agent_rl.evaluation.quarantine import write_quarantine
from agent_rl.evaluation.report import EpisodeResult
from agent_rl.monitoring.console import Display, cell
from agent_rl.rollout.episode import EpisodeRules
from agent_rl.rollout.limiter import Limiter
from agent_rl.rollout.scripted_policies import has_gold, solver_runner
from agent_rl.types import StopReason, Trajectory
from agent_rl.utils.directory_lock import lock_directory
from agent_rl.utils.run_files import write_json
from envs import Audited, Environment, Finding, GradingError, Task, TaskRecordError, UndecidableError
from sandbox import SandboxError

SHOWN = 20
"""Sick tasks in the table; all of them are in doctor.json."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found of one task. ``reasons`` quarantine it; ``undecided`` says what the infrastructure kept from being
    found out. ``gold`` and ``noop``: whether each run was resolved."""

    task_id: str
    gold: tuple[bool | None, ...] = ()
    noop: tuple[bool | None, ...] = ()
    findings: tuple[Finding, ...] = ()
    reasons: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()


async def run_doctor(
    config: RunConfig, *, tasks: int | None, split: str, repeats: int, audit: bool, out: Path | None
) -> bool:
    """Examine ``config`` and print what was found; True if nothing is wrong."""
    check_room(config.runs_dir)
    directory = out or config.run_dir / "doctor"
    display = Display(f"doctor {config.name}")
    with lock_directory(directory), display:
        checks = await check_parts(config)
        display.table(checks_table(checks))
        if any(check.name.startswith("sandbox") and not check.ok for check in checks):
            return False
        async with open_task_runtime(config, display) as task_runtime:
            await task_runtime.env.prepare(split)
            # All tasks, also those in quarantine: they may have recovered.
            chosen = list(task_runtime.env.tasks(split))[:tasks]
            if not chosen:
                raise ConfigError(f"--split {split}: environment {task_runtime.env.name!r} has no tasks there")
            broken = _broken(task_runtime.env, chosen)
            whole = [task for task in chosen if task.id not in broken]
            runs = {
                policy: await _repeat(config, task_runtime, policy, whole, repeats, directory, display)
                for policy in ("gold", "noop")
            }
            findings = await _audit_all(config, task_runtime, whole, directory, display) if audit else {}
    able = any(r.resolved is not None for tasks_ in runs.values() for results in tasks_.values() for r in results)
    diagnoses = [
        broken.get(task.id) or diagnose(task.id, runs["gold"], runs["noop"], findings.get(task.id), machine_grades=able)
        for task in chosen
    ]
    return _tell(display, directory, checks, diagnoses)


def _broken(env: Environment, tasks: Sequence[Task]) -> dict[str, Diagnosis]:
    """The diagnoses of tasks whose true fix can't be read: their record is what is wrong with them."""
    found: dict[str, Diagnosis] = {}
    for task in tasks:
        try:
            has_gold(env, task)
        except TaskRecordError as error:
            found[task.id] = Diagnosis(task.id, reasons=(str(error),))
    return found


async def _repeat(
    config: RunConfig,
    task_runtime: TaskRuntime,
    policy: str,
    tasks: Sequence[Task],
    repeats: int,
    directory: Path,
    out: Display,
) -> dict[str, list[EpisodeResult]]:
    """``repeats`` runs of ``policy`` on every task that it can be run on, by task."""
    able = [_as_new(task) for task in tasks if policy != "gold" or has_gold(task_runtime.env, task)]
    place = EvaluationDirectory(
        directory / policy, {"policy": policy, "env": config.env.name, "options": _plain(config)}
    )
    known = {task.id for task in able}
    results = [r for r in place.results() if r.task_id in known and r.sample < repeats]
    graded = sum(result.resolved is not None for result in results)
    out.stage(f"{policy}, {repeats} run(s) a task", total=len(able) * repeats - graded)
    fresh: list[EpisodeResult] = []

    def take(result: EpisodeResult, trajectory: Trajectory | None) -> None:
        place.record(result, trajectory)
        fresh.append(result)

    await evaluate(
        able,
        solver_runner(task_runtime.env, policy, EpisodeRules.of(config)),
        policy=policy,
        limiter=Limiter(config.rollout.concurrency),
        samples=repeats,
        retries=config.rollout.sandbox_retries,
        done=results,
        on_result=take,
        on_event=lambda event: advance(out, event),
    )
    return _by_task([*results, *fresh])


def _as_new(task: Task) -> Task:
    """The task without the mark that it was verified before, which lets an empty patch go ungraded."""
    return replace(task, record={**task.record, "verified": False}) if "verified" in task.record else task


def _plain(config: RunConfig) -> object:
    return config.env.model_dump(mode="json")["options"]


def _by_task(results: Iterable[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """Each task's results, the last one of a sample that was run again."""
    last = {(result.task_id, result.sample): result for result in results}
    found: dict[str, list[EpisodeResult]] = defaultdict(list)
    for key in sorted(last):
        found[key[0]].append(last[key])
    return found


async def _audit_all(
    config: RunConfig, task_runtime: TaskRuntime, tasks: Sequence[Task], directory: Path, display: Display
) -> dict[str, list[Finding] | str]:
    """Every task's findings, or why there are none; those that ``audits.jsonl`` holds are not made again."""
    if not hasattr(task_runtime.env, "audit"):
        display.note(f"environment {task_runtime.env.name!r} has no audit: leaks and hacks were not looked for")
        return {}
    env, file = cast(Audited, task_runtime.env), directory / "audits.jsonl"
    held = _read_audits(file)
    found: dict[str, list[Finding] | str] = {task.id: held[task.id] for task in tasks if task.id in held}
    display.stage("audit", total=len(tasks) - len(found))
    limiter = Limiter(config.rollout.concurrency)
    retrying = AsyncRetrying(
        retry=retry_if_exception_type((SandboxError, GradingError)) & retry_if_not_exception_type(UndecidableError),
        stop=stop_after_attempt(config.rollout.sandbox_retries + 1),
        wait=wait_random_exponential(multiplier=0.2, max=5.0),
        reraise=True,
    )

    async def one(task: Task) -> None:
        async with limiter:
            try:
                findings: list[Finding] = list(await retrying(env.audit, task))
            except (SandboxError, GradingError) as error:
                found[task.id] = f"{type(error).__name__}: {error}"
                return
        found[task.id] = findings
        row = {"task_id": task.id, "findings": [asdict(finding) for finding in findings]}
        with file.open("ab") as lines:
            lines.write(json.dumps(row).encode() + b"\n")
        display.advance()

    async with asyncio.TaskGroup() as group:
        for task in tasks:
            if task.id not in found:
                group.create_task(one(task), name=f"audit-{task.id}")
    return found


def _read_audits(file: Path) -> dict[str, list[Finding]]:
    """What an earlier start wrote; a line that a kill cut off is left out, and its audit made again."""
    if not file.exists():
        return {}
    whole, _, torn = file.read_bytes().rpartition(b"\n")
    if torn:
        file.write_bytes(whole + b"\n" if whole else b"")
    rows = map(json.loads, whole.splitlines())
    return {row["task_id"]: [Finding(**finding) for finding in row["findings"]] for row in rows}


def diagnose(
    task_id: str,
    gold: Mapping[str, Sequence[EpisodeResult]],
    noop: Mapping[str, Sequence[EpisodeResult]],
    findings: Sequence[Finding] | str | None,
    *,
    machine_grades: bool = True,
) -> Diagnosis:
    """Put together what was found of a task. ``machine_grades``: whether any task at all could be graded."""
    reasons: list[str] = []
    undecided: list[str] = []
    if task_id not in gold:
        undecided.append("the environment knows no true fix or solution to try")
    for name, results, right in (("gold", gold.get(task_id, ()), True), ("no-op", noop.get(task_id, ()), False)):
        outcomes = [result.resolved for result in results]
        broken = next((result.error.partition("\n")[0] for result in results if result.resolved is None), None)
        if results and machine_grades and all(result.stop == StopReason.UNDECIDABLE for result in results):
            reasons.append(f"{name} can never be graded: {broken}")
        elif broken is not None:
            undecided.append(f"{name} could not be graded: {broken}")
        if {True, False} <= set(outcomes):
            reasons.append(f"flaky: {name} resolved in {outcomes.count(True)} of {len(outcomes)} runs")
        elif (not right) in outcomes:
            reasons.append("its true fix or solution does not resolve it" if right else "resolved by doing nothing")
    if isinstance(findings, str):
        undecided.append(f"audit: {findings}")
    kept = () if findings is None or isinstance(findings, str) else tuple(findings)
    reasons += [f"{finding.check}: {finding.detail}" for finding in kept if not finding.ok]
    return Diagnosis(
        task_id=task_id,
        gold=tuple(result.resolved for result in gold.get(task_id, ())),
        noop=tuple(result.resolved for result in noop.get(task_id, ())),
        findings=kept,
        reasons=tuple(reasons),
        undecided=tuple(undecided),
    )


def _tell(display: Display, directory: Path, checks: Sequence[Check], diagnoses: Sequence[Diagnosis]) -> bool:
    """Write doctor.json and the quarantine file, print both as tables; True if nothing is wrong."""
    sick = {item.task_id: item.reasons for item in diagnoses if item.reasons}
    undecided = [item for item in diagnoses if item.undecided and not item.reasons]
    write_json(
        directory / "doctor.json",
        {"checks": [asdict(check) for check in checks], "tasks": [asdict(item) for item in diagnoses]},
    )
    write_quarantine(directory / "quarantine.json", sick)
    healthy = len(diagnoses) - len(sick) - len(undecided)
    display.note(f"{healthy} of {len(diagnoses)} tasks healthy, {len(sick)} sick, {len(undecided)} undecided")
    if sick or undecided:
        display.table(_tasks_table(sick, undecided))
    display.note(f"report: {directory / 'doctor.json'}")
    if sick:
        display.note(f"leave the sick tasks out: env.quarantine={directory / 'quarantine.json'}")
    return not sick and not undecided and all(check.ok for check in checks)


def _tasks_table(sick: Mapping[str, Sequence[str]], undecided: Sequence[Diagnosis]) -> Table:
    table = Table("task", "what is wrong")
    for task_id, reasons in list(sick.items())[:SHOWN]:
        table.add_row(cell(task_id), cell("; ".join(reasons)))
    for item in undecided[:SHOWN]:
        table.add_row(cell(item.task_id), cell("undecided: " + "; ".join(item.undecided)))
    if len(sick) > SHOWN or len(undecided) > SHOWN:
        table.add_row("...", "the others are in doctor.json")
    return table
