from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from agent_rl.config import RunConfig
from agent_rl.errors import UserError
from agent_rl.monitoring.console import Display, sparkline
from agent_rl.monitoring.metrics_log import MetricsLog, read_metrics
from agent_rl.monitoring.plots import draw_run
from agent_rl.monitoring.sinks import Sink, TensorBoard, check_sinks
from agent_rl.utils.concurrency import INTERVAL, LoopLag, run_alongside
from agent_rl.utils.run_files import replacing, write_atomic


def test_a_failed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "arrays.bin"
    write_atomic(target, b"whole")
    with pytest.raises(OSError, match="disk"), replacing(target) as temporary:  # noqa: PT012
        temporary.write_bytes(b"ha")
        raise OSError("the disk is full")
    assert target.read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["arrays.bin"]


def test_metrics_survive_a_reopen_and_forget_what_is_done_again(tmp_path: Path) -> None:
    sinks = {"tensorboard": partial(TensorBoard, tmp_path)}
    log = MetricsLog(tmp_path, sinks)
    for step in (1, 2, 3):
        log.append(step, {"reward/mean": step / 10})
    log.close()
    resumed = MetricsLog(tmp_path, sinks)
    resumed.forget_after(2)
    resumed.append(3, {"reward/mean": 0.9})
    resumed.close()
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_row_cut_at_any_byte_is_ignored_and_replaced(tmp_path: Path) -> None:
    """A kill within the write of a row, before the next start drops the rows that it repeats, or without that."""
    log = MetricsLog(tmp_path)
    log.append(1, {"reward/mean": 0.1})
    path = tmp_path / "metrics.jsonl"
    first = path.stat().st_size
    log.append(2, {"reward/mean": 0.2})
    whole = path.read_bytes()
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert [row["step"] for row in read_metrics(tmp_path)] == [1]
        MetricsLog(tmp_path).append(2, {"reward/mean": 0.4})
        assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [(1, 0.1), (2, 0.4)]
        assert path.read_bytes().count(b"\n") == 2


def test_the_bytes_written_do_not_grow_with_the_steps(tmp_path: Path) -> None:
    """An inode that stays: no step replaces the file."""
    log = MetricsLog(tmp_path)
    log.append(1, {"reward/mean": 0.1})
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    for step in range(2, 20):
        log.append(step, {"reward/mean": 0.1})
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 20))


def test_a_failed_sink_is_reported_in_one_line_and_disabled(tmp_path: Path) -> None:
    class Away:
        def __init__(self, steps: int) -> None:
            self.steps, self.closed = steps, False

        def log(self, step: int, values: Mapping[str, float]) -> None:
            assert values["time/ended"] > 0
            if step > self.steps:
                raise ConnectionError("the service\nis away")

        def close(self) -> None:
            self.closed = True

    def absent() -> Sink:
        raise RuntimeError("no key")

    lines, away, there = list[str](), Away(1), Away(9)
    log = MetricsLog(tmp_path, {"a": lambda: away, "b": absent, "c": lambda: there}, lines.append)
    for step in (1, 2, 3):
        log.append(step, {"reward/mean": 0.5})
    log.close()
    assert lines == [
        "monitoring.sinks: b failed and is disabled: no key",
        "monitoring.sinks: a failed and is disabled: the service is away",
    ]
    assert away.closed
    assert (there.closed, len(read_metrics(tmp_path))) == (True, 3)


def test_a_sink_whose_library_is_absent_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = RunConfig.model_validate({"name": "x", "model": "m", "monitoring": {"sinks": ["wandb"]}})
    with pytest.raises(UserError, match=r"monitoring\.sinks.* wandb .*: pip install 'agent-rl\[wandb\]'"):
        check_sinks(config.monitoring)


def test_sparkline_spans_its_own_range() -> None:
    assert [sparkline(values) for values in ([0, 1, 2, 3], [5, 5], [])] == ["▁▃▆█", "▁▁", ""]


@pytest.mark.parametrize("terminal", [True, False])
def test_display_shows_the_step_it_was_given(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    with Display("demo", console) as display:
        display.fact("engine", "sglang")
        display.start_steps(0, 2)
        display.stage("rollout", total=4)
        display.advance(4)
        display.step(1, {"reward/mean": 0.25, "time/step": 3.0, "time/rollout": 2.0})
    assert all(text in out.getvalue() for text in ("sglang", "0.250"))


def test_a_long_stage_without_a_terminal_says_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), iter([0.0, 10.0, 40.0, 50.0, 80.0])
    monkeypatch.setattr("agent_rl.monitoring.console.time.monotonic", lambda: next(clock))
    display = Display("demo", Console(file=out, width=120))
    display.stage("Pass@1 of engine", total=8)
    for _ in range(3):
        display.advance()
    assert out.getvalue().splitlines() == [
        "[demo] Pass@1 of engine ...",
        "[demo] Pass@1 of engine: 2 of 8, 120 s left",
    ]


def run_picture(rows: list[dict[str, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure that is drawn of ``rows``, as it was saved."""
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **how: (drawn.append(self), save(self, *args, **how)))
    draw_run(rows, tmp_path / "run.png", title="t", evaluations={"": {0: (0.2, 0.1, 0.3), 3: (0.6, 0.5, 0.7)}})
    assert (tmp_path / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return drawn[0]


@pytest.mark.parametrize("steps", [0, 1, 3, 36])
def test_a_picture_has_whole_steps_and_legends_that_cover_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    values = {"mismatch/k3_kl": 1e-4, "mismatch_without_replay/k3_kl": 1e-3, "time/rollout": 9.0, "time/update": 2.0}
    rows = [{"step": step, "reward/mean": step / steps, **values} for step in range(1, steps + 1)]
    figure = run_picture(rows, tmp_path, monkeypatch)
    for axes in figure.axes:
        assert all(tick == round(tick) for tick in axes.get_xticks()), axes.get_title()
        if (legend := axes.get_legend()) is not None:
            assert legend.get_window_extent().y1 <= axes.get_window_extent().y0, axes.get_title()


def test_a_recovered_step_is_not_in_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": step, "reward/mean": 0.5, "time/rollout": 9.0} for step in (1, 2, 3)]
    rows[1] |= {"time/rollout": 1e-4, "time/rollout_recovered": 1.0}
    figure = run_picture(rows, tmp_path, monkeypatch)
    bars = figure.axes[2].patches
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in bars] == [1, 3]
    assert [bar.get_height() for bar in bars] == [9.0, 9.0]


def test_a_log_closed_during_a_write_closes_its_sinks_afterwards(tmp_path: Path) -> None:
    """A write to a closed sink of TensorBoard waits for ever."""
    writing, go_on, order = threading.Event(), threading.Event(), list[str]()

    class Slow:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            writing.set()
            go_on.wait(10)
            order.append("written")

        def close(self) -> None:
            order.append("closed")

    log = MetricsLog(tmp_path, {"slow": Slow})
    with ThreadPoolExecutor() as threads:
        threads.submit(log.append, 1, {"reward/mean": 1.0})
        assert writing.wait(10)
        closing = threads.submit(log.close)
        wait([closing], timeout=0.05)
        go_on.set()
    assert order == ["written", "closed"]


async def test_the_lag_of_a_blocked_event_loop_is_measured() -> None:
    lag = LoopLag()
    async with run_alongside(lag.watch()):
        await asyncio.sleep(0)
        time.sleep(INTERVAL + 0.2)  # noqa: ASYNC251  (what the loop must not do)
        await asyncio.sleep(0.01)
    assert lag.metrics()["loop/lag_p99_ms"] >= 200
    assert lag.metrics() == {}
