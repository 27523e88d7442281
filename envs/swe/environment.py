"""The environment of software-engineering tasks kept in JSONL files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from pathlib import Path

from envs.context import EnvContext
from envs.swe.audit import audit_record
from envs.swe.episode import SweEpisode, start_episode
from envs.swe.records import SweRecord, parse_record, read_jsonl
from envs.types import Finding, Task, TaskRecordError


class SweEnvironment:
    """Tasks from ``path``: a JSONL file, or a folder with one file a split (``train.jsonl``, ``heldout.jsonl``, ...).

    The records of a single file are dealt out in their order: the last ``heldout`` tasks are the split "heldout", the
    others "train"; with ``heldout`` None every split holds all of them (an evaluation set). Options:
    ``repos`` keeps only tasks of these repositories, ``limit`` only the first so many of a split.
    """

    def __init__(
        self,
        context: EnvContext,
        path: str | Path | None = None,
        *,
        heldout: int | None = None,
        repos: Sequence[str] = (),
        limit: int | None = None,
    ) -> None:
        if path is None:
            raise TaskRecordError(
                "environment swe needs the option path: a JSONL file of task records, or a folder with one a split "
                "(python -m envs.swe.real builds one)"
            )
        self._context = context
        self._path = Path(path)
        self._heldout = heldout
        self._repos = frozenset(repos)
        self._limit = limit

    @property
    def name(self) -> str:
        return "swe"

    async def prepare(self, *splits: str) -> None:
        """Read the records of ``splits``: a broken one is told before anything is started. Raises as :meth:`tasks`."""
        for split in splits:
            self._split(split)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of ``split``. Raises ``TaskRecordError`` for a broken record or an unknown split."""
        records = [record for record in self._split(split) if not self._repos or record.repo_name in self._repos]
        return [Task(record.id, self.name, record.model_dump()) for record in records[: self._limit]]

    def start(self, task: Task) -> AbstractAsyncContextManager[SweEpisode]:
        return start_episode(self._context, self._record(task), site_root=self._site_root)

    def gold(self, task: Task) -> str:
        return self._record(task).gold

    async def audit(self, task: Task) -> Sequence[Finding]:
        """Whether ``task`` could be won without solving it; see :func:`envs.swe.audit.audit_record`."""
        return await audit_record(self._context, self._record(task), site_root=self._site_root)

    @property
    def _site_root(self) -> Path:
        return self._path if self._path.is_dir() else self._path.parent

    @staticmethod
    def _record(task: Task) -> SweRecord:
        return parse_record(task.record, f"task {task.id}")

    @cached_property
    def _all(self) -> list[SweRecord]:
        return read_jsonl(self._path)

    def _split(self, split: str) -> Sequence[SweRecord]:
        if self._path.is_dir():
            return self._split_file(split)
        if self._heldout is None:
            return self._all
        cut = max(0, len(self._all) - self._heldout)
        parts = {"train": self._all[:cut], "heldout": self._all[cut:]}
        if split not in parts:
            raise TaskRecordError(f"{self._path}: no split {split!r}; a single file has train and heldout")
        return parts[split]

    def _split_file(self, split: str) -> Sequence[SweRecord]:
        file = self._path / f"{split}.jsonl"
        if not file.is_file():
            known = ", ".join(sorted(found.stem for found in self._path.glob("*.jsonl"))) or "none"
            raise TaskRecordError(f"{self._path}: no split {split!r}; it holds: {known}")
        return read_jsonl(file)
