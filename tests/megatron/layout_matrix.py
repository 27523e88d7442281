"""Layouts of two ranks and the runs in them (model, recomputation, precision), compared with one rank."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import pytest
import torch
from support.model_sizes import (
    DEEPSEEK_V3_SIZES,
    DELTA_SIZES,
    ERNIE4_5_MOE_SIZES,
    GLM4_MOE_SIZES,
    GPT_OSS_SIZES,
    INDEXER_SIZES,
    NEMOTRON_H_SIZES,
)
from support.rank_processes import place_of, reserved_port, run_ranks
from torch import Tensor

REPLICATED = {"distributed_optimizer": False}
SHARED = {"distributed_optimizer": True}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "data": REPLICATED,
    "data-optimizer": SHARED,
    "expert": {"expert": 2, **REPLICATED},
    "expert-optimizer": {"expert": 2, **SHARED},
    "expert-allgather": {"expert": 2, "dispatcher": "allgather", **REPLICATED},
    "pipeline": {"pipeline": 2},
    "virtual": {"pipeline": 2, "virtual_pipeline": 2},
    "context": {"context": 2, **REPLICATED},
    "context-optimizer": {"context": 2, **SHARED},
    "context-expert": {"context": 2, "expert": 2, **SHARED},
    "tensor": {"tensor": 2, "expert": 2},
    "tensor-alone": {"tensor": 2, **REPLICATED},
    "tensor-optimizer": {"tensor": 2, **SHARED},
}
"""``train.parallel`` of two ranks."""


@dataclass(frozen=True, slots=True)
class Run:
    """Changes of the tiny model, options of ``PolicyModel.build``, the number of updates, and the largest difference
    from one rank."""

    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    updates: int = 1
    limit: float = 1e-5

    @property
    def routed(self) -> bool:
        """Whether the model has experts."""
        return self.model.get("kind") != "qwen3"


_DENSE_FIRST = {"mlp_only_layers": [0]}
_DENSE = {"kind": "qwen3", "tied": False}
_SHARED_EXPERT = {"kind": "qwen2_moe", "head_dim": 8, "tied": False, "shared_expert_intermediate_size": 40}
_GLM4_MOE = GLM4_MOE_SIZES | {"kind": "glm4_moe", "tied": False}
_GPT_OSS = GPT_OSS_SIZES | {"kind": "gpt_oss", "tied": False, "initializer_range": 0.2}
_ERNIE4_5_MOE = ERNIE4_5_MOE_SIZES | {"kind": "ernie4_5_moe", "initializer_range": 0.2}
_DEEPSEEK_V3 = DEEPSEEK_V3_SIZES | {"kind": "deepseek_v3", "tied": False}
_DEEPSEEK_V32 = DEEPSEEK_V3_SIZES | INDEXER_SIZES | {"kind": "deepseek_v32", "tied": False}
_GLM_5 = DEEPSEEK_V3_SIZES | INDEXER_SIZES | {"kind": "glm_moe_dsa", "tied": False, "indexer_rope_interleave": True}
_MINIMAX_M2 = {"kind": "minimax_m2", "tied": False, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8}
_MIXTRAL = {"kind": "mixtral", "tied": False, "head_dim": None, "num_local_experts": 8, "num_experts_per_tok": 2}
_OLMOE = {"kind": "olmoe", "tied": False, "head_dim": None, "moe_intermediate_size": None, "num_key_value_heads": 4}
_QWEN3_NEXT = DELTA_SIZES | {"kind": "qwen3_next", "tied": False, "initializer_range": 0.2}
_QWEN3_NEXT |= {"published": tiny.DELTA_KEYS}
_QWEN3_5 = _QWEN3_NEXT | {"kind": "qwen3_5_moe_text"}
_NEMOTRON_H = NEMOTRON_H_SIZES | {"kind": "nemotron_h", "tied": False, "initializer_range": 0.2}
_NEMOTRON_H |= {"published": tiny.MAMBA_KEYS}
RUNS: dict[str, Run] = {
    "none": Run(updates=2),
    "full": Run(options={"recompute": "full"}),
    "moe": Run(options={"recompute": "selective", "recompute_modules": ["moe"]}),
    "without-routers": Run(_DENSE_FIRST, {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}),
    "three-layers": Run({"num_hidden_layers": 3}, {"recompute": "full"}),
    "dense-first": Run(_DENSE_FIRST, {"recompute": "full"}),
    "dense": Run(_DENSE, updates=2),
    "dense-full": Run(_DENSE, {"recompute": "full"}),
    "shared-expert": Run(_SHARED_EXPERT, {"recompute": "full"}),
    "glm4-moe": Run(_GLM4_MOE, {"recompute": "full"}),
    "gpt-oss": Run(_GPT_OSS, {"recompute": "full"}),
    "gpt-oss-core": Run(_GPT_OSS, {"recompute": "selective", "recompute_modules": ["core_attn"]}),
    "ernie4-5-moe": Run(_ERNIE4_5_MOE, {"recompute": "full"}),
    "deepseek-v3": Run(_DEEPSEEK_V3, {"recompute": "full"}),
    # Kimi-K2, which transformers does not have, is a DeepSeek-V3 without groups of experts.
    "kimi-k2": Run(_DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1}, {"recompute": "full"}),
    "deepseek-v32": Run(_DEEPSEEK_V32, {"recompute": "selective", "recompute_modules": ["core_attn"]}),
    "glm-5": Run(_GLM_5, {"recompute": "selective", "recompute_modules": ["core_attn"]}),
    "minimax-m2": Run(_MINIMAX_M2, {"recompute": "full"}),
    "mixtral": Run(_MIXTRAL, {"recompute": "full"}),
    "olmoe": Run(_OLMOE, {"recompute": "full"}),
    # The norms of queries, keys and outputs of the delta rule amplify rounding: gradients of up to 8 differ by 3e-4.
    "qwen3-next": Run(_QWEN3_NEXT, {"recompute": "selective", "recompute_modules": ["core_attn", "moe"]}, limit=5e-4),
    "qwen3.5": Run(_QWEN3_5, {"recompute": "full"}, limit=5e-4),
    "nemotron-h": Run(_NEMOTRON_H, {"recompute": "selective", "recompute_modules": ["core_attn", "moe"]}, limit=5e-4),
    # One update only: a weight that is rounded differently changes all later ones.
    "bfloat16": Run(options={"dtype": "bfloat16"}),
}
_WITHOUT_RERUN = ("none", "dense", "dense-full", "without-routers", "gpt-oss-core", "deepseek-v32", "glm-5", "bfloat16")
ROUTERS_RERUN = tuple(name for name in RUNS if name not in _WITHOUT_RERUN)
FORWARD = ("none", "dense")
"""The runs with passes without gradients, which also save their model."""


def two_rank_cases() -> list[tuple[str, str]]:
    """``(layout, run)``. A distributed optimizer changes nothing before the update, so fewer runs have one."""
    more = {
        "data": "dense",
        "data-optimizer": "bfloat16",
        "pipeline": "dense dense-full three-layers shared-expert glm4-moe deepseek-v3 kimi-k2 deepseek-v32 glm-5 "
        "gpt-oss ernie4-5-moe minimax-m2 mixtral olmoe qwen3-next qwen3.5 nemotron-h",
        "expert": "shared-expert glm4-moe deepseek-v3 kimi-k2 deepseek-v32 glm-5 gpt-oss ernie4-5-moe minimax-m2 "
        "mixtral olmoe qwen3-next qwen3.5 nemotron-h",
        "expert-allgather": "shared-expert",
        "virtual": "glm4-moe deepseek-v3 ernie4-5-moe moe dense-first shared-expert dense dense-full",
        "context": "shared-expert glm4-moe deepseek-v3 kimi-k2 deepseek-v32 glm-5 gpt-oss ernie4-5-moe minimax-m2 "
        "mixtral olmoe dense-first dense qwen3-next qwen3.5",
        "tensor": "glm4-moe deepseek-v3 kimi-k2 deepseek-v32 glm-5 gpt-oss gpt-oss-core ernie4-5-moe minimax-m2 "
        "mixtral olmoe qwen3-next qwen3.5 moe nemotron-h without-routers shared-expert",
        "tensor-alone": "dense dense-full",
    }
    return [
        (name, run)
        for name, parallel in TWO_RANKS.items()
        for run in ("none", "full", *more.get(name, "").split())
        if run != "full" or not parallel.get("distributed_optimizer")
    ]


def selected(session: pytest.Session, file: str, *names: str) -> set[tuple[Any, ...]]:
    """The values of the parameters ``names`` of all tests of ``file`` that the session runs."""
    items = [item for item in session.items if item.path == Path(file)]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {tuple(values[name] for name in names) for values in params if set(names) <= values.keys()}


def directories(base: Path) -> dict[str, Path]:
    """The checkpoint of every run, made in ``base``."""
    first = {json.dumps(run.model): name for name, run in reversed(RUNS.items())}
    found = {name: base / first[json.dumps(run.model)] for name, run in RUNS.items()}
    for name, directory in found.items():
        if not directory.exists():
            tiny.make(directory, **RUNS[name].model)
    return found


def case(name: str, run: str, models: dict[str, Path], results: Path, *, restores: bool = False) -> dict[str, Any]:
    """A case for the worker; it saves its model where it runs the forward passes."""
    of_run = {"directory": str(models[run]), "options": RUNS[run].options, "updates": RUNS[run].updates}
    saves = str(results / f"{name}-hf") if run in FORWARD else None
    return {"name": name, **of_run, "forward": run in FORWARD, "saves": saves, "restores": restores}


def launch(
    world_size: int,
    layouts: dict[str, dict[str, Any]],
    cases: Sequence[tuple[str, str]],
    models: dict[str, Path],
    results: Path,
    resume: dict[str, Any] | None = None,
    *,
    seconds: float = 280.0,
) -> None:
    """Runs all ``cases`` in processes, one case after another; results are ``<layout>-<run>-<rank>.pt``.

    With a distributed optimizer the restored state is checked too. ``resume``, if given, comes last: ``{name,
    directory, layouts}``, see the worker. All of it may take ``seconds``.
    """
    held: list[socket.socket] = []

    def place() -> tuple[int, int]:
        held.append(reserved_port())
        return place_of(held[-1])

    worlds: list[dict[str, Any]] = []
    for layout, parallel in layouts.items():
        restores, mine = parallel.get("distributed_optimizer", False), [run for of, run in cases if of == layout]
        made = [case(f"{layout}-{run}", run, models, results, restores=restores and run != "full") for run in mine]
        worlds.append({"place": place(), "parallel": parallel, "cases": made})
    if resume is not None:
        resume = resume | {"world_size": world_size, "places": [place() for _ in resume["layouts"]]}
    plan = results / "plan.json"
    plan.write_text(json.dumps({"world_size": world_size, "worlds": worlds, "resume": resume}))
    worker = Path(__file__).with_name("megatron_worker.py")
    run_ranks(worker, world_size, (results, plan), held=held, megatron=True, seconds=seconds)


def alone(names: Iterable[str], models: dict[str, Path], world: Any) -> dict[str, dict[str, Any]]:
    """The same work on one rank (this process, in ``world``), by run."""
    import megatron_worker as worker

    from agent_rl.config import ParallelConfig

    cases = {name: case(name, name, models, Path()) | {"saves": None} for name in names}
    return {name: worker.of_case(each, ParallelConfig(), world) for name, each in cases.items()}


def loaded(results: Path, name: str, world_size: int) -> list[dict[str, Any]]:
    """What every rank of a case gave."""
    return [torch.load(results / f"{name}-{rank}.pt") for rank in range(world_size)]


def differences(ranks: Sequence[dict[str, Any]], expected: dict[str, Any]) -> dict[str, float]:
    """The largest absolute difference of any number from one rank's, by kind.

    Losses, log-probs, entropies and routes of every rank are those of its own micro-batches. ``gradients``: of the
    first update; where the optimizer is shared out, as its first moment divided by (1 - beta1). The gradient norm's
    difference is relative.
    """
    found: dict[str, float] = {}

    def add(kind: str, got: Tensor, want: Tensor, scale: float = 1.0) -> None:
        assert got.shape == want.shape, f"{kind}: {tuple(got.shape)}, on one rank {tuple(want.shape)}"
        apart = float((got.double() - want.double()).abs().max()) * scale if got.numel() else 0.0
        found[kind] = max(found.get(kind, 0.0), apart)

    kinds = {"native": "logprobs", "replayed": "logprobs", "crowded": "logprobs", "entropy": "entropy"}
    for rank in ranks:
        mine = slice(rank["place"][0], None, rank["place"][1])
        for got, want in zip(rank["losses"], expected["losses"], strict=True):
            add("loss", torch.tensor(got), torch.tensor(want[mine]))
        for key, kind in (kinds | {"routes_without_replay": "routes", "routes": "routes"}).items():
            if key in rank:
                for got, want in zip(rank[key], expected[key][mine], strict=True):
                    add(kind, got, want)
        norms = torch.tensor(rank["grad_norms"]) / torch.tensor(expected["grad_norms"])
        add("grad_norm", norms, torch.ones_like(norms))
    state = (("gradients", "gradients", 1.0), ("exp_avg", "gradients", 10.0), ("weights", "weights", 1.0))
    for key, kind, scale in state:
        if key in ranks[0]:
            assert ranks[0][key].keys() == expected[key].keys()
            for name, tensor in ranks[0][key].items():
                add(kind, tensor, expected[key][name], scale)
    return found
