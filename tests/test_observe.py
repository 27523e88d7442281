from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agent_rl.observe.display import Display, sparkline
from agent_rl.observe.files import read_json, replacing, write_atomic, write_json
from agent_rl.observe.metrics_log import MetricsLog, read_metrics
from agent_rl.observe.picture import draw_run


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    write_json(target, {"step": 1})
    with pytest.raises(TypeError):
        write_atomic(target, "not bytes")  # type: ignore[arg-type]
    assert read_json(target) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_a_file_replaced_by_a_writer_that_fails_stays_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "arrays.bin"
    write_atomic(target, b"whole")

    def fail() -> None:
        with replacing(target) as temporary:
            temporary.write_bytes(b"ha")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert target.read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["arrays.bin"]


def test_metrics_survive_a_reopen_and_forget_what_is_done_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.append(step, {"reward/mean": step / 10})
    log.close()
    resumed = MetricsLog(tmp_path)
    resumed.forget_after(2)
    resumed.append(3, {"reward/mean": 0.9})
    resumed.close()
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(tmp_path)] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_sparkline_spans_its_own_range() -> None:
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([]) == ""


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
    text = out.getvalue()
    assert "sglang" in text
    assert "0.250" in text


def test_picture_is_a_png(tmp_path: Path) -> None:
    rows = [{"step": s, "reward/mean": s / 4, "mismatch/k3_kl": 1e-4, "mismatch_native/k3_kl": 1e-3} for s in (1, 2, 3)]
    draw_run(rows, tmp_path / "run.png", title="t", evaluations={0: (0.2, 0.1, 0.3), 3: (0.6, 0.5, 0.7)})
    assert (tmp_path / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
