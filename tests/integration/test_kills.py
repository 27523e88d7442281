"""A run that is killed at chosen points and resumed equals an undisturbed run bit for bit.

``benchmarks/kill_runs.py`` takes many more points, at random.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
from killed_run import Life, broken, episodes, exact, settled, step_reached, step_saved, write_config
from marked import kill_rank
from support.journal_rows import read_journal

from agent_rl.config.loader import install_model
from agent_rl.controller.async_rollout.task_ledger import faults, gaps, read_ledger
from agent_rl.controller.config_changes import read_changes
from agent_rl.controller.fork import fork
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.viewer import runs as viewed
from agent_rl.viewer.index import Index

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]

EXHAUSTIVE = pytest.mark.exhaustive
STEPS = 4


@pytest.fixture(scope="module")
def lives() -> Iterator[list[Life]]:
    """Every start; none outlives the tests."""
    lives: list[Life] = []
    yield lives
    for life in lives:
        life.close()


@pytest.fixture(scope="module")
def live(lives: list[Life], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Life]:
    """Start or resume the run of a name."""
    directory = tmp_path_factory.mktemp("runs")
    install_model(directory / "model")

    def begin(name: str, *overrides: str) -> Life:
        write_config(directory / name, directory / "model", steps=STEPS, checkpoint_every=2)
        lives.append(Life(directory / name, *overrides))
        return lives[-1]

    return begin


@pytest.fixture(scope="module")
def reference(live: Callable[..., Life]) -> dict[int, dict[str, float]]:
    """The metrics of an undisturbed run by step."""
    return metrics_of(live("unkilled"))


def metrics_of(life: Life) -> dict[int, dict[str, float]]:
    assert life.finish() == 0, life.text
    return {int(row["step"]): exact(row) for row in read_metrics(life.run)}


def test_a_killed_run_resumes_bit_for_bit(
    lives: list[Life], live: Callable[..., Life], reference: dict[int, dict[str, float]]
) -> None:
    first = live("killed")
    run = first.run
    journal = run / "journal" / "step-000001.journal"
    assert first.until(lambda: len(read_journal(journal)) >= 3), first.text
    first.kill()
    assert step_saved(run) == 0

    second = live("killed")  # learns step 1 from the journal and the rest of it
    assert second.until(lambda: writing(run) or step_saved(run) == 2), second.text
    second.kill()
    assert "step 1: " in second.text
    assert "finished trajectories are in the journal" in second.text

    third = live("killed")
    assert third.until(lambda: len(read_metrics(run)) == 3), third.text
    third.kill()

    last = live("killed")
    assert metrics_of(last) == reference
    assert f"resuming from {run}/checkpoints/step-000002" in last.text
    assert len(reference) == STEPS
    assert any(row["train/updates"] for row in reference.values())
    check_finished(run, reference)
    assert len(episodes(run)) - len(set(episodes(run))) <= 3 * 8, "more was sampled again than was in flight"
    assert [left for life in lives for left in life.left()] == []


@pytest.mark.long
def test_a_dead_rank_is_restarted_within_the_run(
    live: Callable[..., Life], reference: dict[int, dict[str, float]]
) -> None:
    life = live("rank-killed")
    for stage in ("step 1: update ...", "step 2: checkpoint ..."):
        assert life.until(lambda stage=stage: stage in life.text), life.text
        kill_rank(life.mark)
    assert metrics_of(life) == reference
    assert life.text.count("a trainer rank died: ") == 2
    assert "starting the trainer again from the start: no checkpoint is complete yet (restart 1 of 3)" in life.text
    check_finished(life.run, reference)
    assert len(episodes(life.run)) == len(set(episodes(life.run))), "a finished episode was sampled again"
    assert life.left() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "steps"), [pytest.param(2, STEPS, id="2-of-4"), pytest.param(10, 20, id="10-of-20", marks=EXHAUSTIVE)]
)
def test_run_resumed_with_another_lr_equals_a_fork_bit_for_bit(live: Callable[..., Life], at: int, steps: int) -> None:
    first = live(f"lowered-{at}", f"train.steps={steps}")
    run = first.run
    assert first.until(lambda: len(read_metrics(run)) == at + 1), first.text
    first.kill()
    before = [exact(row) for row in read_metrics(run)]
    forked = fork(run, str(at), "forked", ["train.lr=1e-3"])

    rows = metrics_of(live(f"lowered-{at}", f"train.steps={steps}", "train.lr=1e-3"))
    assert Life(forked).finish() == 0
    assert rows == {int(row["step"]): exact(row) for row in read_metrics(forked)}
    assert [rows[step] for step in range(1, at + 1)] == before[:at], "the steps before the change stay"
    assert rows[at + 1]["train/lr"] == pytest.approx(before[at]["train/lr"] / 10)
    for weights in (f"checkpoints/step-{steps:06}/rank-00000.safetensors", "model/model.safetensors"):
        assert (run / weights).read_bytes() == (forked / weights).read_bytes()
    for each in (run, forked):
        assert faults(each, read_ledger(each)) == gaps(read_ledger(each)) == []
        (change,) = read_changes(each)
        assert change.text == f"after step {at}: train.lr 0.01 -> 0.001"
        assert f"config changed after step {at}: train.lr" in viewed.run(Index(each))["notes"]


@pytest.mark.exhaustive
def test_a_killed_run_that_samples_ahead_resumes_bit_for_bit(live: Callable[..., Life]) -> None:
    ahead = ("async_rollout.depth=1", "train.old_logprob.source=rollout")
    reference, draw = metrics_of(live("ahead-unkilled", *ahead)), random.Random(0)
    for _ in range(4):
        life = live("ahead-killed", *ahead)
        assert life.until(lambda life=life: "step 1: rollout ..." in life.text or resumed(life) > 0), life.text
        time.sleep(draw.uniform(0, 4))
        life.kill()
    last = live("ahead-killed", *ahead)
    killed = metrics_of(last)
    assert [settled(row) for row in killed.values()] == [settled(row) for row in reference.values()]
    assert faults(last.run, read_ledger(last.run)) == gaps(read_ledger(last.run)) == []
    assert os.listdir(last.run / "journal") == []
    assert len(episodes(last.run)) - len(set(episodes(last.run))) <= 4 * 8, "more was sampled again than was in flight"


KINDS = {
    # Single rollouts, sampled ahead, while the critic warms up and after. Every episode is trained.
    "critic": (
        ("train.baseline=critic", "train.advantage_scale=batch", "train.critic={warmup_steps: 1, coefficient: 0.1}",
         "rollout.group_size=1", "rollout.tasks_per_step=8", "async_rollout.depth=1",
         "train.old_logprob.source=rollout"),
        {"critic/warmup": [1.0, 0.0, 0.0, 0.0], "train/updates": [0.0, 2.0, 2.0, 2.0], "train/samples": [8.0] * 4},
    ),
    "distill": (
        ("train.distill={teacher: 'http://teacher', reward: 1.0}", "train.ema={decay: 0.5}"),
        {"train/samples": [12.0] * 4},
    ),
    "distill-top-k": (
        ("train.distill={teacher: 'http://teacher', top_k: 4}", "rollout.group_size=1", "rollout.tasks_per_step=8"),
        {"train/samples": [8.0] * 4},
    ),
    "turn-rewards-and-echo": (("train.turn_rewards={gamma: 0.9}", "train.echo={coefficient: 0.1}"), {}),
}  # fmt: skip
"""Overrides of a run by what it learns from, and what some metrics must be by step."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_of_another_kind_resumes_bit_for_bit(live: Callable[..., Life], kind: str) -> None:
    overrides, expected = KINDS[kind]
    overrides = (*overrides, "train.checkpoint_every=1")
    reference, draw = metrics_of(live(f"{kind}-unkilled", *overrides)), random.Random(0)
    assert {name: [row[name] for row in reference.values()] for name in expected} == expected
    for name in {"distill-top-k": ["distill/loss_kl"], "distill": ["distill/kl"]}.get(kind, []):
        assert all(row[name] for row in reference.values())
    for saved in (1, 2, 3):
        life = live(f"{kind}-killed", *overrides)
        assert life.until(lambda life=life, saved=saved: step_saved(life.run) >= saved), life.text
        time.sleep(draw.uniform(0, 2))
        life.kill()
    last = live(f"{kind}-killed", *overrides)
    assert [settled(row) for row in metrics_of(last).values()] == [settled(row) for row in reference.values()]
    states = [(run / "checkpoints/step-000004/rank-00000.safetensors").read_bytes()
              for run in (last.run, last.run.parents[1] / f"{kind}-unkilled" / "rec")]  # fmt: skip
    assert states[0] == states[1]


@pytest.mark.exhaustive
def test_a_run_of_two_ranks_survives_ten_random_deaths(live: Callable[..., Life]) -> None:
    pair = "train.parallel.world_size=2"
    reference, draw = metrics_of(live("two-unkilled", pair)), random.Random(0)
    life = live("two-killed", pair, "train.restarts=20")
    for death in range(10):
        assert life.until(lambda death=death: life.text.count("step 1: rollout ...") + resumed(life) > death), life.text
        time.sleep(draw.uniform(0, 4))
        if step_saved(life.run) == STEPS or life.ended:
            break
        kill_rank(life.mark, draw.randrange(2))
        assert life.until(lambda death=death: life.text.count("starting the trainer again") > death), life.text
    assert metrics_of(life) == reference
    check_finished(life.run, reference)
    assert life.left() == []


def resumed(life: Life) -> int:
    """How often it resumed from a checkpoint."""
    return life.text.count("resuming from")


@pytest.mark.exhaustive
def test_a_trainer_that_dies_too_often_ends_the_run(live: Callable[..., Life]) -> None:
    life = live("given-up", "train.restarts=0")
    assert life.until(lambda: "step 1: update ..." in life.text), life.text
    kill_rank(life.mark)
    assert life.finish() != 0
    assert "giving up: train.restarts is 0. The same command continues from there" in life.text


def check_finished(run: Path, reference: dict[int, dict[str, float]]) -> None:
    """The run is complete and has no unfinished files."""
    assert broken(run, reference, exact) == []
    assert step_saved(run) == STEPS
    assert os.listdir(run / "journal") == []


def writing(run: Path) -> bool:
    """Whether a checkpoint is being written at this moment."""
    return bool(list((run / "checkpoints").glob(".step-*.partial")))


@pytest.mark.long
def test_a_collapsed_run_saves_and_stops(live: Callable[..., Life]) -> None:
    """The recorded log-probs are random, so trainer and engine differ in every token."""
    life = live("collapsed", "guard.action=stop", "guard.patience=2", "train.checkpoint_every=5")
    assert life.finish() != 0
    last = life.text.strip().splitlines()[-1]
    assert last.startswith("agent_rl.errors.GuardStop: mismatch/k3_kl is ")
    assert "above its limit 0.1 (guard.k3_kl.above), 2 steps in a row; saved in" in last
    assert step_reached(life.run) == step_saved(life.run) == 2
    saved = life.run / "checkpoints" / "step-000002"
    checkpoint.verify(saved, checkpoint.read_manifest(saved))
    events = [orjson.loads(line) for line in (life.run / "guard.jsonl").read_bytes().splitlines()]
    assert {event["metric"] for event in events if event["event"] == "warn"} == {"mismatch/k3_kl", "mismatch/f_tau_2"}
    assert [event["step"] for event in events if event["event"] == "stop"] == [2]
    assert life.left() == []
