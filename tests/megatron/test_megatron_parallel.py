"""Every parallel layout gives what one rank gives: log-probs, entropy, routes, weights after a gradient step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import torch
from megatron_tiny import free_port

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

# name: tensor, pipeline, context, expert (of two ranks)
LAYOUTS = {
    "data": (1, 1, 1, 1),
    "expert": (1, 1, 1, 2),
    "pipeline": (1, 2, 1, 1),
    "context": (1, 1, 2, 1),
    "tensor": (2, 1, 1, 2),
    "tensor-alone": (2, 1, 1, 1),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, checkpoint: tuple[Path, Any]) -> Path:
    """Two processes run all layouts one after another and leave their results here."""
    folder = tmp_path_factory.mktemp("results")
    layouts = [f"{name}:{free_port()}:" + ":".join(map(str, sizes)) for name, sizes in LAYOUTS.items()]
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "megatron_worker.py")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(checkpoint[0]), str(folder), *layouts], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=240)
            assert rank.returncode == 0, errors.decode()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
    return folder


@pytest.fixture(scope="module")
def alone(world: Any, checkpoint: tuple[Path, Any]) -> dict[str, Any]:
    """The same work on one rank."""
    import megatron_worker as worker

    from agent_rl.config import ParallelConfig
    from agent_rl.train.megatron.model import PolicyModel

    items = worker.batches()
    model = PolicyModel.build(checkpoint[0], ParallelConfig(), device=torch.device("cpu"))
    return worker.run(model, items, worker.routes(items))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_rank(name: str, results: Path, alone: dict[str, Any]) -> None:
    ranks = [torch.load(results / f"{name}-{rank}.pt") for rank in range(2)]
    split = name in ("data", "expert")  # these ranks have micro-batches of their own; the others share all of them
    for key in ("native", "entropy", "replayed", "crowded", "native_routes", "routes"):
        for rank, result in enumerate(ranks):
            expected = alone[key][rank::2] if split else alone[key]
            assert len(result[key]) == len(expected)
            for got, want in zip(result[key], expected, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert ranks[0]["metrics"] == pytest.approx(alone["metrics"][::2] if split else alone["metrics"], abs=1e-4)
    assert [rank["grad_norm"] for rank in ranks] == pytest.approx([alone["grad_norm"]] * 2, rel=1e-4)
    assert alone["grad_norm"] > 1  # so that it is clipped
    assert ranks[1]["weights"] == {}
    assert ranks[0]["weights"].keys() == alone["weights"].keys()
    for key, weight in ranks[0]["weights"].items():
        torch.testing.assert_close(weight, alone["weights"][key], rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_saved_checkpoint_loads_in_transformers(name: str, results: Path, alone: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(results / f"{name}-hf", dtype=torch.float32).state_dict()
    for key, weight in alone["weights"].items():
        torch.testing.assert_close(loaded[key], weight, rtol=0, atol=1e-5)
