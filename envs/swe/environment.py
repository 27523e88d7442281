"""The environment of software-engineering tasks from files and data sets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from envs.context import EnvContext
from envs.rows import select_split
from envs.scaffold import Scaffold
from envs.swe.adjudication import Controls
from envs.swe.episode import SweEpisode, start_episode
from envs.swe.records import SweRecord, parse_record
from envs.swe.repositories import RepositoryCache
from envs.swe.sandboxes import site_packages_dir
from envs.swe.sources import Records, is_data_set, read_records
from envs.swe.swebench import check_gradable
from envs.swe.task_audit import audit_record
from envs.types import Finding, Task, TaskRecordError

_log = logging.getLogger(__name__)


@dataclass
class SweEnvironment:
    """Tasks from ``path``: a file (JSONL, JSON, Parquet), a directory with one file per split (``train.jsonl``,
    ``heldout.jsonl``, ...), a data set's directory or name on the Hugging Face hub, or a swebench task repository.

    The records keep their order. The last ``heldout`` tasks are the split "heldout", the others "train"; with
    ``heldout`` None every split holds all tasks (an evaluation set). Options:

    - ``data_split``: the split to read from a data set with several splits.
    - ``specs``: a source like ``path`` that supplies the grading of SWE-bench rows without one, by ``instance_id``, or
      a wheel of swebench 4.
    - ``repos``: keep only the tasks of these repositories.
    - ``limit``: keep only the first ``limit`` tasks of a split.
    - ``skip_broken``: skip broken rows and count them in the log and in :attr:`broken`, instead of raising.
    """

    context: EnvContext
    path: str | Path | None = None
    _: KW_ONLY
    data_split: str | None = None
    specs: str | Path | None = None
    heldout: int | None = None
    repos: Sequence[str] = ()
    limit: int | None = None
    skip_broken: bool = False
    _sources: dict[str, Records] = field(default_factory=dict, init=False)
    _repositories: RepositoryCache = field(default_factory=RepositoryCache, init=False)
    _controls: Controls = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.path is None:
            raise TaskRecordError(
                "environment swe needs the option path: a file of task records, a directory with one file per split, "
                "or a data set's name (python -m scripts.build_release_tasks builds a file)"
            )

    @property
    def name(self) -> str:
        return "swe"

    @property
    def scaffold(self) -> Scaffold:
        return self.context.scaffold

    async def prepare(self, *splits: str) -> None:
        """Read the records of ``splits``, so that a broken record raises before anything starts; as :meth:`tasks`."""
        for split in splits:
            self._split(split)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of ``split``. Raises ``TaskRecordError`` for a broken record or an unknown split."""
        records = [record for record in self._split(split) if not self.repos or record.repo_name in self.repos]
        return [Task(record.id, self.name, record.model_dump()) for record in records[: self.limit]]

    def start(self, task: Task) -> AbstractAsyncContextManager[SweEpisode]:
        return start_episode(
            self.context,
            self._record(task),
            site_root=self._site_root,
            repositories=self._repositories,
            controls=self._controls,
        )

    def gold(self, task: Task) -> str:
        return self._record(task).gold

    async def audit(self, task: Task) -> Sequence[Finding]:
        """Check whether ``task`` can be won without solving it; see :func:`envs.swe.task_audit.audit_record`."""
        return await audit_record(self.context, self._record(task), site_root=self._site_root)

    @property
    def _source(self) -> Path:
        assert self.path is not None
        return Path(self.path)

    @property
    def _site_root(self) -> Path:
        return self._source if self._source.is_dir() else self._source.parent

    @staticmethod
    def _record(task: Task) -> SweRecord:
        return parse_record(task.record, f"task {task.id}")

    @property
    def broken(self) -> Sequence[str]:
        """One line per broken field of the rows skipped so far."""
        return [problem for records in self._sources.values() for problem in records.broken]

    def _records(self, source: str) -> Sequence[SweRecord]:
        """The records of ``source``, read once. Raises ``TaskRecordError`` for a record that cannot be graded."""
        if source not in self._sources:
            read = read_records(source, split=self.data_split, skip_broken=self.skip_broken, specs=self.specs)
            check_gradable(source, read.records)
            for record in read.records:
                if record.site_packages:
                    site_packages_dir(record, self._site_root)
            if read.broken:
                rows = len({problem.partition(":")[0] for problem in read.broken})
                _log.warning("%s: %d broken rows skipped, %d left", source, rows, len(read.records))
            if read.with_images:
                count = f"{read.with_images} of {len(read.records)} rows"
                _log.warning("%s: %s have images (image_assets): the agent sees only their text", source, count)
            if unverifiable := unverifiable_counts(record.verifiable for record in read.records):
                _log.warning("%s: %s", source, unverifiable)
            self._sources[source] = read
        return self._sources[source].records

    def _split(self, split: str) -> Sequence[SweRecord]:
        data_set = is_data_set(self._source)
        return select_split(self._source, split, self.heldout, self._records, is_data_set=data_set)


def unverifiable_counts(marks: Iterable[str]) -> str:
    """How many tasks have successes that the negative control cannot verify well, by the records' ``verifiable``."""
    counts = Counter(marks)
    reasons = {"no": "cannot be verified", "weak": "are verified weakly", "": "may be unverifiable (run the doctor)"}
    listed = [f"of {counts[mark]} {reason}" for mark, reason in reasons.items() if counts[mark]]
    return f"of {counts.total()} tasks, the successes {', '.join(listed)}" if listed else ""
