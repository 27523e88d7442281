"""The live display of a command: step, reward, mismatch, throughput and stage times.

On a terminal it is a panel; otherwise every step and stage is a plain line.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from sandbox import printable

PROGRESS_SECONDS = 30.0
BARS = "▁▂▃▄▅▆▇█"
PANEL_METRICS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "sft/loss", "{:.4f}"),
    ("held-out loss", "sft/validation_loss", "{:.4f}"),
    ("turns", "rollout/turns_mean", "{:.1f}"),
    ("tokens/s", "rollout/tokens_per_second", "{:.0f}"),
    ("k3-KL replay", "mismatch/k3_kl", "{:.2e}"),
    ("k3-KL without replay", "mismatch_without_replay/k3_kl", "{:.2e}"),
    ("router mismatch", "r3/router_mismatch", "{:.4f}"),
    ("grad norm", "train/grad_norm", "{:.3f}"),
    ("entropy", "train/entropy", "{:.3f}"),
)
STAGES = ("rollout", "old_logprob", "update", "weight_sync")


def cell(text: str) -> Text:
    """A table cell with ``text``. Markup is not interpreted and control characters are removed."""
    return Text(printable(text))


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None  # no event loop is running


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last ``width`` values as block characters, scaled from their minimum to their maximum."""
    recent = list(values)[-width:]
    if not recent:
        return ""
    low, high = min(recent), max(recent)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in recent)


@dataclass(frozen=True)
class _UntilStopped:
    """The panel; empty once ``task`` is being cancelled, so that later output starts on a clear screen."""

    panel: RenderableType
    task: asyncio.Task[object] | None

    def __rich__(self) -> RenderableType:
        return Text() if self.task is not None and self.task.cancelling() else self.panel


@dataclass(slots=True)
class _Stage:
    """A stage that goes on: its bar, its text, when it began, and when its progress was last printed."""

    task: TaskID
    text: str
    started: float
    printed: float


class Display:
    """Shows stages and steps. A context manager; leaving it restores the terminal."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self._name = name
        self._console = console or Console()
        self._live: Live | None = None
        self._task: asyncio.Task[object] | None = None
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), *times)
        self._stages: dict[str, _Stage] = {}
        self._steps: TaskID | None = None
        self._rows: list[Mapping[str, float]] = []
        self._facts: dict[str, str] = {}

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._task = _current_task()
            self._live = Live(_UntilStopped(self._render(), self._task), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def next(self, *command: str | Path) -> None:
        """Print the suggested next command."""
        self.note(f"next: agent-rl {shlex.join(map(str, command))}")

    def table(self, table: Table) -> None:
        """Print a permanent table."""
        self._console.print(table)

    def fact(self, name: str, value: str) -> None:
        """Show a property of the run in the panel's header (engine, sandbox, Pass@1 ...)."""
        self._facts[name] = value
        if self._live is None:
            self.note(f"{name}: {value}")
        self._refresh()

    def stage(self, text: str, total: int | None = None, lane: str = "") -> None:
        """Begin a stage and end the previous one of its lane. ``advance`` updates its progress."""
        self._end_stage(lane)
        now = time.monotonic()
        self._stages[lane] = _Stage(self._progress.add_task(text, total=total), text, now, now)
        if self._live is None:
            self.note(f"[{self._name}] {text} ...")
        self._refresh()

    def end(self, lane: str = "") -> None:
        """End the stage of ``lane``, if there is one."""
        self._end_stage(lane)
        self._refresh()

    def advance(self, count: int = 1, lane: str = "") -> None:
        if lane in self._stages:
            self._progress.advance(self._stages[lane].task, count)
            if self._live is None:
                self._print_progress(self._stages[lane])
            self._refresh()

    def start_steps(self, done: int, total: int) -> None:
        """Begin the progress of steps after step ``done`` and clear the displayed metrics."""
        if self._steps is not None:
            self._progress.remove_task(self._steps)
        self._rows.clear()
        self._steps = self._progress.add_task("steps", total=total, completed=done)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a finished global step."""
        self._rows.append(values)
        self._end_stage("")
        if self._steps is not None:
            self._progress.update(self._steps, completed=step)
        if self._live is None:
            text = "  ".join(f"{name} {form.format(values[key])}" for name, key, form in PANEL_METRICS if key in values)
            self.note(f"[{self._name}] step {step}: {text}  ({values.get('time/step', 0.0):.1f} s)")
        self._refresh()

    def _print_progress(self, stage: _Stage) -> None:
        """Print how far the stage is and how long it will take, every PROGRESS_SECONDS."""
        now = time.monotonic()
        if now - stage.printed < PROGRESS_SECONDS:
            return
        stage.printed = now
        task = next(task for task in self._progress.tasks if task.id == stage.task)
        if task.total:
            left = (now - stage.started) / task.completed * (task.total - task.completed)
            self.note(f"[{self._name}] {stage.text}: {task.completed:.0f} of {task.total:.0f}, {left:.0f} s left")

    def _end_stage(self, lane: str) -> None:
        if (stage := self._stages.pop(lane, None)) is not None:
            self._progress.remove_task(stage.task)
            if self._live is None:
                self.note(f"[{self._name}] {stage.text}: {time.monotonic() - stage.started:.1f} s")

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(_UntilStopped(self._render(), self._task))

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [Text("   ".join(f"{name}: {value}" for name, value in self._facts.items()))]
        if self._rows:
            parts.append(self._metrics_table())
            parts.append(Text(self._stage_times()))
        parts.append(self._progress)
        return Panel(Group(*parts), title=f"agent-rl · {self._name}", title_align="left")

    def _metrics_table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for label, key, form in PANEL_METRICS:
            values = [row[key] for row in self._rows if key in row]
            if values:
                table.add_row(label, form.format(values[-1]), sparkline(values))
        return table

    def _stage_times(self) -> str:
        last = self._rows[-1]
        return "seconds per step   " + "   ".join(
            f"{stage} {last[f'time/{stage}']:.1f}" for stage in (*STAGES, "step") if f"time/{stage}" in last
        )
