"""What ``agent-rl plan --time`` assumes about speeds and episodes: each value with its unit and its source.

A user replaces values with ``--assume name=value``. ``benchmarks/bench_plan_time.py`` measures those of CPUs.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_rl.config import RunConfig
from agent_rl.errors import UserError
from agent_rl.train.ray_launch import threads_per_rank

_BENCH = "measured on two EPYC cores: benchmarks/bench_plan_time.py"
_FIT = "fitted by hand to quickstart and paper-small on two EPYC cores; bench_plan_time.py differs by up to 60 %"
_QUICKSTART = "measured: 20 steps of configs/quickstart.yaml"
_TINY_MOE = (2.9, 155.0, 42.0, 1.65, 0.75), _QUICKSTART
_PAPER_MOE = (
    (3.2, 173.0, 55.0, 1.5, 0.75),
    "measured: six runs of configs/paper-small.yaml (40 to 71 sampled)",
)
"""Turns, tokens and sampled tokens of an episode of mini, the longest over the mean, and the share that is trained."""
_ENERGY = "fitted to ML.ENERGY's vLLM figures of Qwen3-30B-A3B and 235B on H100s (github.com/ml-energy/leaderboard)"
_SYNC = "measured: 18,867 tensors in benchmarks/bench_sync_tensors.py, on two EPYC cores"
_THREADS = "measured: two threads take 0.88 to 1.11 times as long as one in quickstart and paper-small"
_GUESS = "a guess"
_TRAINING_STEP = 0.0300
"""Seconds of a step in :func:`slowdown` on the two EPYC cores on which speeds were measured."""
_POWERS = {"s ": 1, "FLOP/s": -1, "bytes/s of the optimizer": -1}
"""The power of a processor's slowness by the beginning of a unit."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """One value, its unit, and where it comes from."""

    name: str
    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The assumptions of one plan, by name."""

    values: Mapping[str, Assumption]

    def __getitem__(self, name: str) -> float:
        return self.values[name].value

    def __iter__(self) -> Iterator[Assumption]:
        return iter(self.values.values())

    def changed(self, source: str, **values: float) -> Assumptions:
        """The same assumptions with other ``values`` from ``source``."""
        new = {name: replace(self.values[name], value=value, source=source) for name, value in values.items()}
        return Assumptions({**self.values, **new})

    @classmethod
    def of(cls, config: RunConfig, device: str) -> Assumptions:
        rows = (*_episode(config), *_sandbox(config), *(_GPU if device == "cuda" else (*_CPU, *_machine(config))))
        return cls({row.name: row for row in rows})

    def slowed(self, factor: float) -> Assumptions:
        """The same assumptions on processors that take ``factor`` times as long."""
        rows = {}
        for name, row in self.values.items():
            power = next((power for unit, power in _POWERS.items() if row.unit.startswith(unit)), 0)
            source = f"x {factor**power:.2f}, this machine's speed now; {row.source}" if power else row.source
            rows[name] = replace(row, value=row.value * factor**power, source=source)
        return Assumptions(rows)

    def overridden(self, settings: Sequence[str]) -> Assumptions:
        """The same assumptions with ``settings``, each ``name=value``. Raises UserError."""
        values = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            if name not in self.values:
                raise UserError(f"--assume {setting}: no assumption {name!r}; there are: {', '.join(self.values)}")
            try:
                values[name] = float(text)
            except ValueError:
                raise UserError(f"--assume {setting}: {text!r} is not a number") from None
            if not 0 <= values[name] < math.inf:
                raise UserError(f"--assume {setting}: must be finite and not negative")
        return self.changed("--assume", **values)


def slowdown(seconds: float = 2.0) -> float:
    """How many times as long as on the machine of the measurements above a training step of eight small layers takes
    here now: the median of those in ``seconds``, with one thread. Load that comes and goes, or slows only several
    processes at once, is not in it. Loads torch."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spent: list[float] = []
    began, step = time.perf_counter(), _training_step()
    while len(spent) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        step()
        spent.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return statistics.median(spent[2:]) / _TRAINING_STEP  # the first steps initialize torch's kernels


def _training_step() -> Callable[[], None]:
    """A step whose products, copies and updates exceed a core's cache, as those of engine and trainer do. Speeds of
    operations within the cache differ less between machines."""
    import torch
    from torch.nn.functional import linear, silu

    rows = torch.ones(400, 128)
    layers = [(torch.zeros(512, 128, requires_grad=True), torch.zeros(128, 512, requires_grad=True)) for _ in range(8)]
    adam = torch.optim.AdamW([weight for layer in layers for weight in layer])

    def step() -> None:
        hidden = rows
        for up, down in layers:
            hidden = hidden + linear(silu(linear(hidden, up)), down)
        hidden.square().mean().backward()
        adam.step()
        adam.zero_grad()

    return step


def _row(name: str, value: float, unit: str, source: str) -> Assumption:
    return Assumption(name, value, unit, source)


def _episode(config: RunConfig) -> tuple[Assumption, ...]:
    """A mean episode. Without measurements, shares of the limits."""
    rollout = config.rollout
    if config.env.name == "mini":
        measured = _PAPER_MOE if config.model.name == "paper-moe" else _TINY_MOE
        (turns, tokens, sampled, longest, trained), source = measured
        prompt = 47.0
    else:
        turns = 1.0 if rollout.max_turns == 1 else 0.6 * rollout.max_turns
        tokens = 0.4 * rollout.max_tokens
        prompt = min(2000.0, 0.2 * tokens)
        sampled = min(turns * rollout.max_new_tokens, tokens - prompt if rollout.max_turns == 1 else 0.3 * tokens)
        longest, trained, source = min(2.0, rollout.max_tokens / tokens), 0.8, f"{_GUESS}, from the limits in rollout"
    return (
        _row("turns", min(turns, rollout.max_turns), "turns of an episode", source),
        _row("tokens", min(tokens, rollout.max_tokens), "tokens of an episode", source),
        _row("sampled_tokens", sampled, "tokens of an episode", source),
        _row("prompt_tokens", prompt, "tokens of the first prompt", source),
        _row("longest_episode", longest, "times the mean, in seconds", source),
        _row("trained_share", trained, "of the episodes, the rest has no advantage", source),
    )


def _sandbox(config: RunConfig) -> tuple[Assumption, ...]:
    """Latencies of an environment, without the engine."""
    if config.env.name == "math":
        rows = (0.0, 0.0, 0.0, 0.05, f"{_GUESS}: no sandbox")
    elif config.env.name == "mini":
        rows = (0.03, 0.009, 0.006, 0.01, f"{_QUICKSTART}, processor time")
    elif config.sandbox.backend == "bubblewrap":
        rows = (0.0, 0.1, 1.5, 20.0, _GUESS)
    else:
        rows = (0.0, 1.0, 1.5, 30.0, f"{_GUESS}; an empty container starts in 0.13 s and runs a command in 0.08 s")
    task, start, tool, grade, source = rows
    return (
        _row("task_seconds", task, "s of a task, once for a group of episodes", source),
        _row("start_seconds", start, "s to start a task", source),
        _row("tool_seconds", tool, "s of a tool call", source),
        _row("grade_seconds", grade, "s to grade an episode", source),
    )


def _machine(config: RunConfig) -> tuple[Assumption, ...]:
    threads = threads_per_rank(config.train.parallel.world_size)
    return (
        _row("cores", len(os.sched_getaffinity(0)), "cores", "of this machine"),
        _row("trainer_threads", threads, "threads of a rank", "OMP_NUM_THREADS, or this machine's cores"),
    )


_BOTH = (
    _row("checkpoint_blocks", 0.04, "of a checkpoint's writing time", "measured: benchmarks/bench_checkpoint.py"),
    _row("disk", 1e9, "bytes/s", _GUESS),
)
_CPU = (
    *_BOTH,
    _row("sync_bucket", 0.06, "s of a bucket of a weight sync", "measured: benchmarks/bench_weight_sync.py"),
    _row("sync_tensor", 1e-4, "s of a tensor of a weight sync", "measured: steps of configs/paper-small.yaml"),
    _row("loop_turn", 0.009, "s of the loop and the engine's HTTP server for a turn", _FIT),
    _row("trainer_flops", 57e9, "FLOP/s of one thread in float32", _BENCH),
    _row("trainer_copy", 4.1e-7, "s of a token's copy to an expert, a thread", _BENCH),
    _row("trainer_serial", 0.8, "of a thread's time, the same with more threads", _THREADS),
    _row("adam", 1e10, "bytes/s of the optimizer's state", _BENCH),
    _row("adam_tensor", 2.4e-5, "s of a tensor in an update", _BENCH),
    _row("engine_layer", 0.002, "s of a layer in a decode step", _FIT),
    _row("engine_request", 0.0013, "s of a request", _FIT),
    _row("engine_copy", 8.4e-6, "s of a decoded token's copy to an expert", _FIT),
    _row("prefill_copy", 2.3e-6, "s of a prefilled token's copy to an expert", _FIT),
    _row("engine_flops", 79e9, "FLOP/s in bfloat16", _FIT),
    _row(
        "batch_share",
        0.4,
        "of an engine's requests decode at once, the others wait",
        f"{_QUICKSTART}, engine/busy_fraction",
    ),
    _row("run_start", 16, "s before the first episode", "measured: docs/research/benchmarks.md"),
)
_GPU = (
    *_BOTH,
    _row("sync_bucket", 0.024, "s of a bucket of a weight sync", _SYNC),
    _row("sync_tensor", 6.4e-5, "s of a tensor of a weight sync", _SYNC),
    _row("loop_turn", 0.0025, "s of the loop for a turn", "measured: benchmarks/bench_http.py and bench_loop.py"),
    _row("products", 0.2, "of the peak FLOP/s, traffic between experts included", "Megatron Bridge 25.11 on H100s: "
         "0.15 (gpt-oss-120b, bfloat16) to 0.24 (Qwen3-235B-A22B, float8)"),
    _row("attention", 0.35, "of the peak FLOP/s", "FlashAttention 2 on an H100 (arXiv 2407.08608, abstract)"),
    _row("prefill", 0.35, "of the peak FLOP/s", _GUESS),
    _row("memory", 0.83, "of the GPU's memory bandwidth", _ENERGY),
    _row("links", 0.7, "of the bandwidth of NVLink, network and PCIe", _GUESS),
    _row("engine_layer", 7e-5, "s of a layer in a decode step", _ENERGY),
    _row("engine_exchange", 5e-5, "s of a layer in a decode step on several GPUs", _ENERGY),
    _row("engine_token", 5e-5, "s of each running request in a decode step", _ENERGY),
    _row("engine_request", 0.01, "s of a request", _GUESS),
    _row("run_start", 300, "s before the first episode", _GUESS),
)  # fmt: skip
