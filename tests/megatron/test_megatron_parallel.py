"""Every parallel layout, with and without recomputation, equals one rank, and its routers use the given experts at
every token and layer, in the forward pass and in recomputation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import layout_matrix as matrix
import megatron_tiny as tiny
import numpy as np
import torch
from layout_matrix import RUNS, TWO_RANKS
from support.checkpoint_pieces import whole_parameters, whole_part

from agent_rl.config import RunConfig
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.checkpoint.hf_export import export_checkpoint

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(1800)]

CASES = matrix.two_rank_cases()
Alone = dict[str, dict[str, Any]]
ORDINARY = {
    "data": ("none", "dense"),
    "data-optimizer": ("none", "bfloat16"),
    "expert-optimizer": ("none",),
    "expert-allgather": ("shared-expert",),
    "virtual": ("none", "full", "dense-first", "dense", "glm4-moe"),
    "context": ("glm-5", "gpt-oss", "qwen3-next"),
    "context-optimizer": ("none",),
    "context-expert": ("none",),
    "tensor": (
        *("full", "moe", "without-routers", "shared-expert", "glm4-moe", "glm-5", "gpt-oss", "ernie4-5-moe", "olmoe"),
        "qwen3.5",
    ),
    "tensor-optimizer": ("none",),
}
"""The cases of an ordinary run; ``pytest -m exhaustive`` runs the others and these."""
RESUMED = ("virtual", "virtual", "tensor-alone", "data-optimizer", "expert-optimizer")
"""The first writes a checkpoint; all others resume from it."""


def parameters(cases: Iterable[tuple[str, str]]) -> list[Any]:
    """``(layout, run)``; those that are not ordinary are exhaustive."""
    marks = {True: [], False: [pytest.mark.exhaustive]}
    return [pytest.param(layout, run, marks=marks[run in ORDINARY.get(layout, ())]) for layout, run in cases]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model of every run."""
    return matrix.directories(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, directories: dict[str, Path]
) -> Path:
    """The directory with the results of two processes, which run all cases."""
    directory = tmp_path_factory.mktemp("results")
    layouts = [TWO_RANKS[name] for name in RESUMED]
    resume = {"name": "resumed", "directory": str(directories["none"]), "layouts": layouts}
    chosen = matrix.selected(request.session, __file__, "layout", "run")
    cases = [case for case in CASES if case[1] in ORDINARY.get(case[0], ()) or case in chosen]
    worlds = {layout: TWO_RANKS[layout] for layout, _ in cases}
    matrix.launch(2, worlds, cases, directories, directory, resume, seconds=40.0 + 10 * len(cases))
    return directory


@pytest.fixture(scope="module")
def alone(world: Any, directories: dict[str, Path]) -> Alone:
    """The same work on one rank, by run."""
    return matrix.alone(RUNS, directories, world)


def check_seen(run: str, ranks: list[dict[str, Any]]) -> None:
    """The routers of all ranks together used the given experts at every token and layer, the right number of times."""
    for rank in ranks:
        assert rank["wrong"] == []
    for key in ("seen", "seen_r2"):
        for action in ("replay_forward", "replay_backward"):
            expected = action == "replay_forward" or run in matrix.ROUTERS_RERUN
            of_data: dict[int, list[list[torch.Tensor]]] = {}
            for rank in ranks:
                of_data.setdefault(rank["place"][0], []).append(rank[key][action])
            together = [torch.stack(parts).any(0) for shared in of_data.values() for parts in zip(*shared, strict=True)]
            assert together
            for mask in together:
                assert bool(mask.all()) if expected else not bool(mask.any()), f"{key} {action}"


@pytest.mark.parametrize("run", [name for name, run in RUNS.items() if "dtype" not in run.options])
def test_recomputation_on_one_rank_changes_no_gradient(run: str, alone: Alone) -> None:
    if RUNS[run].routed:
        check_seen(run, [alone[run]])
    assert alone[run]["grad_norms"][0] > 1  # so that it is clipped
    like = next(name for name, other in RUNS.items() if other.model == RUNS[run].model)
    for key, gradient in alone[run]["gradients"].items():
        torch.testing.assert_close(gradient, alone[like]["gradients"][key], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layout", "run"), parameters(CASES))
def test_layout_equals_one_rank(layout: str, run: str, results: Path, alone: Alone) -> None:
    ranks, expected = matrix.loaded(results, f"{layout}-{run}", 2), alone[run]
    if RUNS[run].routed:
        check_seen(run, ranks)
    apart = matrix.differences(ranks, expected)
    wanted = {"loss", "grad_norm", "gradients", "weights"}
    if run in matrix.FORWARD:
        wanted |= {"logprobs", "entropy"} | ({"routes"} if run == "none" else set())
    assert apart.keys() == wanted
    assert max(apart.values()) <= RUNS[run].limit, apart
    assert ranks[1]["weights"] == {}
    assert all(rank.get("restored", []) == [] for rank in ranks)


@pytest.mark.parametrize("layout", ["data", "expert", "context", "tensor"])
def test_a_distributed_optimizer_is_held_once(layout: str, results: Path, alone: Alone) -> None:
    held = [rank["state_numel"] for rank in matrix.loaded(results, f"{layout}-optimizer-none", 2)]
    whole = alone["none"]["state_numel"]
    if layout == "tensor":  # every tensor rank holds the norms and routers
        assert whole < sum(held) < 1.03 * whole
    else:
        assert sum(held) == whole
    assert max(held) / sum(held) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("number", range(1, len(RESUMED)), ids=RESUMED[1:])
def test_a_checkpoint_of_several_chunks_resumes_in_every_layout(number: int, results: Path) -> None:
    straight, resumed = (torch.load(results / f"resumed-{which}.pt") for which in (0, number))
    assert straight.keys() == resumed.keys()
    tolerance = 0.0 if RESUMED[number] == RESUMED[0] else 1e-5
    for name, wanted in straight.items():
        torch.testing.assert_close(resumed[name], wanted, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("number", range(1, len(RESUMED)), ids=RESUMED[1:])
def test_another_layout_holds_the_same_state_bit_for_bit(number: int, results: Path) -> None:
    written, loaded = (checkpoint.read_manifest(results / name) for name in ("resumed", f"resumed-{number}"))
    assert loaded.counts == written.counts
    assert loaded.updates == written.updates == 1
    ours, theirs = (whole_state(results / name) for name in (f"resumed-{number}", "resumed"))
    assert ours.keys() == theirs.keys()
    assert {slot for _, slot in ours} == {"master", "exp_avg", "exp_avg_sq"}
    for key, values in theirs.items():
        np.testing.assert_array_equal(ours[key].view(np.int32), values.view(np.int32), err_msg=str(key))
        assert values.any(), f"{key}: still zero"


@pytest.mark.parametrize("number", range(1, len(RESUMED)), ids=RESUMED[1:])
def test_the_export_of_a_checkpoint_is_the_same_in_every_layout(
    number: int, results: Path, directories: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config, models = RunConfig(name="test", model=directories["none"]), []
    for source in ("resumed", f"resumed-{number}"):
        export_checkpoint(results / source, config, tmp_path / source)
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / source, dtype=torch.float32).state_dict())
    start = AutoModelForCausalLM.from_pretrained(directories["none"], dtype=torch.float32).state_dict()
    assert models[0].keys() == models[1].keys() == start.keys()
    for name, weight in models[0].items():
        assert torch.equal(models[1][name], weight), name
        assert not torch.equal(start[name], weight), f"{name}: not trained"


def whole_state(directory: Path) -> dict[tuple[str, str], Any]:
    """Every tensor of a checkpoint in full, flat, by parameter and slot."""
    manifest = checkpoint.read_manifest(directory)
    checkpoint.verify(directory, manifest)
    reader = checkpoint.open_pieces(directory, manifest)
    keys = itertools.product(whole_parameters(reader), ("master", "exp_avg", "exp_avg_sq"))
    return {(part.name, slot): reader.read(whole_part(part), slot) for part, slot in keys}


@pytest.mark.parametrize(("layout", "run"), parameters(case for case in CASES if case[1] in matrix.FORWARD))
def test_a_saved_checkpoint_loads_in_transformers(layout: str, run: str, results: Path, alone: Alone) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(results / f"{layout}-{run}-hf", dtype=torch.float32)
    loaded = tiny.checkpoint_tensors(model, model.state_dict())
    for key, weight in alone[run]["weights"].items():
        torch.testing.assert_close(loaded[key], weight, rtol=0, atol=1e-5)
