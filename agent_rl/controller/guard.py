"""Watches a run for collapse: metrics beyond their limits warn, and by policy end the run with a checkpoint.

::

    rows of metrics.jsonl ─┬─ crossings ── a metric beyond a limit ──> a note, guard/*, a line of guard.jsonl
                           ├─ streaks ── patience steps in a row ──> checkpoint, GuardStop
                           └─ spike_norm ── k x the median gradient norm ──> the trainer's next update

Everything is a function of the rows, so a resumed run goes on with the history it had. Streaks and skipped updates are
counted from where the run was started: who starts a stopped run again has read why it stopped.

Relative limits use the median and 1.4826 x MAD of the rows before (Rousseeuw and Croux, JASA 1993): a history with a
few wild values in it, as k3's is, still has both. Metrics that are never negative are compared by their logarithm. The
metrics and the figures they had before collapses are those of the R3 paper (arXiv 2510.11370).
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
from agent_rl.utils.run_files import write_atomic

Row = Mapping[str, float]
Side = Literal["above", "below"]

SIGMA_PER_MAD = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""
LEAST_SPREAD = 0.1
"""A relative spread (of a history without any variation, for one) counts as at least this."""
TINY = 1e-12
"""What a logarithm takes zero for."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A metric that is watched: its key in the config's ``guard`` section, which sides are harmful, its scale."""

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
    """A metric beyond a limit at ``step``, for so many ``steps`` in a row (this one included).

    ``kind``: ``absolute`` or ``relative`` to the run's history; ``limit`` is in the metric's own unit.
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
    """The limits that ``row`` is beyond; ``history`` holds the rows before it, oldest first. A metric that the row
    lacks (a step without an update has no gradient norm) is beyond none."""
    for watched in WATCHED:
        value = row.get(watched.metric)
        if value is None:
            continue
        limits: LimitConfig = getattr(config, watched.key)
        found = (
            *_absolute(watched, value, limits),
            *_relative(watched, value, limits, _values(watched.metric, history, config), config.min_history),
        )
        for side, limit, kind, name in found:
            yield Crossing(int(row["step"]), watched.metric, value, side, limit, kind, f"guard.{watched.key}.{name}")


Found = tuple[Side, float, Literal["absolute", "relative"], str]


def _absolute(watched: Watched, value: float, limits: LimitConfig) -> Iterator[Found]:
    if not math.isfinite(value):
        yield "above", math.inf, "absolute", "above"
        return
    if limits.above is not None and value > limits.above:
        yield "above", limits.above, "absolute", "above"
    if limits.below is not None and value < limits.below:
        yield "below", limits.below, "absolute", "below"


def _relative(
    watched: Watched, value: float, limits: LimitConfig, history: Sequence[float], least: int
) -> Iterator[Found]:
    if limits.deviations is None or len(history) < least or not math.isfinite(value):
        return
    low, high = band(history, limits.deviations, logarithmic=watched.logarithmic)
    if value > high and "above" in watched.sides:
        yield "above", high, "relative", "deviations"
    if value < low and "below" in watched.sides:
        yield "below", low, "relative", "deviations"


def band(history: Sequence[float], deviations: float, *, logarithmic: bool) -> tuple[float, float]:
    """``(low, high)``: so many robust deviations below and above the median of ``history`` (not empty)."""
    values = [math.log(max(value, TINY)) for value in history] if logarithmic else list(history)
    centre = statistics.median(values)
    spread = SIGMA_PER_MAD * statistics.median(abs(value - centre) for value in values)
    # On a logarithm an absolute step is a relative one of the metric.
    spread = max(spread, LEAST_SPREAD * (1.0 if logarithmic else abs(centre)))
    low, high = centre - deviations * spread, centre + deviations * spread
    return (_exp(low), _exp(high)) if logarithmic else (low, high)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # the largest that a float holds is exp(709)


def _values(metric: str, rows: Sequence[Row], config: GuardConfig) -> list[float]:
    """The metric's finite values in the window before a row."""
    return [row[metric] for row in rows[-config.window :] if metric in row and math.isfinite(row[metric])]


def streaks(rows: Sequence[Row], config: GuardConfig, *, since: int = 0) -> list[Crossing]:
    """The limits that the last row is beyond, each with the number of steps in a row it has been, rows up to step
    ``since`` left out of that number. A row without the metric neither ends a streak nor adds to it."""
    if not rows:
        return []
    standing = {(found.key, found.side): found for found in crossings(rows[-1], rows[:-1], config)}
    counts, open_keys = dict.fromkeys(standing, 1), set(standing)
    for at in range(len(rows) - 2, -1, -1):
        if not open_keys or rows[at]["step"] <= since:
            break
        before = {(found.key, found.side) for found in crossings(rows[at], rows[:at], config)}
        for name in list(open_keys):
            if name in before:
                counts[name] += 1
            elif standing[name].metric in rows[at]:
                open_keys.discard(name)
    return [Crossing(**{**asdict(found), "steps": counts[name]}) for name, found in standing.items()]


def spike_norm(rows: Sequence[Row], config: GuardConfig) -> float | None:
    """The gradient norm beyond which the next update is a spike; None while there is too little history, or no limit.

    ``spike_factor`` times the median over the window (as ZClip, arXiv 2504.02507, does with a mean and a deviation).
    """
    norms = _values("train/grad_norm", rows, config)
    if config.spike_factor is None or len(norms) < config.min_history:
        return None
    return config.spike_factor * statistics.median(norms) or None


class Guard:
    """A run's guard. ``resume`` once, ``judge`` every step, ``enforce`` when the step's checkpoint may be saved."""

    def __init__(self, config: GuardConfig, run_dir: Path, note: Callable[[str], None]) -> None:
        self._config, self._note = config, note
        self._path = run_dir / "guard.jsonl"
        written = self._path.read_bytes() if self._path.exists() else b""
        self._events = [orjson.loads(line) for line in written.splitlines()]
        self._since = 0
        self._reason: str | None = None
        self._began: int | None = None

    @property
    def stopping(self) -> bool:
        """The last step judged was the run's last: its checkpoint is to be saved, then :meth:`enforce` raises."""
        return self._reason is not None

    @property
    def good_step(self) -> int | None:
        """The last step before the standing crossings began; None where there are none."""
        return None if self._began is None else self._began - 1

    def resume(self, step: int) -> None:
        """The run goes on after ``step``: events of later steps are forgotten, streaks begin anew."""
        self._since, self._reason, self._began = step, None, None
        kept = [event for event in self._events if event["step"] <= step]
        if len(kept) != len(self._events):
            self._events = kept
            self._write()

    def spike_norm(self, rows: Sequence[Row]) -> float | None:
        """:func:`spike_norm` of the rows so far."""
        return spike_norm(rows, self._config)

    def judge(self, step: int, values: Row, rows: Sequence[Row]) -> dict[str, float]:
        """Judge a finished step against the ``rows`` before it. Notes and records what is beyond a limit, and returns
        the ``guard/*`` metrics."""
        row = {"step": float(step), **values}
        standing = [] if self._config.action == "off" else streaks([*rows, row], self._config, since=self._since)
        for crossing in standing:
            self._tell("warn", step, str(crossing), asdict(crossing))
        self._began = min((step - crossing.steps + 1 for crossing in standing), default=None)
        skipped = self._skipped([*rows, row])
        if lost := values.get("train/skipped_updates", 0.0):
            self._tell("skipped", step, f"{lost:.0f} update(s) left out", {"skipped": lost, "in_window": skipped})
        if spikes := values.get("train/spikes", 0.0):
            text = f"{spikes:.0f} gradient-norm spike(s), guard.on_spike: {self._config.on_spike}"
            self._tell("spike", step, text, {"spikes": spikes})
        self._reason = self._why_stop(standing, skipped)
        if self._reason is not None:
            self._record("stop", step, self._reason, {})
        longest = max((crossing.steps for crossing in standing), default=0)
        return {"guard/crossed": float(len(standing)), "guard/streak": float(longest)}

    def enforce(self, checkpoint: Path, newest: Callable[[int], Path | None]) -> None:
        """Raises GuardStop where the step just judged was the last; ``checkpoint`` is what was saved of it.
        ``newest`` finds the newest checkpoint up to a step."""
        if self._reason is None:
            return
        before = None if self.good_step is None else newest(self.good_step)
        back = "" if before is None else f", or remove what is later than {before.name}, the last from before it began"
        raise GuardStop(f"{self._reason}; saved in {checkpoint}: start again to go on from there{back}")

    def _skipped(self, rows: Sequence[Row]) -> float:
        recent = [row for row in rows[-self._config.window :] if row["step"] > self._since]
        return sum(row.get("train/skipped_updates", 0.0) for row in recent)

    def _why_stop(self, standing: Sequence[Crossing], skipped: float) -> str | None:
        config = self._config
        if skipped > config.max_skipped:
            return f"{skipped:.0f} updates were left out, more than guard.max_skipped={config.max_skipped}"
        if config.action != "stop":
            return None
        for crossing in standing:
            may_stop = crossing.kind == "absolute" or config.stop_on == "any"
            if may_stop and crossing.steps >= config.patience:
                return str(crossing)
        return None

    def _tell(self, event: str, step: int, text: str, facts: Mapping[str, object]) -> None:
        self._note(f"guard, step {step}: {text}")
        self._record(event, step, text, facts)

    def _record(self, event: str, step: int, text: str, facts: Mapping[str, object]) -> None:
        self._events.append({"step": step, "event": event, "text": text, **facts})
        self._write()

    def _write(self) -> None:
        write_atomic(self._path, b"".join(orjson.dumps(event) + b"\n" for event in self._events))
