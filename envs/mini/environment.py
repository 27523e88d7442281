"""The environment ``mini`` of generated tasks.

Verifying a task: its tests pass with the gold patch and fail without it. Forty tasks share a sandbox there, each in its
own directory. Agents and gradings never share one.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envs.context import EnvContext, ToolStyle
from envs.mini.generator import SPLITS, MiniTask, generate, stream, to_record
from envs.scaffold import DEFAULT_SCAFFOLD, Scaffold
from envs.swe.calls import CallRun
from envs.swe.episode import SweEpisode, start_episode
from envs.swe.pytest_log import judge_pytest_log
from envs.swe.records import SweRecord, parse_record, write_jsonl
from envs.swe.repositories import WORKDIR, RepositoryCache
from envs.swe.sources import read_jsonl
from envs.swe.task_audit import audit_record
from envs.types import Finding, Grade, GradingError, Message, Task, TaskRecordError
from sandbox import SandboxSpec
from tools import ToolCall, ToolResult, ToolSet

_SOURCES = ("templates.py", "templates.txt", "functions.py", "generator.py")
_SYSTEM: Message = {"role": "system", "content": "Fix the bug."}


class MiniEnvironment:
    """Small generated repositories with one seeded bug each. Splits: ``train``, ``heldout``, ``heldout_family``.

    With ``issues`` above 1 a repository has so many bugs, in different files. The first is in the task, and each
    ``finish`` but the last returns the next one with its file, so that an episode grows with ``issues``.

    Tasks are generated from ``seed``, verified in sandboxes of the context's backend, and cached under ``cache_dir``.
    The file name contains a digest of the generator's source, so that another version does not reuse them. Initial
    messages and tool results are always concise, because the models for these tasks have a short context.
    """

    def __init__(
        self,
        context: EnvContext,
        *,
        train_tasks: int = 640,
        heldout_tasks: int = 256,
        issues: int = 1,
        seed: int = 0,
        cache_dir: Path = Path(".cache/tasks"),
    ) -> None:
        scaffold = context.scaffold
        if scaffold.name == DEFAULT_SCAFFOLD:
            scaffold = replace(scaffold, initial_messages=initial_messages)
        self._context = replace(context, tool_style="concise", scaffold=scaffold)
        self._counts = {"train": train_tasks, "heldout": heldout_tasks, "heldout_family": heldout_tasks}
        self._seed, self._issues = seed, issues
        self._cache = Path(cache_dir)
        self._tasks: dict[str, list[Task]] = {}
        self._repositories = RepositoryCache()

    @property
    def name(self) -> str:
        return "mini"

    @property
    def scaffold(self) -> Scaffold:
        return self._context.scaffold

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of ``split``. Without an earlier :meth:`prepare` this blocks until they are verified."""
        self._check(split)
        if split not in self._tasks:
            # The caller's thread may already run an event loop.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, self.prepare(split)).result()
        return self._tasks[split]

    async def prepare(self, *splits: str) -> None:
        """Generate and verify the tasks of ``splits``, by default train and heldout, unless they are cached."""
        for split in splits or ("train", "heldout"):
            self._check(split)
            records = self._cached(split)
            if records is None:
                parts = split, self._counts[split], self._seed, self._issues
                fresh = await asyncio.to_thread(_generate_records, *parts)
                records = await verify_records(self._context, fresh)
                write_jsonl(self._file(split), records)
            self._tasks[split] = [Task(record.id, self.name, record.model_dump()) for record in records]

    @asynccontextmanager
    async def start(self, task: Task) -> AsyncIterator[SweEpisode]:
        record = self._record(task)
        async with start_episode(self._context, record, repositories=self._repositories) as episode:
            yield episode if self._issues == 1 else QueuedEpisode.of(episode)

    def gold(self, task: Task) -> str:
        return self._record(task).gold

    async def audit(self, task: Task) -> Sequence[Finding]:
        """Check whether reward hacks win ``task``; see :func:`envs.swe.task_audit.audit_record`."""
        return await audit_record(self._context, self._record(task))

    @staticmethod
    def _record(task: Task) -> SweRecord:
        return parse_record(task.record, f"task {task.id}")

    def _check(self, split: str) -> None:
        if split not in SPLITS:
            raise TaskRecordError(f"environment mini has no split {split!r}; it has {', '.join(SPLITS)}")

    def _cached(self, split: str) -> list[SweRecord] | None:
        file = self._file(split)
        return read_jsonl(file) if file.is_file() else None

    def _file(self, split: str) -> Path:
        issues = "" if self._issues == 1 else f"-{self._issues}"
        return self._cache / f"mini-{_digest()}-{split}-{self._seed}-{self._counts[split]}{issues}.jsonl"


def initial_messages(statement: str, workdir: str = WORKDIR, style: ToolStyle = "concise") -> tuple[Message, Message]:
    """The system and the user message of a generated task. The user message is only the first issue."""
    return _SYSTEM, {"role": "user", "content": _issues(statement)[0]}


def _issues(statement: str) -> list[str]:
    return statement.removeprefix("[ISSUE]\n").removesuffix("\n[/ISSUE]").split("\n")


@dataclass(frozen=True)
class QueuedEpisode(SweEpisode):
    """An episode of several issues. Its reward is the share of the issues whose file passes its tests."""

    @classmethod
    def of(cls, episode: SweEpisode) -> QueuedEpisode:
        queued = cls(**vars(episode))
        following = [f"{issue}\n{queued.record.files[path]}" for issue, path in queued.reported[1:]]
        return replace(queued, tools=QueuedTools(episode.tools, following))

    @property
    def reported(self) -> list[tuple[str, str]]:
        """The issues, each with the path that it names."""
        issues, paths = _issues(self.record.problem_statement), self.record.files
        return [(issue, next(path for path in paths if path in issue)) for issue in issues]

    async def grade(self) -> Grade:
        """Grade the agent's patch. The sandbox stays usable."""
        grade = await super().grade()
        failed = [test for test in self.record.calls if grade.tests.get(test) != "PASSED"]
        fixed = [not any(f"test_{path}::" in test for test in failed) for _, path in self.reported]
        return replace(grade, reward=sum(fixed) / len(fixed))


class QueuedTools:
    """``tools`` whose ``finish`` returns the next of ``issues`` as long as there is one."""

    def __init__(self, tools: ToolSet, issues: Sequence[str]) -> None:
        self._tools, self._following = tools, iter(issues)

    def schemas(self) -> Sequence[Mapping[str, Any]]:
        return self._tools.schemas()

    async def call(self, call: ToolCall) -> ToolResult:
        result = await self._tools.call(call)
        following = next(self._following, None) if result.submitted else None
        return result if following is None else ToolResult(following)


def _generate_records(split: str, count: int, seed: int, issues: int) -> list[SweRecord]:
    if issues == 1:
        return [to_record(task) for task in generate(split, count, seed)]
    tasks = stream(split, seed)
    return [to_record(_joined(tasks, issues)) for _ in range(count)]


def _joined(tasks: Iterator[MiniTask], issues: int) -> MiniTask:
    """The next ``issues`` tasks in one repository. Tasks that have a file of the same name are left out."""
    joined = next(tasks)
    while joined.issue.count("\n") + 1 < issues:
        task = next(tasks)
        if joined.files.keys().isdisjoint(task.files):
            joined = replace(
                joined,
                files=joined.files | task.files,
                fixed=joined.fixed | task.fixed,
                cases=joined.cases | task.cases,
                issue=f"{joined.issue}\n{task.issue}",
            )
    return joined


def _digest() -> str:
    directory = Path(__file__).parent
    sources = b"".join((directory / name).read_bytes() for name in _SOURCES)
    return hashlib.sha256(sources).hexdigest()[:12]


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
