"""Metrics of a run: ``metrics.jsonl`` (one JSON object a step) and TensorBoard event files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import orjson

from agent_rl.observe.files import write_atomic
from agent_rl.observe.metrics import check_registered


class MetricsLog:
    """Appends steps, and forgets those after the step a run resumes from.

    The file is rewritten whole at every step: it is small, and a kill leaves either the old or the new one.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._events = run_dir / "tensorboard"
        self._rows: list[dict[str, float]] = read_metrics(run_dir)
        self._writer: object | None = None

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
        from tensorboardX import SummaryWriter  # imports protobuf: not needed by a reader

        if self._writer is None:
            self._writer = SummaryWriter(str(self._events))
        writer = self._writer
        assert isinstance(writer, SummaryWriter)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()  # type: ignore[attr-defined]
            self._writer = None

    def _flush(self) -> None:
        write_atomic(self._path, b"".join(orjson.dumps(row) + b"\n" for row in self._rows))


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of a run's ``metrics.jsonl``; none where there is no such file yet."""
    path = run_dir / "metrics.jsonl"
    return [_finite(orjson.loads(line)) for line in path.read_bytes().splitlines()] if path.exists() else []


def _finite(row: dict[str, float | None]) -> dict[str, float]:
    """JSON has no NaN and no infinity: orjson writes null for them. Such a metric is left out of the row."""
    return {name: value for name, value in row.items() if value is not None}
