"""Verifies generated tasks: the tests pass with the gold patch and fail without it.

Forty tasks share a sandbox here, each in its own directory. Agents and gradings never share one.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from envs.context import EnvContext
from envs.swe.calls import CallRun
from envs.swe.pytest_log import judge_pytest_log
from envs.swe.records import SweRecord
from envs.types import GradingError
from sandbox import SandboxSpec

_TASKS_PER_SANDBOX = 40
_SANDBOXES = 2
_TIMEOUT = 300.0
_MARK = "agent-rl: task "
_UNPATCHED, _GOLD = "nothing", "gold"


async def verify_records(context: EnvContext, records: Sequence[SweRecord]) -> list[SweRecord]:
    """The records, marked verified. Raises ``GradingError`` with the id of the first invalid task."""
    semaphore = asyncio.Semaphore(_SANDBOXES)

    async def verify(chunk: Sequence[SweRecord]) -> None:
        async with semaphore:
            await _verify_chunk(context, chunk)

    async with asyncio.TaskGroup() as group:
        for chunk in _chunks(records):
            group.create_task(verify(chunk))
    return [record.model_copy(update={"verified": True}) for record in records]


def _chunks(records: Sequence[SweRecord]) -> Iterator[Sequence[SweRecord]]:
    for start in range(0, len(records), _TASKS_PER_SANDBOX):
        yield records[start : start + _TASKS_PER_SANDBOX]


async def _verify_chunk(context: EnvContext, records: Sequence[SweRecord]) -> None:
    spec: SandboxSpec = replace(
        context.limits, workdir="/testbed", env={**context.limits.env, "PYTHONDONTWRITEBYTECODE": "1"}
    )
    runs = [CallRun(record.calls) for record in records]
    async with context.sandbox(spec) as sandbox:
        await sandbox.write_files(_files(records, runs))
        result = await sandbox.exec(_script(runs), timeout=_TIMEOUT, cwd="/testbed")
    if result.timed_out or result.truncated:
        raise GradingError(
            f"mini tasks could not be verified: time or output limit of the sandbox after {result.seconds:.0f} s"
        )
    logs = _logs(result.stdout.decode(errors="replace"))
    for number, (record, run) in enumerate(zip(records, runs, strict=True)):
        gold, unpatched = (
            judge_pytest_log(run.summary(logs.get(f"{number}/{variant}", "")), record.expected)
            for variant in (_GOLD, _UNPATCHED)
        )
        if gold is None or not gold.resolved:
            reason = "no test results" if gold is None else gold.difference
            raise GradingError(f"task {record.id}: its gold patch does not resolve it: {reason}")
        if unpatched is None or unpatched.resolved:
            raise GradingError(
                f"task {record.id}: {'no test results' if unpatched is None else 'the tests pass without the fix'}"
            )


def _files(records: Sequence[SweRecord], runs: Sequence[CallRun]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for number, (record, run) in enumerate(zip(records, runs, strict=True)):
        files |= run.files()
        files[f"/testbed/{number}.patch"] = record.gold.encode()
        for variant in (_UNPATCHED, _GOLD):
            for path, content in record.files.items():
                files[f"/testbed/{number}/{variant}/{path}"] = content.encode()
    return files


def _script(runs: Sequence[CallRun]) -> str:
    lines = []
    for number, run in enumerate(runs):
        for variant in (_UNPATCHED, _GOLD):
            patch = f"git apply ../../{number}.patch 2>&1 && " if variant == _GOLD else ""
            inner = f"cd {number}/{variant} && {patch}timeout 20 bash -c {shlex.quote(run.command)}"
            lines.append(f"echo {shlex.quote(f'{_MARK}{number}/{variant}')}; ({inner})")
    return "\n".join([*lines, "true"])


def _logs(output: str) -> dict[str, str]:
    parts = output.split(_MARK)[1:]
    return {head: log for head, _, log in (part.partition("\n") for part in parts)}
