"""A critic has the same values, gradients and state in every parallel layout, and continues from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import critic_worker as worker
import numpy as np
import torch
from support.rank_processes import place_of, reserved_port, run_ranks

from agent_rl.config import RunConfig
from agent_rl.config.loader import install_model
from agent_rl.train.checkpoint.hf_export import export_checkpoint
from agent_rl.train.step_metrics import step_metrics

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.exhaustive]

CASES: dict[str, dict[str, Any]] = {
    "alone": {"world": 1},
    "resumed": {"world": 1, "resumes": "alone"},
    "expert": {"parallel": {"expert": 2}},
    "tensor": {"parallel": {"tensor": 2, "expert": 2}},
    "context": {"parallel": {"context": 2}},
    "virtual": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    "resumed-tensor": {"parallel": {"tensor": 2}, "resumes": "alone"},
    "lora": {"world": 1, "train": {"lora": {"rank": 8}}},
    "lora-resumed": {"world": 1, "train": {"lora": {"rank": 8}}, "resumes": "lora"},
}
LAYOUTS = ("expert", "tensor", "context", "virtual")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the results of two processes, which run all cases."""
    directory, held = tmp_path_factory.mktemp("critic"), [reserved_port() for _ in CASES]
    install_model(directory / "model")
    cases = [
        {"name": name, "place": place_of(holder), "world": 2, "parallel": {}, "train": {}, **case}
        for (name, case), holder in zip(CASES.items(), held, strict=True)
    ]
    plan = directory / "plan.json"
    plan.write_text(json.dumps({"model": str(directory / "model"), "cases": cases}))
    run_ranks(worker.__file__, 2, (directory, plan), held=held, megatron=True)
    return directory


def loaded(results: Path, name: str) -> list[dict[str, Any]]:
    world = CASES[name].get("world", 2)
    return [torch.load(results / f"{name}-{rank}.pt", weights_only=False) for rank in range(world)]


def metrics(ranks: list[dict[str, Any]], step: int) -> dict[str, float]:
    reports = [report for rank in ranks if (report := rank["steps"][step]["report"]) is not None]
    clip = RunConfig(name="test", model=Path("none")).train.clip
    values = step_metrics(reports, None, None, clip)
    return {name: value for name, value in values.items() if name.startswith(("critic/", "train/"))}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_values_gradients_and_state_of_one_rank(results: Path, layout: str) -> None:
    (alone,), ranks = loaded(results, "alone"), loaded(results, layout)
    for step in (0, 1):
        assert metrics(ranks, step) == pytest.approx(metrics([alone], step), rel=2e-4, abs=2e-6)
        assert all(rank["steps"][step]["differing"] == 0 for rank in ranks), "the routes of the rollout are replayed"
    for rank in ranks:
        for slot, tensor in alone["head"].items():
            torch.testing.assert_close(rank["head"][slot], tensor, rtol=1e-3, atol=2e-5)
            assert torch.equal(rank["head"][slot], ranks[0]["head"][slot]), "ranks agree on every bit"
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(("straight", "resumed"), [("alone", "resumed"), ("lora", "lora-resumed")])
def test_a_resumed_run_is_the_same_bit_for_bit(results: Path, straight: str, resumed: str) -> None:
    (first,), (again,) = loaded(results, straight), loaded(results, resumed)
    for key in ("loaded", "head", "weights"):
        assert first[key].keys() == again[key].keys()
        for name, tensor in first[key].items():
            assert torch.equal(again[key][name], tensor), f"{key} {name}"
    assert not torch.equal(first["loaded"]["master"], first["head"]["master"])
    seconds = (first["steps"][1]["report"].critic, again["steps"][0]["report"].critic)
    assert seconds[0] == seconds[1]


def test_another_layout_reads_the_state_of_the_value_head(results: Path) -> None:
    (alone,) = loaded(results, "alone")
    for rank in loaded(results, "resumed-tensor"):
        for slot, tensor in alone["loaded"].items():
            assert torch.equal(rank["loaded"][slot], tensor)


def test_an_export_has_no_value_head(results: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    config = RunConfig(name="test", model=results / "model")
    export_checkpoint(results / "alone", config, tmp_path / "export")
    names = [
        set(safe_open(next(each.glob("*.safetensors")), "np").keys()) for each in (tmp_path / "export", config.model)
    ]
    assert names[0] | {"lm_head.weight"} == names[1] | {"lm_head.weight"}
    assert np.all(["value_head" not in name for name in names[0]])
