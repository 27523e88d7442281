"""From candidates to healthy records: in parallel, each candidate once, whatever kills the build in between.

The directory of a build::

    tasks.jsonl     the healthy records, as they are found
    journal.jsonl   one line a candidate that was decided: its key, and why it fell or which record it became
    report.json     how many of how many survived, and why the others fell, by source
    site-*/         packages that the tests import, one directory for each set of requirements
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
from envs.swe.task_synthesis.candidate import Candidate, Fallen, is_changed_line
from envs.swe.task_synthesis.site_packages import dir_mb
from envs.swe.task_synthesis.validation import Validation
from envs.types import EnvsError

TASKS, JOURNAL, REPORT = "tasks.jsonl", "journal.jsonl", "report.json"


class Source(Protocol):
    """Where candidates come from."""

    @property
    def name(self) -> str:
        """The source in the report and the journal."""
        ...

    @property
    def left_out(self) -> Mapping[str, int]:
        """What of the source no record can hold, and how much of it, once its candidates were asked for."""
        ...

    async def candidates(self) -> Sequence[str]:
        """The keys of its candidates, the same every time. Raises ``Fallen`` where there can be none."""
        ...

    async def draft(self, key: str) -> Candidate:
        """The draft of a candidate. Raises ``Fallen``."""
        ...


class Progress(Protocol):
    """Is told how far a build is."""

    def stage(self, text: str, total: int | None = None) -> None: ...

    def advance(self, count: int = 1) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """``tasks``: healthy ones wanted; ``tried``: candidates tried at most; ``jobs``: at once; ``mb``: of the
    directory."""

    tasks: int | None = None
    tried: int | None = None
    jobs: int = 2
    mb: int = 16384


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the journal: a candidate that was decided. ``digest`` names what its fix changes, if it was drafted."""

    source: str
    key: str
    task_id: str = ""
    reason: str = ""
    detail: str = ""
    digest: str = ""


@dataclass
class TaskSynthesis:
    """The directory of a build: what was decided in it so far."""

    directory: Path
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    healthy: set[str] = field(default_factory=set)

    @classmethod
    def open(cls, directory: Path) -> TaskSynthesis:
        """The build in ``directory``. A record that a kill left out of the journal is dropped, and its candidate tried
        again."""
        directory.mkdir(parents=True, exist_ok=True)
        rows = [Entry(**row) for row in _whole_lines(directory / JOURNAL)]
        harvest = cls(directory, {(row.source, row.key): row for row in rows})
        known = {row.task_id for row in rows if row.task_id}
        held = [SweRecord.model_validate(row) for row in _whole_lines(directory / TASKS)]
        kept = {record.id: record for record in held if record.id in known}
        if len(kept) != len(held):
            write_jsonl(directory / TASKS, kept.values())
        harvest.healthy = set(kept)
        return harvest

    async def gather(self, source: Source, trial: Validation, bounds: Bounds, progress: Progress) -> None:
        """Decide the candidates of ``source`` within the ``bounds``."""
        progress.stage(f"{source.name}: looking for candidates")
        try:
            keys = await source.candidates()
        except Fallen as fallen:
            self._decide(Entry(source.name, "", reason=fallen.reason, detail=fallen.detail))
            return
        left_out = ", ".join(f"{count} {what}" for what, count in source.left_out.items())
        self._decide(Entry(source.name, "", reason="left out of the tasks" if left_out else "", detail=left_out))
        left = [key for key in keys if (source.name, key) not in self.entries]
        left = left[: None if bounds.tried is None else max(0, bounds.tried - self._tried(source.name))]
        progress.stage(f"{source.name}: trying candidates", total=len(left))
        queue = iter(left)

        async def work() -> None:
            for key in queue:
                if self._enough(source.name, bounds):
                    return
                self._decide(await self._try(source, key, trial))
                progress.advance()

        async with asyncio.TaskGroup() as group:
            for _ in range(bounds.jobs):
                group.create_task(work())

    async def _try(self, source: Source, key: str, trial: Validation) -> Entry:
        digest = ""
        try:
            draft = await source.draft(key)
            digest = _digest(draft.record)
            self._check_new(digest, draft.record)
            record = await trial.judge(draft)
            self._check_new(digest, record)
        except Fallen as fallen:
            return Entry(source.name, key, reason=fallen.reason, detail=fallen.detail, digest=digest)
        _append(self.directory / TASKS, record.model_dump_json())
        self.healthy.add(record.id)
        return Entry(source.name, key, task_id=record.id, digest=digest)

    def _check_new(self, digest: str, record: SweRecord) -> None:
        for entry in self.entries.values():
            if entry.task_id and (entry.digest == digest or entry.task_id == record.id):
                raise Fallen("duplicate", f"of {entry.task_id}")

    def _decide(self, entry: Entry) -> None:
        if self.entries.get((entry.source, entry.key)) != entry:
            _append(self.directory / JOURNAL, json.dumps(asdict(entry)))
            self.entries[entry.source, entry.key] = entry

    def _tried(self, name: str) -> int:
        return sum(entry.source == name and bool(entry.key) for entry in self.entries.values())

    def _enough(self, name: str, bounds: Bounds) -> bool:
        found = sum(entry.source == name and bool(entry.task_id) for entry in self.entries.values())
        if bounds.tasks is not None and found >= bounds.tasks:
            return True
        if dir_mb(self.directory) > bounds.mb:
            raise EnvsError(
                f"{self.directory}: larger than {bounds.mb} MiB: raise --disk-mb, or remove site-* directories"
            )
        return False

    def report(self) -> Mapping[str, Mapping[str, Any]]:
        """By source: candidates tried, healthy ones, how many fell for each reason with an example, and notes on the
        source as a whole."""
        rows: dict[str, list[Entry]] = defaultdict(list)
        for entry in self.entries.values():
            rows[entry.source].append(entry)
        return {source: _summary(entries) for source, entries in rows.items()}


def _summary(entries: Sequence[Entry]) -> Mapping[str, Any]:
    tried = [entry for entry in entries if entry.key]
    fallen = [entry for entry in tried if not entry.task_id]
    examples = {entry.reason: f"{entry.key} {entry.detail}".strip() for entry in reversed(fallen)}
    reasons = Counter(entry.reason for entry in fallen).most_common()
    return {
        "tried": len(tried),
        "healthy": len(tried) - len(fallen),
        "fallen": {reason: {"candidates": count, "example": examples[reason]} for reason, count in reasons},
        "notes": [f"{entry.reason}: {entry.detail}" for entry in entries if not entry.key and entry.reason],
    }


def _digest(record: SweRecord) -> str:
    """The same for two fixes that remove and add the same lines in the same files, wherever those stand."""
    lines = [line for line in record.gold.split("\n") if is_changed_line(line) or line.startswith("diff --git ")]
    return hashlib.sha256("\n".join([record.repo_name, *lines]).encode()).hexdigest()[:16]


def _append(path: Path, line: str) -> None:
    with path.open("ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[Any]:
    """The rows of a JSONL file; a last line that a kill cut off is removed."""
    if not path.exists():
        return []
    whole, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        path.write_bytes(whole + b"\n" if whole else b"")
    return [json.loads(line) for line in whole.splitlines()]
