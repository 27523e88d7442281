"""The environment of software-engineering tasks kept in files and data sets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from envs.context import EnvContext
from envs.rows import of_split
from envs.scaffold import Scaffold
from envs.swe.adjudication import Controls
from envs.swe.audit import audit_record
from envs.swe.episode import SweEpisode, start_episode
from envs.swe.records import SweRecord, parse_record
from envs.swe.repositories import Repositories
from envs.swe.sandboxes import site_dir
from envs.swe.sources import Records, is_data_set, read_records
from envs.swe.swebench import check_gradable
from envs.types import Finding, Task, TaskRecordError

_log = logging.getLogger(__name__)


class SweEnvironment:
    """Tasks from ``path``: a file (JSONL, JSON, Parquet), a directory with one file a split (``train.jsonl``,
    ``heldout.jsonl``, ...), a data set's directory or name on the Hugging Face hub, or a task repository of swebench's.

    The records of a file or data set are dealt out in their order: the last ``heldout`` tasks are the split "heldout",
    the others "train"; with ``heldout`` None every split holds all of them (an evaluation set). Options:
    ``data_split`` says which split of a data set is read, where it has several, ``specs`` (a source like ``path``)
    where SWE-bench's rows that don't say how they are graded find it by their ``instance_id``, ``repos`` keeps only
    tasks of these repositories, ``limit`` only the first so many of a split, ``skip_broken`` leaves out rows that are
    broken (counted in the log and in :attr:`broken`) where otherwise the first look at them raises.
    """

    def __init__(
        self,
        context: EnvContext,
        path: str | Path | None = None,
        *,
        data_split: str | None = None,
        specs: str | Path | None = None,
        heldout: int | None = None,
        repos: Sequence[str] = (),
        limit: int | None = None,
        skip_broken: bool = False,
    ) -> None:
        if path is None:
            raise TaskRecordError(
                "environment swe needs the option path: a file of task records, a directory with one a split, or a "
                "data "
                "set's name (python -m scripts.build_release_tasks builds a file)"
            )
        self._context = context
        self._path = Path(path)
        self._data_split = data_split
        self._specs = specs
        self._heldout = heldout
        self._repos = frozenset(repos)
        self._limit = limit
        self._skip_broken = skip_broken
        self._read: dict[str, Records] = {}
        self._repositories = Repositories()
        self._controls = Controls()

    @property
    def name(self) -> str:
        return "swe"

    @property
    def scaffold(self) -> Scaffold:
        return self._context.scaffold

    async def prepare(self, *splits: str) -> None:
        """Read the records of ``splits``: a broken one is told before anything is started. Raises as :meth:`tasks`."""
        for split in splits:
            self._split(split)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of ``split``. Raises ``TaskRecordError`` for a broken record or an unknown split."""
        records = [record for record in self._split(split) if not self._repos or record.repo_name in self._repos]
        return [Task(record.id, self.name, record.model_dump()) for record in records[: self._limit]]

    def start(self, task: Task) -> AbstractAsyncContextManager[SweEpisode]:
        return start_episode(
            self._context,
            self._record(task),
            site_root=self._site_root,
            repositories=self._repositories,
            controls=self._controls,
        )

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

    @property
    def broken(self) -> Sequence[str]:
        """A line for every broken field of the rows that were skipped so far."""
        return [problem for found in self._read.values() for problem in found.broken]

    def _records(self, source: str) -> Sequence[SweRecord]:
        """The records of ``source``, read once. Raises ``TaskRecordError`` for those that cannot be graded."""
        if source not in self._read:
            found = read_records(source, split=self._data_split, skip_broken=self._skip_broken, specs=self._specs)
            check_gradable(source, found.records)
            for record in found.records:
                if record.site_packages:
                    site_dir(record, self._site_root)
            if found.broken:
                rows = len({problem.partition(":")[0] for problem in found.broken})
                _log.warning("%s: %d broken rows skipped, %d left", source, rows, len(found.records))
            if found.pictured:
                pictured = f"{found.pictured} of {len(found.records)} rows come with images (image_assets)"
                _log.warning("%s: %s, which are dropped: the agent gets their text alone", source, pictured)
            self._read[source] = found
        return self._read[source].records

    def _split(self, split: str) -> Sequence[SweRecord]:
        return of_split(self._path, split, self._heldout, self._records, whole=is_data_set(self._path))
