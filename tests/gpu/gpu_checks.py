"""What is tried on GPUs, in order, and what of it was expected: by the plan, by the CPU, or by another check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agent_rl.config import RunConfig
from agent_rl.models.spec import read_model_spec
from agent_rl.planner.memory_model import rank_bytes
from agent_rl.planner.plan import GIB

ProbeResponses = Sequence[Mapping[str, Any]]
"""What the ranks of a check gave, by rank."""

RESUMED, FLOAT32, OFFLOADED = 1e-2, 1e-3, 1e-6
"""Largest differences: of a gradient norm after a checkpoint (relative; sums on a GPU have no fixed order), of a
log-prob in float32 from the CPU's, and of all weights' sum with the optimizer's state on the host (relative)."""
GROUP_SECONDS = 20.0
"""Longest time to make a group of a weight sync, and to abort it where an engine hangs in a broadcast."""
PLAN_OVER = (0.9, 1.15)
"""The planned memory over what was measured: the least and the most."""


@dataclass(frozen=True)
class Row:
    """A line of the table; ``good`` is None where nothing was expected."""

    check: str
    what: str
    found: str
    expected: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class Check:
    """``work`` of :mod:`gpu_rank` on ``gpus`` ranks, with ``changes`` of the config's train section. ``devices``: run
    so often, on the GPUs or on the CPU. ``wide``: on the wide model. ``environment``: variables of its ranks."""

    name: str
    work: str
    rows: Callable[[Outcome], Iterator[Row]]
    gpus: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("gpu",)
    wide: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a check gave: ``answers`` by device and rank; ``directory`` has the ranks' files. ``before``: rank 0's
    answers of the checks that were done before, by name."""

    check: Check
    config: RunConfig
    device: str
    answers: Mapping[str, ProbeResponses]
    directory: Path
    before: Mapping[str, Mapping[str, Any]]

    @property
    def first(self) -> Mapping[str, Any]:
        return self.answers["gpu"][0]

    def row(self, what: str, found: str, expected: str = "", good: bool | None = None) -> Row:
        return Row(self.check.name, what, found, expected, good)


def kernels(outcome: Outcome) -> Iterator[Row]:
    for name, dtype, fault in outcome.first["rows"]:
        # Not every kernel takes float32 on a GPU: where one does not, the next is taken.
        good = None if fault and dtype == "float32" else fault is None
        yield outcome.row(f"{name}, {dtype}", fault or "right", "right", good)
    for name, tokens, rate in outcome.first["rates"]:
        found = "it raised" if rate is None else f"{rate:.3g} TFLOP/s"
        yield outcome.row(f"{name}, {tokens} tokens forward and backward", found)


def steps(outcome: Outcome) -> Iterator[Row]:
    config, answers = outcome.config, outcome.answers["gpu"]
    for note in outcome.first["notes"]:
        yield outcome.row("note", note)
    differ = sum(one["differ"] for one in answers)
    replayed = config.train.replay != "off"
    expected = ("0", differ == 0) if replayed else ("above 0, which shows that replay acts", differ > 0)
    yield outcome.row("routers that left the given experts", str(differ), *expected)
    finite = all(one["finite"] for one in answers)
    yield outcome.row("loss and gradient norm", "finite" if finite else "not finite", "finite", finite)
    peak = max(one["peak"] for one in answers)
    if peak:
        model_spec, parallel = read_model_spec(config.model), config.train.parallel
        planned = rank_bytes(model_spec, config.train, microbatches=parallel.pipeline, device="cuda").total
        good = PLAN_OVER[0] <= planned / peak <= PLAN_OVER[1]
        yield outcome.row("peak memory, GiB", f"{peak / GIB:.2f}", f"{planned / GIB:.2f} planned", good)
        reserved = max(one["reserved"] for one in answers)
        yield outcome.row("reserved over allocated memory", f"{reserved / peak:.3f}")
    if (waits := outcome.first["waits"]) is not None:
        yield outcome.row("waits of the host in a step", str(waits))
    tokens = config.train.microbatch_tokens * config.train.parallel.pipeline
    yield outcome.row("a step, s", f"{outcome.first['seconds']:.2f} ({tokens / outcome.first['seconds']:.0f} tokens/s)")
    yield outcome.row("start with loading, s", f"{max(one['started'] for one in answers):.1f}")


def offloaded(outcome: Outcome) -> Iterator[Row]:
    yield from steps(outcome)
    if "one GPU" in outcome.before:
        wanted, found = outcome.before["one GPU"]["weights"], outcome.first["weights"]
        good = abs(found - wanted) <= OFFLOADED * wanted
        yield outcome.row(
            "sum of all weights after two steps", f"{found:.9g}", f"{wanted:.9g}, without offloading", good
        )


def resumed(outcome: Outcome) -> Iterator[Row]:
    wanted, found = outcome.first["wanted"], outcome.first["found"]
    good = math.isclose(wanted, found, rel_tol=RESUMED)
    yield outcome.row("gradient norm after a checkpoint", f"{found:.6g}", f"{wanted:.6g}, without it", good)
    yield outcome.row("a checkpoint, s", f"{outcome.first['saved']:.1f}")


def float32(outcome: Outcome) -> Iterator[Row]:
    names = {outcome.device, "cpu"}
    found = [np.load(outcome.directory / f"logprobs-{name}.npy") for name in sorted(names)]
    off = float(np.abs(found[0] - found[-1]).max())
    yield outcome.row("largest difference of a log-prob from the CPU's", f"{off:.1e}", f"{FLOAT32:g}", off <= FLOAT32)


def rates(outcome: Outcome) -> Iterator[Row]:
    for name, rate in outcome.first["copies"].items():
        yield outcome.row(f"a copy {name}, GiB/s", f"{rate:.1f}")
    for name, rate in outcome.first["products"].items():
        yield outcome.row(f"grouped matmul, {name}, TFLOP/s", f"{rate:.3g}")


def group(outcome: Outcome) -> Iterator[Row]:
    for what, seconds in outcome.first["seconds"].items():
        yield outcome.row(f"{what}, s", f"{seconds:.2f}", f"at most {GROUP_SECONDS:g}", seconds <= GROUP_SECONDS)


def shared(outcome: Outcome) -> Iterator[Row]:
    for way, (rate, equal) in outcome.first["ways"].items():
        found = f"{rate:.2f} GiB/s, {'the same bytes' if equal else 'other bytes'}"
        yield outcome.row(f"a bucket by {way} to a process on the same GPU", found, "the same bytes", equal)


SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""As ranks of a run have it."""
SELECTIVE = {"recompute": "selective", "recompute_modules": ["moe", "layernorm"]}

CHECKS = (
    Check("kernels", "kernels", kernels),
    Check("float32", "logprobs", float32, changes={"dtype": "float32"}, devices=("gpu", "cpu"), wide=False),
    Check("one GPU", "step", steps, environment=SEGMENTS),
    Check("without replay", "step", steps, changes={"replay": "off"}, environment=SEGMENTS),
    Check("without expandable segments", "step", steps),
    Check("selective recomputation", "step", steps, changes=SELECTIVE, environment=SEGMENTS),
    Check("copies and products", "copies", rates),
    Check("NCCL", "group", group),
    Check("CUDA IPC", "shared", shared, environment=SEGMENTS),
    Check("offloaded optimizer", "step", offloaded, changes={"offload_optimizer": True, "offload_activations": True}),
    Check("bfloat16 moments", "step", steps, changes={"optimizer_moments": "bfloat16"}),
    Check("checkpoint", "resume", resumed),
    Check("NCCL with a rank that hangs", "group", group, 2, {"parallel": {"world_size": 2}}),
    Check("EP2", "step", steps, 2, {"parallel": {"world_size": 2, "expert": 2}}),
    Check("EP2 by DeepEP", "step", steps, 2, {"parallel": {"world_size": 2, "expert": 2, "dispatcher": "flex"}}),
    Check("TP2 EP2", "step", steps, 2, {"parallel": {"world_size": 2, "tensor": 2, "expert": 2}}),
    Check("EP8", "step", steps, 8, {"parallel": {"world_size": 8, "expert": 8}}),
    Check("TP4 EP8", "step", steps, 8, {"parallel": {"world_size": 8, "tensor": 4, "expert": 8}}),
    Check("TP2 CP2 EP8", "step", steps, 8, {"parallel": {"world_size": 8, "tensor": 2, "context": 2, "expert": 8}}),
    Check("TP2 PP2 EP4", "step", steps, 8, {"parallel": {"world_size": 8, "tensor": 2, "pipeline": 2, "expert": 4}}),
)
