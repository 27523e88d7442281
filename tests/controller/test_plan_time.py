"""`agent-rl plan --time`: predictions against recorded times, overrides, and corrections by a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent_rl.cli import app
from agent_rl.config.loader import load_config
from agent_rl.errors import UserError
from agent_rl.planner.assumptions import Assumptions, slowdown
from agent_rl.planner.known_models import planned_model
from agent_rl.planner.plan import TimePlan
from agent_rl.planner.planner import planned_device
from agent_rl.planner.recorded import predict_time
from agent_rl.planner.rollout_time import RolloutModel
from agent_rl.planner.step_time import plan_time
from agent_rl.planner.suggestions import make_plan

ROOT = Path(__file__).resolve().parents[2]
METRICS = ROOT / "tests" / "captured" / "quickstart" / "metrics.jsonl"
RECORDED = json.loads((ROOT / "tests" / "captured" / "phase_times.json").read_text())
DECODE_STEPS = {
    ("Qwen3-30B-A3B-Instruct-2507", 1): {8: 12.85, 16: 17.55, 32: 22.57, 64: 28.94},
    ("Qwen3-30B-A3B-Instruct-2507", 2): {8: 9.36, 32: 15.39, 64: 18.70, 128: 27.42, 256: 34.58, 512: 47.39},
    ("Qwen3-235B-A22B-Instruct-2507", 8): {8: 20.24, 32: 34.71, 64: 40.34, 128: 46.64, 192: 52.36},
}
"""Milliseconds between two tokens by running requests: medians of vLLM on H100s in bfloat16, task lm-arena-chat of
ML.ENERGY's leaderboard (github.com/ml-energy/leaderboard, public/data/tasks/lm-arena-chat.json)."""


def timed(name: str, *overrides: str, assume: tuple[str, ...] = ()) -> TimePlan:
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    device = planned_device(config.train, config.hardware)
    return plan_time(config, planned_model(config.model), device, Assumptions.of(config, device).overridden(assume))


def seconds(plan: TimePlan) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in (*plan.phases, *plan.outside)}


@pytest.mark.parametrize("name", RECORDED)
def test_phases_of_a_recorded_run_are_predicted_within_25_percent(name: str) -> None:
    recorded = RECORDED[name]
    plan = timed(recorded["config"], assume=("cores=2", f"trainer_threads={recorded['threads']}"))
    predicted = seconds(plan) | {"step": plan.step, "training": sum(phase.seconds for phase in plan.training)}
    predicted["update"] += predicted["optimizer"]
    ratios = {phase: predicted[phase] / took for phase, took in recorded["seconds"].items()}
    assert all(0.75 <= ratio <= 1.25 for ratio in ratios.values()), ratios


@pytest.mark.parametrize(("model", "gpus"), DECODE_STEPS)
def test_decode_steps_on_an_h100_are_predicted_within_25_percent(model: str, gpus: int) -> None:
    config = load_config(ROOT / "configs" / "paper-swe.yaml", [f"model=models/{model}", f"engine.gpus={gpus}"])
    assume = Assumptions.of(config, "cuda").overridden(["tokens=1200"])
    rollout = RolloutModel(config, planned_model(config.model), "cuda", assume)
    for running, took in DECODE_STEPS[model, gpus].items():
        assert 0.75 <= 1000 * rollout.decode_step(running) / took <= 1.25, running


def test_an_asynchronous_step_takes_as_long_as_the_slower_of_rollout_and_training() -> None:
    ahead = ("async_rollout.depth=1", "train.old_logprob.source=rollout")
    plan, slow = timed("paper-swe", *ahead), timed("paper-swe", *ahead, assume=("products=0.01",))
    training = sum(phase.seconds for phase in slow.training)
    assert plan.step == plan.rollout.seconds + plan.sync.seconds
    assert slow.step == training + slow.sync.seconds
    assert plan.rollout.seconds < timed("paper-swe").rollout.seconds, "no step waits for its longest episode"


def test_more_of_a_resource_takes_less_time() -> None:
    plan = timed("paper-swe")
    assert timed("paper-swe", "engine.count=8").rollout.seconds < plan.rollout.seconds
    assert timed("paper-swe", "hardware.gpu=B200 SXM").step < plan.step
    wider = seconds(timed("paper-swe", "train.parallel.world_size=64"))
    assert wider["update"] == pytest.approx(seconds(plan)["update"] / 2)
    assert plan.gpu_hours == pytest.approx(plan.hours * (32 + 16))


def test_slow_processors_take_longer_and_guesses_about_the_disk_stay() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", ())
    once = Assumptions.of(config, "cpu")
    twice, model = once.slowed(2.0), planned_model(config.model)
    fast, slow = (plan_time(config, model, "cpu", each) for each in (once, twice))
    assert slow.step == pytest.approx(2 * fast.step)
    assert twice["engine_layer"] == 2 * once["engine_layer"]
    assert (twice["disk"], twice["turns"], twice["batch_share"]) == (once["disk"], once["turns"], once["batch_share"])
    assert slowdown(0.01) > 0


def test_a_pipeline_that_fills_and_drains_takes_longer() -> None:
    flat, deep = (
        seconds(timed("paper-swe", "train.parallel.tensor=1", *more))["old log-probs"]
        for more in ((), ("train.parallel.pipeline=4",))
    )
    assert 1.05 * flat < deep < 2 * flat


def test_an_unknown_assumption_or_value_is_one_line() -> None:
    for setting, line in (
        ("speed=1", r"--assume speed=1: no assumption 'speed'; there are: turns, tokens"),
        ("turns=many", r"--assume turns=many: 'many' is not a number"),
        ("turns=-1", r"--assume turns=-1: must be finite and not negative"),
        ("turns=nan", r"--assume turns=nan: must be finite and not negative"),
    ):
        with pytest.raises(UserError, match=line):
            timed("quickstart", assume=(setting,))


def test_a_speed_of_zero_is_one_line() -> None:
    config = load_config(ROOT / "configs" / "paper-swe.yaml", ())
    for setting in ("products=0", "memory=0", "tokens=0"):
        with pytest.raises(UserError, match=r"^--assume: a speed, "):
            predict_time(make_plan(config), config, tokens=None, settings=(setting,), run=None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the metrics of six recorded steps."""
    (tmp_path / "metrics.jsonl").write_bytes(METRICS.read_bytes())
    (tmp_path / "config.yaml").write_text(f"base: {ROOT / 'configs' / 'quickstart.yaml'}\n")
    return tmp_path


def predicted(*overrides: str, run: Path) -> TimePlan:
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    plan = predict_time(make_plan(config), config, tokens=None, settings=(), run=run).time
    assert plan is not None
    return plan


def test_a_run_corrects_its_own_prediction_to_what_it_measured(run: Path) -> None:
    rows = [json.loads(line) for line in METRICS.read_text().splitlines()]
    plan = predicted(run=run)
    found = seconds(plan)
    for phase, metric in (("rollout", "time/rollout"), ("weight sync", "time/weight_sync")):
        assert found[phase] == pytest.approx(sum(row[metric] for row in rows) / len(rows))
    assert found["update"] + found["optimizer"] == pytest.approx(sum(row["time/update"] for row in rows) / len(rows))
    turns = next(each for each in plan.assumptions if each.name == "turns")
    assert turns.value == pytest.approx(sum(row["rollout/turns_mean"] for row in rows) / len(rows))
    assert turns.source == f"measured in {run}"
    assert found["evaluations"] > 2 * seconds(timed("quickstart"))["evaluations"], "the machine was busy"
    twice = seconds(predicted("rollout.tasks_per_step=24", run=run))
    assert twice["update"] == pytest.approx(2 * found["update"])


def test_a_run_without_finished_steps_is_one_line(tmp_path: Path) -> None:
    for content, line in (
        (None, "no step has ended yet"),
        ("", "no step has ended yet"),
        ("{\n", r"no readable metrics"),
    ):
        if content is not None:
            (tmp_path / "metrics.jsonl").write_text(content)
        with pytest.raises(UserError, match=line):
            predicted(run=tmp_path)


def test_the_command_prints_phases_totals_and_assumptions() -> None:
    runner, config = CliRunner(), str(ROOT / "configs" / "paper-swe.yaml")
    printed = runner.invoke(app, ["plan", config, "--time", "--assume", "turns=40"], env={"COLUMNS": "200"}).output
    assert re.search(
        r"^time: [\d,.]+ s a step; [\d,.]+ hours for 180 steps; [\d,]+ GPU hours on 48 GPUs$", printed, re.M
    )
    assert re.search(r"turns .* 40 .*--assume", printed)
    assert "time:" not in runner.invoke(app, ["plan", config]).output
    time = json.loads(runner.invoke(app, ["plan", config, "--time", "--json"]).output)["time"]
    assert time["gpu_hours"] == pytest.approx(48 * time["hours"])
