"""Every parallel layout, with and without recomputation, gives what one rank gives, and its routers use the given
experts: at every token and layer, in the forward pass and in the recomputation under the backward pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import megatron_tiny as tiny
import torch
from megatron_tiny import reserved_port

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

# Of two ranks.
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "expert": {"expert": 2},
    "expert-allgather": {"expert": 2, "dispatcher": "allgather"},
    "pipeline": {"pipeline": 2},
    "virtual": {"pipeline": 2, "virtual_pipeline": 2},
    "context": {"context": 2},
    "tensor": {"tensor": 2, "expert": 2},
    "tensor-alone": {"tensor": 2},
}
# The first runs the forward-only passes too.
RUNS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "moe": {"recompute": "selective", "recompute_modules": ["moe"]},
    "without-routers": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "dense-first": {"recompute": "full"},
}
DENSE_FIRST = ("without-routers", "dense-first")  # their layer 1 has no experts
ROUTERS_RERUN = ("full", "moe", "dense-first")
EVERYWHERE = ("none", "full")
MORE = {"virtual": ("moe", "dense-first"), "tensor": ("moe", "without-routers"), "context": ("dense-first",)}
CASES = [(layout, name) for layout in LAYOUTS for name in EVERYWHERE + MORE.get(layout, ())]
SPLIT = ("data", "expert", "expert-allgather")  # these ranks have micro-batches of their own, the others share all


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, checkpoint: tuple[Path, Any]) -> dict[str, Path]:
    """The model of every run."""
    dense = tmp_path_factory.mktemp("dense-first") / "model"
    tiny.make(dense, mlp_only_layers=[0])
    return dict.fromkeys(RUNS, checkpoint[0]) | dict.fromkeys(DENSE_FIRST, dense)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Path:
    """Two processes run all cases one after another and leave their results here."""
    folder, held = tmp_path_factory.mktemp("results"), list[Any]()

    def place() -> list[int]:
        """A port that stays ours until its world comes to it, and the socket that holds it."""
        held.append(reserved_port())
        return [held[-1].getsockname()[1], held[-1].fileno()]

    plan = [
        {
            "place": place(),
            "parallel": parallel,
            "runs": [
                {"name": f"{of}-{run}", "folder": str(folders[run]), "forward": run == "none", "options": RUNS[run]}
                for of, run in CASES
                if of == layout
            ],
        }
        for layout, parallel in LAYOUTS.items()
    ]
    resumed = {"name": "resumed", "folder": str(folders["none"]), "places": [place(), place()]}
    plan.append({"parallel": LAYOUTS["virtual"], "resume": resumed})
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "megatron_worker.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder), str(folder / "plan.json")],
            stderr=subprocess.PIPE,
            pass_fds=[] if rank else [socket.fileno() for socket in held],
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=240)
            assert rank.returncode == 0, errors.decode()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
        for socket in held:
            socket.close()
    return folder


@pytest.fixture(scope="module")
def alone(world: Any, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The same work on one rank, by run."""
    import megatron_worker as worker

    from agent_rl.config import ParallelConfig
    from agent_rl.train.megatron.model import PolicyModel

    found, items = {}, worker.batches()
    for name, options in RUNS.items():
        model = PolicyModel.build(folders[name], ParallelConfig(), device=torch.device("cpu"), **options)
        given = worker.routes(items, model.moe_layers)
        passes = worker.forward_passes(model, items, given, world) if name == "none" else {}
        found[name] = passes | worker.run(model, items, given, world)
    return found


def check_seen(run: str, ranks: list[dict[str, Any]], shared: bool) -> None:
    """All ranks' routers together were at every token and layer with the given experts, as often as they should."""
    for rank in ranks:
        assert rank["wrong"] == []
    for key in ("seen", "seen_r2"):
        for action in ("replay_forward", "replay_backward"):
            expected = action == "replay_forward" or run in ROUTERS_RERUN
            masks = [rank[key][action] for rank in ranks]
            pairs = zip(*masks, strict=True) if shared else ([mask] for rank in masks for mask in rank)
            together = [torch.stack(list(parts)).any(0) for parts in pairs]
            assert together
            for mask in together:
                assert bool(mask.all()) if expected else not bool(mask.any()), f"{key} {action}"


@pytest.mark.parametrize("run", RUNS)
def test_recomputation_on_one_rank(run: str, alone: dict[str, dict[str, Any]]) -> None:
    check_seen(run, [alone[run]], shared=True)
    assert alone[run]["grad_norm"] > 1  # so that it is clipped
    other = alone["dense-first" if run in DENSE_FIRST else "none"]
    for key, gradient in alone[run]["gradients"].items():
        torch.testing.assert_close(gradient, other["gradients"][key], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layout", "run"), CASES)
def test_layout_equals_one_rank(layout: str, run: str, results: Path, alone: dict[str, dict[str, Any]]) -> None:
    ranks, expected = [torch.load(results / f"{layout}-{run}-{rank}.pt") for rank in range(2)], alone[run]
    split = layout in SPLIT
    check_seen(run, ranks, shared=not split)
    for key in ("native", "entropy", "replayed", "crowded", "native_routes", "routes") if run == "none" else ():
        for rank, result in enumerate(ranks):
            wanted = expected[key][rank::2] if split else expected[key]
            assert len(result[key]) == len(wanted)
            for got, want in zip(result[key], wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert ranks[0]["sums"] == pytest.approx(expected["sums"][::2] if split else expected["sums"], abs=1e-4)
    assert [rank["grad_norm"] for rank in ranks] == pytest.approx([expected["grad_norm"]] * 2, rel=1e-5)
    for what in ("gradients", "weights"):
        assert ranks[1][what] == {}
        assert ranks[0][what].keys() == expected[what].keys()
        for key, tensor in ranks[0][what].items():
            wanted = expected[what][key]
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


def test_a_checkpoint_of_several_chunks_resumes_exactly(results: Path) -> None:
    for rank in range(2):
        straight, resumed = torch.load(results / f"resumed-{rank}.pt")
        assert len(straight) == 2
        for wanted, got in zip(straight, resumed, strict=True):
            assert wanted.keys() == got.keys()
            assert all(torch.equal(wanted[name], got[name]) for name in wanted if torch.is_tensor(wanted[name]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_checkpoint_loads_in_transformers(layout: str, results: Path, alone: dict[str, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(results / f"{layout}-none-hf", dtype=torch.float32).state_dict()
    for key, weight in alone["none"]["weights"].items():
        torch.testing.assert_close(loaded[key], weight, rtol=0, atol=1e-5)
