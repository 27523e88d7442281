"""The collapse detector on recorded, synthetic and drawn metric series."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.config import GuardConfig, LimitConfig
from agent_rl.controller.guard import SIGMA_PER_MAD, Guard, band, crossings, spike_norm, streaks
from agent_rl.errors import GuardStop
from agent_rl.monitoring.metrics_log import MetricsLog, read_metrics

RECORDED = Path(__file__).parent / "healthy_metrics.jsonl"
Rows = list[dict[str, float]]


def healthy(steps: int, **last: float) -> Rows:
    """Rows that wobble as a healthy run's do, by the paper's figures for R3; ``last`` changes the last one."""
    rows = [
        {
            "step": float(step),
            "mismatch/k3_kl": 7.5e-4 * (1 + 0.3 * math.sin(step)),
            "mismatch/f_tau_2": 5e-5,
            "train/grad_norm": 0.2 * (1 + 0.2 * math.cos(3 * step)),
            "train/entropy": 0.3 * (1 + 0.1 * math.sin(2 * step)),
            "reward/mean": 0.4 + 0.05 * math.sin(5 * step),
            "train/skipped_updates": 0.0,
        }
        for step in range(1, steps + 1)
    ]
    rows[-1] |= {name.replace("__", "/"): value for name, value in last.items()}
    return rows


def bad(steps: int, first: int, f_tau: float = 0.2) -> Rows:
    """Rows whose F(2) is over its limit from step ``first`` on."""
    return [row | ({"mismatch/f_tau_2": f_tau} if row["step"] >= first else {}) for row in healthy(steps)]


def run_guard(tmp_path: Path, rows: Rows, *, since: int = 0, **config: Any) -> tuple[int | None, list[str]]:
    """Judge ``rows`` one after another as a run would; the step that ended it, and what was noted."""
    notes: list[str] = []
    guard = Guard(GuardConfig(**config), tmp_path, notes.append)
    guard.resume(since)
    for at, row in enumerate(rows):
        step = int(row["step"])
        if step <= since:
            continue
        guard.judge(step, row, rows[:at])
        try:
            guard.enforce(tmp_path / f"step-{step:06d}", lambda until: tmp_path / f"step-{until // 5 * 5:06d}")
        except GuardStop as error:
            return step, [*notes, str(error)]
    return None, notes


def events(directory: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (directory / "guard.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("rows", [healthy(120), [json.loads(line) for line in RECORDED.open()]], ids=["drawn", "real"])
def test_a_healthy_run_has_no_warning(tmp_path: Path, rows: Rows) -> None:
    assert run_guard(tmp_path, rows, stop_on="any", min_history=5, patience=1) == (None, [])
    assert not (tmp_path / "guard.jsonl").exists()


def test_a_collapse_warns_then_stops_and_names_what_crossed_which_limit(tmp_path: Path) -> None:
    """F(2) grows as before the paper's collapse, from below 1e-4 past 0.1."""
    rows = healthy(30)
    for row, f_tau in zip(rows[-6:], (1e-3, 0.02, 0.12, 0.2, 0.35, 0.5), strict=True):
        row["mismatch/f_tau_2"] = f_tau
    stopped, notes = run_guard(tmp_path, rows)
    assert stopped == 29
    limit = "mismatch/f_tau_2 is 0.35, above its limit 0.1 (guard.f_tau_2.above), 3 steps in a row"
    assert notes[0] == "guard, step 27: mismatch/f_tau_2 is 0.12, above its limit 0.1 (guard.f_tau_2.above)"
    assert notes[-1] == (
        f"{limit}; saved in {tmp_path}/step-000029: restart to continue from there, or fork "
        f"{tmp_path.parent}@25, from before it began"
    )
    found = events(tmp_path)
    assert [event["event"] for event in found] == ["warn", "warn", "warn", "stop"]
    assert [event["step"] for event in found] == [27, 28, 29, 29]
    limit = {"metric": "mismatch/f_tau_2", "kind": "absolute", "limit": 0.1, "key": "guard.f_tau_2.above"}
    first = limit | {"step": 27, "event": "warn", "value": 0.12, "side": "above", "steps": 1}
    assert found[0] == first | {"text": notes[0].partition(": ")[2]}


def test_one_good_step_ends_a_streak_and_a_step_without_the_metric_does_not(tmp_path: Path) -> None:
    rows = bad(12, 5)
    rows[6]["mismatch/f_tau_2"] = 0.0
    del rows[8]["mismatch/f_tau_2"]
    stopped, _ = run_guard(tmp_path, rows, patience=3)
    assert stopped == 11, "steps 8, (9), 10 and 11; 5 and 6 were before the good one"


@pytest.mark.parametrize(("action", "stopped"), [("off", None), ("warn", None), ("stop", 30)])
def test_the_action_decides(tmp_path: Path, action: Any, stopped: int | None) -> None:
    rows = healthy(30, mismatch__k3_kl=0.5)
    found, notes = run_guard(tmp_path, rows, action=action, patience=1)
    assert found == stopped
    assert bool(notes) == (action != "off")


def test_relative_limits_stop_a_run_only_with_stop_on_any(tmp_path: Path) -> None:
    rows = healthy(30, train__entropy=1e-3)
    assert run_guard(tmp_path / "a", rows, patience=1)[0] is None
    stopped, notes = run_guard(tmp_path / "b", rows, patience=1, stop_on="any")
    assert stopped == 30
    assert "train/entropy is 0.001, below its limit" in notes[0]
    assert "(guard.entropy.deviations)" in notes[0]


@pytest.mark.parametrize(
    ("change", "sides"),
    [
        ({"train__entropy": 8.0}, {("train/entropy", "above")}),
        ({"train__grad_norm": 50.0}, {("train/grad_norm", "above")}),
        ({"train__grad_norm": 1e-9}, set()),  # a vanishing gradient is no harm
        ({"reward__mean": 1.0}, set()),  # nor is success
        ({"reward__mean": -0.5}, {("reward/mean", "below")}),
        ({"mismatch__k3_kl": 0.05}, {("mismatch/k3_kl", "above")}),
        ({"mismatch__k3_kl": math.nan}, {("mismatch/k3_kl", "above")}),
        ({"reward__mean": -math.inf}, {("reward/mean", "above")}),
    ],
)
def test_only_harmful_sides_count(change: dict[str, float], sides: set[tuple[str, str]]) -> None:
    rows = healthy(40, **change)
    found = {(crossing.metric, crossing.side) for crossing in crossings(rows[-1], rows[:-1], GuardConfig())}
    assert found == sides


def test_a_relative_limit_waits_for_history() -> None:
    rows = healthy(9, train__entropy=1e-3)
    assert list(crossings(rows[-1], rows[:-1], GuardConfig(min_history=9))) == []
    assert len(list(crossings(rows[-1], rows[:-1], GuardConfig(min_history=8)))) == 1


@pytest.mark.parametrize(("window", "crossed"), [(20, 0), (120, 1)])
def test_only_the_window_is_history(window: int, crossed: int) -> None:
    rows = healthy(121)
    for row in rows[100:]:
        row["train/entropy"] *= 20
    assert len(list(crossings(rows[-1], rows[:-1], GuardConfig(window=window)))) == crossed


def test_a_resumed_run_counts_again_and_forgets_the_steps_that_it_repeats(tmp_path: Path) -> None:
    rows = bad(30, 21)
    assert [run_guard(tmp_path, rows, since=since)[0] for since in (0, 23, 21)] == [23, 26, 24]
    steps = [event["step"] for event in events(tmp_path)]
    assert steps == [21, 22, 23, 24, 24], "those after step 21 were written again"


def test_the_last_step_before_a_streak_is_known(tmp_path: Path) -> None:
    rows = bad(12, 10)
    guard = Guard(GuardConfig(action="warn"), tmp_path, lambda _: None)
    seen = []
    for at, row in enumerate(rows):
        guard.judge(at + 1, row, rows[:at])
        seen.append(guard.good_step)
    assert seen == [None] * 9 + [9, 9, 9]


def test_skipped_updates_are_limited(tmp_path: Path) -> None:
    rows = healthy(60)
    for at in (3, 20, 30, 56, 57, 58):
        rows[at]["train/skipped_updates"] = 1.0
    limits = {"action": "off", "window": 30, "max_skipped": 3}
    stopped, notes = run_guard(tmp_path, rows, **limits)
    assert stopped == 59
    assert "4 updates were skipped, more than guard.max_skipped=3" in notes[-1]
    assert run_guard(tmp_path, rows, **limits, since=57)[0] is None


def test_the_spike_limit_survives_a_resume(tmp_path: Path) -> None:
    rows = healthy(20)
    log = MetricsLog(tmp_path)
    for row in rows:
        values = {name: value for name, value in row.items() if name != "step"}
        log.append(int(row["step"]), values | ({"train/grad_norm": math.nan} if row["step"] == 5 else {}))
    config = GuardConfig(window=20, spike_factor=10.0)
    limit = spike_norm(log.rows, config)
    assert limit == pytest.approx(2.0, rel=0.2)
    assert spike_norm(read_metrics(tmp_path), config) == limit
    assert spike_norm(rows[:7], config) is None
    assert spike_norm(rows, GuardConfig(spike_factor=None)) is None


values = st.floats(min_value=1e-6, max_value=1e6)


@given(st.lists(values, min_size=8, max_size=60), st.floats(0.01, 100.0), st.floats(1.0, 20.0))
def test_the_band_scales_and_widens_with_the_deviations(history: list[float], scale: float, deviations: float) -> None:
    for logarithmic in (False, True):
        low, high = band(history, deviations, logarithmic=logarithmic)
        middle = sorted(history)[(len(history) - 1) // 2 : len(history) // 2 + 1]
        assert any(low <= value <= high for value in middle)
        scaled = band([value * scale for value in history], deviations, logarithmic=logarithmic)
        assert scaled == pytest.approx((low * scale, high * scale), rel=1e-6)
        wider = band(history, deviations + 1, logarithmic=logarithmic)
        assert wider[0] <= low
        assert wider[1] >= high


@given(st.lists(values, min_size=9, max_size=60), st.lists(st.floats(1e6, 1e30), max_size=4))
def test_a_few_wild_values_do_not_move_the_band_far(history: list[float], wild: list[float]) -> None:
    """Under half of the values can't carry the median or the MAD away: the band stays among the others' range."""
    low, high = band([*history, *wild], 1.0, logarithmic=False)
    reach = SIGMA_PER_MAD * (max(history) - min(history)) + 0.1 * max(history)
    assert min(history) - reach <= low <= high <= max(history) + reach


@given(st.lists(st.sampled_from([0.0, 0.2]), min_size=1, max_size=30), st.integers(0, 30), st.integers(1, 5))
def test_a_streak_is_the_run_of_bad_rows_at_the_end(f_tau: list[float], since: int, patience: int) -> None:
    rows = [{"step": float(at + 1), "mismatch/f_tau_2": value} for at, value in enumerate(f_tau)]
    counted = [value for at, value in enumerate(f_tau, 1) if at > since or at == len(f_tau)]
    expected = len(list(itertools.takewhile(bool, reversed(counted))))
    found = streaks(rows, GuardConfig(patience=patience), since=since)
    assert [crossing.steps for crossing in found] == ([expected] if expected else [])


def test_limits_are_read_from_the_config() -> None:
    config = GuardConfig(reward=LimitConfig(below=0.3, deviations=None))
    rows = healthy(30, reward__mean=0.2)
    (crossing,) = crossings(rows[-1], rows[:-1], config)
    assert str(crossing) == "reward/mean is 0.2, below its limit 0.3 (guard.reward.below)"
