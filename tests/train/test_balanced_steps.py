"""Real GRPO steps on captured quickstart trajectories are the same with balanced experts as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import balanced_steps_worker as worker
import numpy as np
import torch
from support.rank_processes import place_of, reserved_port, run_ranks

from agent_rl.config import RunConfig
from agent_rl.config.loader import install_model
from agent_rl.monitoring.metrics import METRICS
from agent_rl.train.expert_balancing.report import FILE, balance_metrics
from agent_rl.train.ray_session import ray_cluster
from agent_rl.train.ray_trainer import RayTrainer
from r3.trace.check import check_dir

pytestmark = [pytest.mark.long, pytest.mark.megatron, pytest.mark.slow]

BALANCED = {"enabled": True, "slots": 2}
LAYOUTS: dict[str, dict[str, Any]] = {"ep4": {"expert": 4}, "ep2": {"expert": 2}}
KL = {"kl": {"coefficient": 0.1}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ep4": ("ep4", KL),
    "ep4-balanced": ("ep4", {"balance": BALANCED, **KL}),
    "ep2": ("ep2", {}),
    "ep2-balanced": ("ep2", {"balance": BALANCED}),
    "ep4-renewed": ("ep4", {"balance": BALANCED | {"ranks_per_node": 2}, **KL}),
    "ep2-renewed": ("ep2", {"balance": BALANCED | {"ranks_per_node": 1}}),
    "ep4-r2": ("ep4", {"replay": "r2"}),
    "ep4-r2-balanced": ("ep4", {"replay": "r2", "balance": BALANCED | {"transfer": {"update": "pool"}}}),
}
PAIRS = ("ep4", "ep2", "ep4-r2")
WORLD = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the results of four processes, which run all cases."""
    directory, held = tmp_path_factory.mktemp("steps"), [reserved_port() for _ in CASES]
    install_model(directory / "model")
    cases = [
        {"name": name, "place": place_of(holder), "parallel": LAYOUTS[layout], "train": train}
        for (name, (layout, train)), holder in zip(CASES.items(), held, strict=True)
    ]
    plan = directory / "plan.json"
    plan.write_text(json.dumps({"world_size": WORLD, "model": str(directory / "model"), "cases": cases}))
    run_ranks(worker.__file__, WORLD, (directory, plan), held=held, megatron=True)
    return directory


def loaded(results: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(results / f"{name}-{rank}.pt", weights_only=False) for rank in range(WORLD)]


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert list(found) == list(wanted)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("pair", PAIRS)
def test_balanced_steps_equal_unbalanced_ones(results: Path, pair: str) -> None:
    plain, balanced = loaded(results, pair), loaded(results, f"{pair}-balanced")
    assert {0, 1} <= {count for rank in plain for count in rank["steps"][1]["microbatches"]}, "uneven data ranks"
    for before, after in zip(plain, balanced, strict=True):
        for kind in ("old", "without_replay"):
            np.testing.assert_array_equal(after["steps"][0][kind], before["steps"][0][kind])
        assert after["steps"][0]["norms"][:1] == pytest.approx(before["steps"][0]["norms"][:1], rel=3e-6)
        for step, other in zip(before["steps"], after["steps"], strict=True):
            assert other["norms"] == pytest.approx(step["norms"], rel=3e-5)
            assert other["differing"] == 0 or pair == "ep4-r2", "r2 replays the trainer's own routes"
    assert_close(balanced[0]["weights"], plain[0]["weights"], 1e-5)


@pytest.mark.parametrize("pair", PAIRS)
def test_balancing_evens_the_load_and_moves_only_what_is_planned(results: Path, pair: str) -> None:
    reports = [rank["steps"][0]["balance"] for rank in loaded(results, f"{pair}-balanced")]
    metrics, of_groups = balance_metrics(reports), [report for report in reports if report.passes]
    assert metrics["balance/imbalance_before_mean"] > 1.1
    assert metrics["balance/imbalance_after_mean"] < 1.005
    assert len(of_groups) == (2 if pair == "ep2" else 1)
    kinds = ["update"] * 2 if pair == "ep4-r2" else ["recompute", "update", "update"]
    assert [one.kind for one in of_groups[0].passes] == kinds
    # An update fetches what it borrows forward and backward, and returns it once; all it fetches is planned.
    expert = 3 * 128 * 128 * 4
    lent = [one.borrowed.sum() * WORLD * expert / len(of_groups) for group in of_groups for one in group.passes]
    duplicates = [1 + (one.kind == "update") for group in of_groups for one in group.passes]
    assert metrics["balance/bytes_fetched"] == pytest.approx(float(np.dot(lent, duplicates)))
    assert metrics["balance/bytes_returned"] == pytest.approx(float(np.dot(lent, np.array(duplicates) - 1)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_renewed_placement_changes_only_where_experts_are(results: Path, layout: str) -> None:
    """Renewed in every step, as if moving took no time: in the second step, the moments of the first move too."""
    plain, renewed, balanced = (loaded(results, f"{layout}{name}") for name in ("", "-renewed", "-balanced"))
    for before, after in zip(plain, renewed, strict=True):
        for kind in ("old", "without_replay"):
            np.testing.assert_allclose(after["steps"][0][kind], before["steps"][0][kind], atol=1e-6)
        for step, other in zip(before["steps"], after["steps"], strict=True):
            assert other["norms"] == pytest.approx(step["norms"], rel=3e-5)
            assert other["differing"] == 0
    assert_close(renewed[0]["reloaded"], plain[0]["reloaded"], 0.0)
    assert_close(renewed[0]["weights"], plain[0]["weights"], 1e-5)
    for step in (0, 1):
        before, after = (
            balance_metrics([rank["steps"][step]["balance"] for rank in ranks]) for ranks in (balanced, renewed)
        )
        assert before["balance/bytes_moved"] == 0
        assert after["balance/bytes_moved"] > 0


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
async def test_checkpoints_move_between_balanced_and_unbalanced_runs(tmp_path: Path, ranks: int) -> None:
    """Through Ray, with renewed expert placements in the balanced run. R3 traces hold and rows are written. With four
    ranks two share an expert's optimizer state."""
    install_model(tmp_path / "model")
    parallel = {"world_size": ranks, "expert": 2, "distributed_optimizer": True}
    settings = {"device": "cpu", "microbatch_tokens": 1024, "lr": 3e-4, "mini_steps": 2, "parallel": parallel}
    renewed = BALANCED | {"ranks_per_node": 1}
    first, second = worker.captured(1), worker.captured(2)

    def open_trainer(name: str, **train: Any) -> RayTrainer:
        run = {"name": name, "model": tmp_path / "model", "runs_dir": tmp_path}
        run["r3"] = {"trace": {"steps": [2], "samples": 4, "microbatches": 8}}
        return RayTrainer(RunConfig.model_validate({**run, "train": {**settings, **train}}))

    with ray_cluster(None, cpus=ranks):  # the three trainers share it
        async with open_trainer("plain") as trainer:
            plain = await trainer.step(first, measure_without_replay=True, step=1)
            await trainer.save(tmp_path / "plain-checkpoint")
            await trainer.step(second, measure_without_replay=False, step=2)
            expected = np.concatenate(await trainer.logprobs(second, replay=True))
        async with open_trainer("balanced", balance=renewed) as trainer:
            balanced = await trainer.step(first, measure_without_replay=True, step=1)
            await trainer.load(tmp_path / "plain-checkpoint")
            await trainer.step(second, measure_without_replay=False, step=2)
            continued = np.concatenate(await trainer.logprobs(second, replay=True))
            await trainer.save(tmp_path / "balanced-checkpoint")
        async with open_trainer("again") as trainer:
            await trainer.load(tmp_path / "balanced-checkpoint")
            back = np.concatenate(await trainer.logprobs(second, replay=True))
    np.testing.assert_allclose(continued, expected, atol=1e-4)
    np.testing.assert_allclose(back, continued, atol=1e-6)
    mismatches = ("mismatch/k3_kl", "mismatch_without_replay/k3_kl", "mismatch_without_replay/router_mismatch")
    for name in (*mismatches, "r3/router_mismatch"):
        assert balanced[name] == pytest.approx(plain[name], rel=1e-5), name
    assert balanced.keys() - plain.keys() == {metric.name for metric in METRICS if metric.group == "balance"}
    for name in ("plain", "balanced"):
        report = check_dir(tmp_path / name / "r3_trace", require_forward_verify=True, require_shard_identity=True)
        assert report.holds, report.breaks
    rows = [json.loads(line) for line in (tmp_path / "balanced" / FILE).read_text().splitlines()]
    assert {(row["step"], row["pass"], row["number"]) for row in rows} == {
        (step, kind, number) for step in (1, 2) for number, kind in enumerate(["recompute", "update", "update"])
    }
    assert not (tmp_path / "plain" / FILE).exists()
