"""Watches a run for collapse: metrics beyond their limits cause warnings, and by policy end the run with a checkpoint.

::

    rows of metrics.jsonl ─┬─ crossings ── a metric beyond a limit ──> a note, guard/*, a line of guard.jsonl
                           ├─ streaks ── patience steps in a row ──> checkpoint, GuardStop
                           └─ spike_norm ── k x the median gradient norm ──> the trainer's next update

Everything is a function of the rows, so a resumed run continues with its history. Streaks and skipped updates are
counted from the last start of the run, because a user restarts a stopped run knowingly.

Relative limits use the median and 1.4826 x MAD of the rows before (Rousseeuw and Croux, JASA 1993), which are robust to
a few outliers, as in k3. Metrics that are never negative are compared by their logarithm. The metrics and their values
before collapses are from the R3 paper (arXiv 2510.11370).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from agent_rl.config import GuardConfig, LimitConfig
from agent_rl.errors import GuardStop
from agent_rl.train.checkpoint.directory import checkpoint_step
from agent_rl.utils.run_files import write_atomic

Row = Mapping[str, float]
Side = Literal["above", "below"]

SIGMA_PER_MAD = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""
MIN_SPREAD = 0.1
"""Lower bound of the relative spread, for a history with little or no variation."""
MIN_LOG_VALUE = 1e-12
"""Values below this are raised to it before taking a logarithm."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A watched metric: its key in the config's ``guard`` section, the harmful sides, and whether it is compared by
    logarithm."""

    key: str
    metric: str
    sides: tuple[Side, ...]
    logarithmic: bool


WATCHED = (
    Watched("k3_kl", "mismatch/k3_kl", ("above",), True),
    Watched("f_tau_2", "mismatch/f_tau_2", ("above",), True),
    Watched("grad_norm", "train/grad_norm", ("above",), True),
    Watched("entropy", "train/entropy", ("above", "below"), True),
    Watched("reward", "reward/mean", ("below",), False),
    Watched("audit", "r3/audit_mismatch", ("above",), False),
    Watched("audit_cached", "r3/audit_cached_mismatch", ("above",), False),
)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A metric beyond a limit at ``step``, for ``steps`` steps in a row including this one.

    ``kind``: ``absolute``, or ``relative`` to the run's history; ``limit`` is in the metric's unit.
    """

    step: int
    metric: str
    value: float
    side: Side
    limit: float
    kind: Literal["absolute", "relative"]
    key: str
    steps: int = 1

    def __str__(self) -> str:
        line = f"{self.metric} is {self.value:.3g}"
        if math.isfinite(self.value):
            line += f", {self.side} its limit {self.limit:.3g} ({self.key})"
        return line + (f", {self.steps} steps in a row" if self.steps > 1 else "")


def crossings(row: Row, history: Sequence[Row], config: GuardConfig) -> Iterator[Crossing]:
    """The limits that ``row`` exceeds; ``history`` holds the rows before it, oldest first. Metrics missing in the
    row are skipped (a step without an update has no gradient norm)."""
    for watched in WATCHED:
        value = row.get(watched.metric)
        if value is None:
            continue
        limits: LimitConfig = getattr(config, watched.key)
        hits = (
            *_absolute(watched, value, limits),
            *_relative(watched, value, limits, _values(watched.metric, history, config), config.min_history),
        )
        for side, limit, kind, name in hits:
            yield Crossing(int(row["step"]), watched.metric, value, side, limit, kind, f"guard.{watched.key}.{name}")


LimitHit = tuple[Side, float, Literal["absolute", "relative"], str]


def _absolute(watched: Watched, value: float, limits: LimitConfig) -> Iterator[LimitHit]:
    if not math.isfinite(value):
        yield "above", math.inf, "absolute", "above"
        return
    if limits.above is not None and value > limits.above:
        yield "above", limits.above, "absolute", "above"
    if limits.below is not None and value < limits.below:
        yield "below", limits.below, "absolute", "below"


def _relative(
    watched: Watched, value: float, limits: LimitConfig, history: Sequence[float], min_rows: int
) -> Iterator[LimitHit]:
    if limits.deviations is None or len(history) < min_rows or not math.isfinite(value):
        return
    low, high = band(history, limits.deviations, logarithmic=watched.logarithmic)
    if value > high and "above" in watched.sides:
        yield "above", high, "relative", "deviations"
    if value < low and "below" in watched.sides:
        yield "below", low, "relative", "deviations"


def band(history: Sequence[float], deviations: float, *, logarithmic: bool) -> tuple[float, float]:
    """``(low, high)``: ``deviations`` robust deviations below and above the median of ``history`` (not empty)."""
    values = [math.log(max(value, MIN_LOG_VALUE)) for value in history] if logarithmic else list(history)
    center = statistics.median(values)
    spread = SIGMA_PER_MAD * statistics.median(abs(value - center) for value in values)
    # On a logarithm an absolute step is a relative one of the metric.
    spread = max(spread, MIN_SPREAD * (1.0 if logarithmic else abs(center)))
    low, high = center - deviations * spread, center + deviations * spread
    return (_exp(low), _exp(high)) if logarithmic else (low, high)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # the largest float is exp(709)


def _values(metric: str, rows: Sequence[Row], config: GuardConfig) -> list[float]:
    """The metric's finite values in the window before a row."""
    return [row[metric] for row in rows[-config.window :] if metric in row and math.isfinite(row[metric])]


def streaks(rows: Sequence[Row], config: GuardConfig, *, since: int = 0) -> list[Crossing]:
    """The limits that the last row exceeds, each with the number of consecutive steps, counting rows after step
    ``since``. A row without the metric neither ends nor extends a streak."""
    if not rows:
        return []
    standing = {(hit.key, hit.side): hit for hit in crossings(rows[-1], rows[:-1], config)}
    counts, open_keys = dict.fromkeys(standing, 1), set(standing)
    for index in range(len(rows) - 2, -1, -1):
        if not open_keys or rows[index]["step"] <= since:
            break
        before = {(hit.key, hit.side) for hit in crossings(rows[index], rows[:index], config)}
        for name in list(open_keys):
            if name in before:
                counts[name] += 1
            elif standing[name].metric in rows[index]:
                open_keys.discard(name)
    return [Crossing(**{**asdict(hit), "steps": counts[name]}) for name, hit in standing.items()]


def spike_norm(rows: Sequence[Row], config: GuardConfig) -> float | None:
    """The gradient norm above which the next update is a spike; None without a limit or with too little history.

    ``spike_factor`` times the median over the window (ZClip, arXiv 2504.02507, uses mean and deviation).
    """
    norms = _values("train/grad_norm", rows, config)
    if config.spike_factor is None or len(norms) < config.min_history:
        return None
    return config.spike_factor * statistics.median(norms) or None


class Guard:
    """A run's guard. Call ``resume`` once, ``judge`` every step, and ``enforce`` once the step's checkpoint may be
    saved."""

    def __init__(self, config: GuardConfig, run_dir: Path, note: Callable[[str], None]) -> None:
        self._config, self._note = config, note
        self._path = run_dir / "guard.jsonl"
        written = self._path.read_bytes() if self._path.exists() else b""
        self._events = [orjson.loads(line) for line in written.splitlines()]
        self._since = 0
        self._reason: str | None = None
        self._crossed_since: int | None = None

    @property
    def stopping(self) -> bool:
        """Whether the last judged step ends the run: save its checkpoint, then :meth:`enforce` raises."""
        return self._reason is not None

    @property
    def good_step(self) -> int | None:
        """The last step before the present crossings began; None without crossings."""
        return None if self._crossed_since is None else self._crossed_since - 1

    def resume(self, step: int) -> None:
        """The run continues after ``step``: later events are removed and streaks restart."""
        self._since, self._reason, self._crossed_since = step, None, None
        kept = [event for event in self._events if event["step"] <= step]
        if len(kept) != len(self._events):
            self._events = kept
            self._write()

    def spike_norm(self, rows: Sequence[Row]) -> float | None:
        """:func:`spike_norm` of the rows so far."""
        return spike_norm(rows, self._config)

    def judge(self, step: int, values: Row, rows: Sequence[Row]) -> dict[str, float]:
        """Judge a finished step against the ``rows`` before it. Notes and records crossings; returns the ``guard/*``
        metrics."""
        row = {"step": float(step), **values}
        standing = [] if self._config.action == "off" else streaks([*rows, row], self._config, since=self._since)
        for crossing in standing:
            self._report("warn", step, str(crossing), asdict(crossing))
        self._crossed_since = min((step - crossing.steps + 1 for crossing in standing), default=None)
        skipped = self._skipped([*rows, row])
        if skipped_now := values.get("train/skipped_updates", 0.0):
            self._report(
                "skipped", step, f"{skipped_now:.0f} update(s) skipped", {"skipped": skipped_now, "in_window": skipped}
            )
        if spikes := values.get("train/spikes", 0.0):
            text = f"{spikes:.0f} gradient-norm spike(s), guard.on_spike: {self._config.on_spike}"
            self._report("spike", step, text, {"spikes": spikes})
        self._reason = self._stop_reason(standing, skipped)
        if self._reason is not None:
            self._record("stop", step, self._reason, {})
        longest = max((crossing.steps for crossing in standing), default=0)
        return {"guard/crossed": float(len(standing)), "guard/streak": float(longest)}

    def enforce(self, checkpoint: Path, newest: Callable[[int], Path | None]) -> None:
        """Raises GuardStop if the last judged step ends the run; ``checkpoint`` is that step's. ``newest`` returns
        the newest checkpoint up to a step."""
        if self._reason is None:
            return
        last = None if self.good_step is None else newest(self.good_step)
        back = "" if last is None else f", or fork {last.parent.parent}@{checkpoint_step(last)}, from before it began"
        raise GuardStop(f"{self._reason}; saved in {checkpoint}: restart to continue from there{back}", last)

    def _skipped(self, rows: Sequence[Row]) -> float:
        recent = [row for row in rows[-self._config.window :] if row["step"] > self._since]
        return sum(row.get("train/skipped_updates", 0.0) for row in recent)

    def _stop_reason(self, standing: Sequence[Crossing], skipped: float) -> str | None:
        config = self._config
        if skipped > config.max_skipped:
            return f"{skipped:.0f} updates were skipped, more than guard.max_skipped={config.max_skipped}"
        if config.action != "stop":
            return None
        for crossing in standing:
            may_stop = crossing.kind == "absolute" or config.stop_on == "any"
            if may_stop and crossing.steps >= config.patience:
                return str(crossing)
        return None

    def _report(self, event: str, step: int, text: str, details: Mapping[str, object]) -> None:
        self._note(f"guard, step {step}: {text}")
        self._record(event, step, text, details)

    def _record(self, event: str, step: int, text: str, details: Mapping[str, object]) -> None:
        self._events.append({"step": step, "event": event, "text": text, **details})
        self._write()

    def _write(self) -> None:
        write_atomic(self._path, b"".join(orjson.dumps(event) + b"\n" for event in self._events))
