"""Validates candidates in parallel and collects the healthy records. A killed build resumes from its journal.

The directory of a build::

    tasks.jsonl     the healthy records
    journal.jsonl   one line per decided candidate: its key, and its task id or the reason of its rejection
    report.json     by source: the numbers of tried and healthy candidates, and the rejections by reason
    site-*/         packages that the tests import, one directory per set of requirements
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from envs.swe.records import SweRecord, write_jsonl
from envs.swe.task_synthesis.candidate import Candidate, CandidateRejected, is_changed_line
from envs.swe.task_synthesis.site_packages import directory_mb
from envs.swe.task_synthesis.validation import Validation
from envs.types import EnvsError

TASKS, JOURNAL, REPORT = "tasks.jsonl", "journal.jsonl", "report.json"


class CandidateSource(Protocol):
    """Produces candidates."""

    @property
    def name(self) -> str:
        """The name of the source in the report and the journal."""
        ...

    @property
    def omitted(self) -> Mapping[str, int]:
        """Number of files by kind that no record can contain; known after :meth:`candidate_keys`."""
        ...

    async def candidate_keys(self) -> Sequence[str]:
        """The keys of the candidates, equal for every call. Raises ``CandidateRejected`` if there can be none."""
        ...

    async def candidate(self, key: str) -> Candidate:
        """The candidate with this key. Raises ``CandidateRejected``."""
        ...


class Progress(Protocol):
    """Displays the progress of a build."""

    def stage(self, text: str, total: int | None = None) -> None: ...

    def advance(self, count: int = 1) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SynthesisLimits:
    """Limits of a build: healthy tasks, tried candidates, parallel jobs, and MiB of the directory (None: no limit)."""

    tasks: int | None = None
    tried: int | None = None
    jobs: int = 2
    mb: int = 16384


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A line of the journal: a decided candidate. ``digest`` identifies the lines that its fix changes."""

    source: str
    key: str
    task_id: str = ""
    reason: str = ""
    detail: str = ""
    digest: str = ""


@dataclass
class TaskSynthesis:
    """The state of a build in its directory: the decided candidates and the ids of the healthy tasks."""

    directory: Path
    entries: dict[tuple[str, str], JournalEntry] = field(default_factory=dict)
    healthy: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, directory: Path) -> TaskSynthesis:
        """Open the build in ``directory``. A record that a killed build did not journal is dropped and tried again."""
        directory.mkdir(parents=True, exist_ok=True)
        rows = [JournalEntry(**row) for row in _complete_rows(directory / JOURNAL)]
        synthesis = cls(directory, {(row.source, row.key): row for row in rows})
        known = {row.task_id for row in rows if row.task_id}
        records = [SweRecord.model_validate(row) for row in _complete_rows(directory / TASKS)]
        journaled = {record.id: record for record in records if record.id in known}
        if len(journaled) != len(records):
            write_jsonl(directory / TASKS, journaled.values())
        synthesis.healthy = set(journaled)
        return synthesis

    async def synthesize(
        self, source: CandidateSource, validation: Validation, limits: SynthesisLimits, progress: Progress
    ) -> None:
        """Validate the candidates of ``source`` within the ``limits``."""
        progress.stage(f"{source.name}: looking for candidates")
        try:
            keys = await source.candidate_keys()
        except CandidateRejected as error:
            self._record(JournalEntry(source.name, "", reason=error.reason, detail=error.detail))
            return
        omitted = ", ".join(f"{count} {what}" for what, count in source.omitted.items())
        self._record(JournalEntry(source.name, "", reason="left out of the tasks" if omitted else "", detail=omitted))
        pending = [key for key in keys if (source.name, key) not in self.entries]
        tried = sum(entry.source == source.name and bool(entry.key) for entry in self.entries.values())
        pending = pending[: None if limits.tried is None else max(0, limits.tried - tried)]
        progress.stage(f"{source.name}: trying candidates", total=len(pending))
        queue = iter(pending)

        async def work() -> None:
            for key in queue:
                if self._is_complete(source.name, limits):
                    return
                self._record(await self._try(source, key, validation))
                progress.advance()

        async with asyncio.TaskGroup() as group:
            for _ in range(limits.jobs):
                group.create_task(work())

    async def _try(self, source: CandidateSource, key: str, validation: Validation) -> JournalEntry:
        digest = ""
        try:
            candidate = await source.candidate(key)
            digest = _digest(candidate.record)
            self._check_new(digest, candidate.record)
            record = await validation.validate(candidate)
            self._check_new(digest, record)
        except CandidateRejected as error:
            return JournalEntry(source.name, key, reason=error.reason, detail=error.detail, digest=digest)
        _append(self.directory / TASKS, record.model_dump_json())
        self.healthy.add(record.id)
        return JournalEntry(source.name, key, task_id=record.id, digest=digest)

    def _check_new(self, digest: str, record: SweRecord) -> None:
        for entry in self.entries.values():
            if entry.task_id and (entry.digest == digest or entry.task_id == record.id):
                raise CandidateRejected("duplicate", f"of {entry.task_id}")

    def _record(self, entry: JournalEntry) -> None:
        if self.entries.get((entry.source, entry.key)) != entry:
            _append(self.directory / JOURNAL, json.dumps(asdict(entry)))
            self.entries[entry.source, entry.key] = entry

    def _is_complete(self, name: str, limits: SynthesisLimits) -> bool:
        """Whether enough healthy tasks exist. Raises ``EnvsError`` if the directory exceeds its limit."""
        healthy = sum(entry.source == name and bool(entry.task_id) for entry in self.entries.values())
        if limits.tasks is not None and healthy >= limits.tasks:
            return True
        if directory_mb(self.directory) > limits.mb:
            raise EnvsError(
                f"{self.directory}: larger than {limits.mb} MiB: raise --disk-mb, or remove site-* directories"
            )
        return False

    def report(self) -> Mapping[str, Mapping[str, Any]]:
        """By source: the numbers of tried and healthy candidates, the rejections by reason with an example, and notes
        on the source itself."""
        rows: dict[str, list[JournalEntry]] = defaultdict(list)
        for entry in self.entries.values():
            rows[entry.source].append(entry)
        return {source: _summary(entries) for source, entries in rows.items()}


def _summary(entries: Sequence[JournalEntry]) -> Mapping[str, Any]:
    tried = [entry for entry in entries if entry.key]
    rejected = [entry for entry in tried if not entry.task_id]
    examples = {entry.reason: f"{entry.key} {entry.detail}".strip() for entry in reversed(rejected)}
    reasons = Counter(entry.reason for entry in rejected).most_common()
    return {
        "tried": len(tried),
        "healthy": len(tried) - len(rejected),
        "rejected": {reason: {"candidates": count, "example": examples[reason]} for reason, count in reasons},
        "notes": [f"{entry.reason}: {entry.detail}" for entry in entries if not entry.key and entry.reason],
    }


def _digest(record: SweRecord) -> str:
    """A digest of the lines that a fix adds and removes per file, independent of their position."""
    lines = [line for line in record.gold.split("\n") if is_changed_line(line) or line.startswith("diff --git ")]
    return hashlib.sha256("\n".join([record.repo_name, *lines]).encode()).hexdigest()[:16]


def _append(path: Path, line: str) -> None:
    with path.open("ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _complete_rows(path: Path) -> list[Any]:
    """The rows of a JSONL file. An incomplete last line, left by a killed build, is removed from the file."""
    if not path.exists():
        return []
    complete, _, incomplete = path.read_bytes().rpartition(b"\n")
    if incomplete:
        path.write_bytes(complete + b"\n" if complete else b"")
    return [json.loads(line) for line in complete.splitlines()]
