"""The environment ``mini`` of generated tasks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from envs.context import EnvContext, ToolStyle
from envs.mini.generator import SPLITS, generate
from envs.mini.records import to_record
from envs.mini.verify import verify_records
from envs.scaffold import DEFAULT_SCAFFOLD, Scaffold
from envs.swe.audit import audit_record
from envs.swe.episode import SweEpisode, start_episode
from envs.swe.records import SweRecord, parse_record, write_jsonl
from envs.swe.repositories import WORKDIR, RepositoryCache
from envs.swe.sources import read_jsonl
from envs.types import Finding, Message, Task, TaskRecordError

_SOURCES = ("templates.py", "templates.txt", "functions.py", "generator.py", "records.py")
_SYSTEM: Message = {"role": "system", "content": "Fix the bug."}


class MiniEnvironment:
    """Small generated repositories with one seeded bug each. Splits: ``train``, ``heldout``, ``heldout_family``.

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
        seed: int = 0,
        cache_dir: Path = Path(".cache/tasks"),
    ) -> None:
        scaffold = context.scaffold
        if scaffold.name == DEFAULT_SCAFFOLD:
            scaffold = replace(scaffold, initial_messages=initial_messages)
        self._context = replace(context, tool_style="concise", scaffold=scaffold)
        self._counts = {"train": train_tasks, "heldout": heldout_tasks, "heldout_family": heldout_tasks}
        self._seed = seed
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
                fresh = await asyncio.to_thread(_generate_records, split, self._counts[split], self._seed)
                records = await verify_records(self._context, fresh)
                write_jsonl(self._file(split), records)
            self._tasks[split] = [Task(record.id, self.name, record.model_dump()) for record in records]

    def start(self, task: Task) -> AbstractAsyncContextManager[SweEpisode]:
        return start_episode(self._context, self._record(task), repositories=self._repositories)

    def gold(self, task: Task) -> str:
        return self._record(task).gold

    async def audit(self, task: Task) -> Sequence[Finding]:
        """Check whether reward hacks win ``task``; see :func:`envs.swe.audit.audit_record`."""
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
        return self._cache / f"mini-{_digest()}-{split}-{self._seed}-{self._counts[split]}.jsonl"


def initial_messages(statement: str, workdir: str = WORKDIR, style: ToolStyle = "concise") -> tuple[Message, Message]:
    """The system and the user message of a generated task. The user message is only the issue."""
    issue = statement.removeprefix("[ISSUE]\n").removesuffix("\n[/ISSUE]")
    return _SYSTEM, {"role": "user", "content": issue}


def _generate_records(split: str, count: int, seed: int) -> list[SweRecord]:
    return [to_record(task) for task in generate(split, count, seed)]


def _digest() -> str:
    directory = Path(__file__).parent
    sources = b"".join((directory / name).read_bytes() for name in _SOURCES)
    return hashlib.sha256(sources).hexdigest()[:12]
