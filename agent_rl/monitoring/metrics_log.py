"""Metrics of a run: ``metrics.jsonl`` (one JSON object a step), and the sinks that the config names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import orjson

from agent_rl.monitoring.metrics import check_registered
from agent_rl.monitoring.sinks import Sink
from agent_rl.utils.run_files import write_atomic


class MetricsLog:
    """Appends steps, and forgets those after the step a run resumes from.

    The file is rewritten whole at every step: it is small, and a kill leaves either the old or the new one. ``sinks``
    are opened when the first step is written; one that fails is closed and left out, and ``note`` is given a line: a
    service that is away must not end a run.
    """

    def __init__(
        self,
        run_dir: Path,
        sinks: Mapping[str, Callable[[], Sink]] | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._rows: list[dict[str, float]] = read_metrics(run_dir)
        self._unopened, self._note = dict(sinks or {}), note
        self._sinks: dict[str, Sink] = {}
        self._writing = threading.Lock()  # a run that is stopped closes it while a thread may still write a row

    @property
    def rows(self) -> list[dict[str, float]]:
        return list(self._rows)

    def forget_after(self, step: int) -> None:
        """Drop the rows of steps later than ``step``: they are about to be done again."""
        self._rows = [row for row in self._rows if row["step"] <= step]
        self._flush()

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Write the row of ``step``, with the time by the clock. Raises AgentRlError for a metric that is not
        registered."""
        row = {"step": step, **{name: float(value) for name, value in values.items()}, "time/ended": time.time()}
        check_registered(row.keys() - {"step"})
        self._rows.append(row)
        self._flush()
        written = {name: value for name, value in row.items() if name != "step"}
        with self._writing:
            for name in list(self._unopened):
                self._try(name, partial(self._open, name))
            for name, sink in list(self._sinks.items()):
                self._try(name, partial(sink.log, step, written))

    def close(self) -> None:
        with self._writing:
            for name in list(self._sinks):
                self._try(name, self._sinks.pop(name).close)

    def _open(self, name: str) -> None:
        self._sinks[name] = self._unopened.pop(name)()

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a service's library raises
            if (failed := self._sinks.pop(name, None)) is not None:
                with suppress(Exception):
                    failed.close()
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self._note(f"monitoring.sinks: {name} is not written to any more: {reason}")

    def _flush(self) -> None:
        write_atomic(self._path, b"".join(orjson.dumps(row) + b"\n" for row in self._rows))


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run's ``metrics.jsonl``; none where there is no such file yet."""
    path = run_dir / "metrics.jsonl"
    return [_finite(orjson.loads(line)) for line in path.read_bytes().splitlines()] if path.exists() else []


def _finite(row: dict[str, float | None]) -> dict[str, float]:
    """JSON has no NaN and no infinity: orjson writes null for them. Such a metric is left out of the row."""
    return {name: value for name, value in row.items() if value is not None}
