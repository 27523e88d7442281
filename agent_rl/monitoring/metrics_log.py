"""Writes a run's metrics to ``metrics.jsonl`` (one JSON object per step) and to the configured sinks."""

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
from agent_rl.utils.run_files import LineFile, read_lines


class MetricsLog:
    """Appends the metrics of steps, and drops those after the step from which a run resumes.

    ``sinks`` are opened at the first step. A sink that fails is closed and reported with ``note``; it does not end the
    run.
    """

    def __init__(
        self,
        run_dir: Path,
        sinks: Mapping[str, Callable[[], Sink]] | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._file = LineFile(run_dir / "metrics.jsonl")
        self._rows: list[dict[str, float]] = read_metrics(run_dir)
        self._unopened, self._note = dict(sinks or {}), note
        self._sinks: dict[str, Sink] = {}
        self._writing = threading.Lock()  # close() may run while a thread writes a row

    @property
    def rows(self) -> list[dict[str, float]]:
        return list(self._rows)

    def forget_after(self, step: int) -> None:
        """Drop the rows of steps after ``step``, which will be repeated."""
        self._rows = [row for row in self._rows if row["step"] <= step]
        self._file.rewrite(map(_line, self._rows))

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Write the row of ``step`` with the current time. Raises AgentRlError for an unregistered metric."""
        row = {"step": step, **{name: float(value) for name, value in values.items()}, "time/ended": time.time()}
        check_registered(row.keys() - {"step"})
        self._rows.append(row)
        self._file.append(_line(row))
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
        except Exception as error:  # any error of a service's library
            if (failed := self._sinks.pop(name, None)) is not None:
                with suppress(Exception):
                    failed.close()
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self._note(f"monitoring.sinks: {name} failed and is disabled: {reason}")


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run's ``metrics.jsonl``, none without it. Raises orjson.JSONDecodeError for a damaged one."""
    return [_finite(orjson.loads(line)) for line in read_lines(run_dir / "metrics.jsonl")]


def _line(row: Mapping[str, float]) -> bytes:
    return orjson.dumps(row) + b"\n"


def _finite(row: dict[str, float | None]) -> dict[str, float]:
    """The row without null values, which orjson writes for NaN and infinity."""
    return {name: value for name, value in row.items() if value is not None}
