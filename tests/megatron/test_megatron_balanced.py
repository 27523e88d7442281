"""Balanced experts compute what unbalanced ones do: bit for bit if experts only move, and closely if ranks share their
tokens. Every case is compared with the same layout without balancing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import layout_matrix as matrix
import megatron_tiny as tiny
import numpy as np
from support.rank_processes import place_of, reserved_port, run_ranks

from agent_rl.config import ParallelConfig

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

ALONE = {"distributed_optimizer": False}
EP2, EP4 = {"expert": 2, **ALONE}, {"expert": 4, **ALONE}
SHARED = {"expert": 2, "distributed_optimizer": True}
TENSOR, CONTEXT = {"tensor": 2, **EP2}, {"context": 2, **EP2}
PIPELINE, VIRTUAL = {"pipeline": 2, **EP2}, {"pipeline": 2, "virtual_pipeline": 2, **EP2}
FULL, MOE = {"recompute": "full"}, {"recompute": "selective", "recompute_modules": ["moe"]}
POOL = {"transfer": {"recompute": "pool", "update": "pool"}}
EXCHANGE = {"transfer": {"recompute": "exchange", "update": "exchange"}}
MODELS: dict[str, dict[str, Any]] = {
    "top-2": {},
    "top-4": {"num_experts": 16, "num_experts_per_tok": 4},
    "top-8": {"num_experts": 16, "num_experts_per_tok": 8},
    "wide": {"moe_intermediate_size": 1024},
    "shared": {"kind": "qwen2_moe", "head_dim": 8, "tied": False, "shared_expert_intermediate_size": 40},
}

Case = dict[str, Any]


def case(name: str, plan: str, model: str = "top-2", **rest: Any) -> Case:
    return {"name": name, "plan": plan, "model": model, **rest}


def both(name: str, **rest: Any) -> list[Case]:
    return [case(f"{name}-{plan}", plan, **rest) for plan in ("relocate", "replicate")]


OF_EP4 = [
    *both("ep4"),
    case("ep4-planned", "planned", model="top-4"),
    *both("ep4-crowded", routes="crowded"),
    *both("ep4-top8", model="top-8"),
]
OF_PIPELINE = [
    *both("pp2-ep2"),
    *both("pp2-full", options=FULL),
    case("fault-not-kept", "replicate", fault="not kept"),
]
OF_EP2 = [
    case("native", "none", routes="native"),
    *both("ep2"),
    case("ep2-planned", "planned"),
    *both("ep2-pool", config=POOL),
    *both("ep2-exchange", config=EXCHANGE),
    *both("ep2-full", options=FULL),
    *both("ep2-moe", options=MOE),
    *both("ep2-top4", model="top-4"),
    *both("ep2-top8", model="top-8"),
    *both("ep2-absent", routes="absent"),
    *both("ep2-crowded", routes="crowded"),
    *both("ep2-shared", model="shared"),
    case("ep2-bf16-relocate", "relocate", model="top-4", options={"dtype": "bfloat16"}),
    case("ep2-short", "replicate", short=True),
    case("ep2-memory", "replicate", model="wide", memory=True),
    case("fault-not-returned", "replicate", fault="not returned"),
    case("fault-stale", "replicate", fault="stale", config=POOL),
]
WORLDS: list[tuple[int, dict[str, Any], list[Case]]] = [
    (4, EP4, OF_EP4),
    (4, SHARED, both("dp4-ep2")),
    (4, TENSOR, both("tp2-ep2")),
    (4, CONTEXT, both("cp2-ep2")),
    (4, PIPELINE, OF_PIPELINE),
    (4, VIRTUAL, both("vpp2-ep2")),
    (2, EP2, OF_EP2),
]


def drawn_worlds(count: int, seed: int = 0) -> list[tuple[int, dict[str, Any], list[Case]]]:
    """Layouts of four ranks that are not among :data:`WORLDS`, each with a model and a recomputation, at random."""
    rng = np.random.default_rng(seed)
    sizes = {"tensor": (1, 2), "context": (1, 2), "pipeline": (1, 2), "virtual_pipeline": (1, 2), "expert": (2, 4)}
    choices = sizes | {"distributed_optimizer": (False, True)}
    layouts = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    known = [ParallelConfig(world_size=4, **layout) for size, layout, _ in WORLDS if size == 4]
    valid = [layout for layout in layouts if fits(layout) and ParallelConfig(world_size=4, **layout) not in known]
    worlds: list[tuple[int, dict[str, Any], list[Case]]] = []
    for number, index in enumerate(rng.permutation(len(valid))[:count].tolist()):
        model = str(rng.choice(["top-2", "top-4", "top-8", "shared"]))
        options = ({}, FULL, MOE)[rng.integers(3)]
        worlds.append((4, valid[index], both(f"drawn{number}", model=model, options=options)))
    return worlds


def fits(layout: dict[str, Any]) -> bool:
    """Whether four ranks have room for the layout, and Megatron supports it on the tiny model's four layers."""
    pipeline, virtual = layout["pipeline"], layout["virtual_pipeline"]
    dense = layout["tensor"] * layout["context"] * pipeline
    return (pipeline > 1 or virtual == 1) and 4 % dense == 0 and layout["expert"] * pipeline <= 4


UNSEEN = 11
"""Drawn layouts, which only ``pytest -m exhaustive`` runs."""
WORLDS += drawn_worlds(UNSEEN)
CASES = {found["name"]: (size, found) for size, _, cases in WORLDS for found in cases}
FAULTS = tuple(name for name in CASES if name.startswith("fault"))
ORDINARY = (
    "ep4-planned", "ep4-crowded-replicate", "pp2-ep2-relocate", "pp2-full-replicate", "native", "ep2-relocate",
    "ep2-planned", "ep2-pool-replicate", "ep2-exchange-relocate", "ep2-moe-replicate", "ep2-top8-replicate",
    "ep2-absent-replicate", "ep2-shared-replicate", "ep2-bf16-relocate", "ep2-short", "ep2-memory", *FAULTS,
)  # fmt: skip
"""The cases outside of ``pytest -m exhaustive``, which runs the others and these."""


def parameters(names: Iterable[str]) -> list[Any]:
    return [name if name in ORDINARY else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the results of four processes. The worlds of two ranks come last, in the first two processes:
    if they come first, the other worlds' first meeting takes 65 s instead of 24."""
    names = {*ORDINARY, *(name for (name,) in matrix.selected(request.session, __file__, "name"))}
    worlds = [(size, layout, [one for one in cases if one["name"] in names]) for size, layout, cases in WORLDS]
    worlds = [world for world in worlds if world[2]]
    directory = tmp_path_factory.mktemp("results")
    for name, changes in MODELS.items():
        tiny.make(directory / name, **changes)
    held, plans, plan = [reserved_port() for _ in worlds], [], directory / "plan.json"
    for holder, (size, parallel, cases) in zip(held, worlds, strict=True):
        located = [found | {"directory": str(directory / found["model"])} for found in cases]
        plans.append({"world_size": size, "place": place_of(holder), "parallel": parallel, "cases": located})
    plan.write_text(json.dumps(plans))
    worker = Path(__file__).with_name("balanced_worker.py")
    run_ranks(worker, 4, (directory, plan), held=held, megatron=True, seconds=400.0 if len(worlds) < UNSEEN else 1500.0)
    return directory


def plan_of(name: str) -> str:
    return str(CASES[name][1]["plan"])


def differences(results: Path, name: str) -> dict[str, float]:
    """The largest of all ranks'."""
    ranks = [json.loads((results / f"{name}-{rank}.json").read_text()) for rank in range(CASES[name][0])]
    return {kind: max(abs(rank[kind]) for rank in ranks) for kind in ranks[0]}


@pytest.mark.parametrize("name", parameters(name for name in CASES if name not in FAULTS))
def test_balanced_equals_unbalanced(name: str, results: Path) -> None:
    found = differences(results, name)
    assert (found.pop("borrowed") > 0) == (plan_of(name) != "none")
    shared = plan_of(name) in ("replicate", "planned")
    exact = {"logprobs", "routes", "losses", "fetched", "returned"} if shared else set(found)
    assert {kind: found[kind] for kind in exact} == dict.fromkeys(exact, 0.0)
    assert found["gradients"] <= 3e-6
    assert found["weights"] <= 1e-6


def test_an_update_takes_the_memory_of_two_layers_slots_at_most(results: Path) -> None:
    """One layer's borrowed weights, then their gradients, and the next layer's prefetched weights."""
    assert differences(results, "ep2-memory")["memory"] <= 2.0


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_transfer_is_detected(name: str, results: Path) -> None:
    found = differences(results, name)
    assert found["logprobs"] == 0
    assert max(found["gradients"], found["weights"]) >= 1e-3, found
