"""``agent-rl r3 balance``: simulates expert load balancing on the captured routes of a run.

::

    trajectories of the last steps ─ split as by the trainer ─> counts [M, L, R, E] ─ each planner ─> table

``M`` micro-batches, ``L`` MoE layers, ``R`` expert ranks, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from agent_rl.config.loader import load_recorded
from agent_rl.errors import AgentRlError, ConfigError
from agent_rl.planner.known_models import planned_model
from agent_rl.rollout.records import read_trajectories, steps_on_disk
from agent_rl.train.batching.cost import TOKENS, SequenceCost, sequence_cost
from agent_rl.train.batching.packing import pack
from agent_rl.train.batching.partition import split_step
from agent_rl.train.expert_balancing.worker import Counts, count_foreseen
from agent_rl.train.route_sharding import shard_routes
from agent_rl.types import Sample
from agent_rl.utils.run_files import write_json
from r3.balance import ExpertLayout, PlanArrays, PlannerOptions, plan_pass
from r3.balance.cost import borrowed, busiest_link, imbalance, rank_load
from r3.balance.planners import Planner
from r3.balance.time_model import ExpertShape
from r3.shard import ShardSpec

MICROBATCH_TOKENS = 8192
CAPTION = (
    "max / mean: tokens of the busiest expert rank over the mean, per layer and micro-batch. borrowed: experts per "
    "rank. link: tokens over the busiest node's link. gain: upper limit of a step's speed-up, from its FLOPs."
)
PLANNERS: dict[Planner, str] = {
    "sequential": "none",
    "eplb": "EPLB, last step",
    "shadow": "shadowing",
    "foremoe": "foremoe",
}


@dataclass(frozen=True, slots=True)
class PlannerResult:
    """A planner's result over all micro-batches and layers.

    ``imbalance_*``: tokens of the busiest rank over the mean. ``borrowed``: mean experts borrowed per rank. ``link``:
    mean tokens over the busiest link between nodes. ``gain``: upper limit of a step's speed-up, from its FLOPs; None
    for an unknown model.
    """

    expert_ranks: int
    planner: str
    imbalance_mean: float
    imbalance_median: float
    imbalance_p95: float
    borrowed: float
    link: float
    gain: float | None


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """``slots``: experts that a rank may borrow per layer. ``ranks_per_node``: None puts all ranks on one node.
    ``tokens``:
    tokens per micro-batch; None takes the run's value. ``steps``: number of last steps to read."""

    slots: int
    ranks_per_node: int | None
    tokens: int | None
    steps: int


def run_balance(run: Path, expert_ranks: Sequence[int], options: SimulationOptions, json: Path | None) -> None:
    """Print the table and write it to ``json``.

    Raises ConfigError if the run has no routes or its experts do not divide into ``expert_ranks``.
    """
    steps = [_samples(run, step) for step in _last_steps(run, options.steps)]
    tokens, cost = _batching(run, options.tokens)
    rows = [each for ranks in expert_ranks for each in _simulate(steps, ranks, replace(options, tokens=tokens), cost)]
    sequences = sum(map(len, steps))
    title = f"{run}: {sequences} trajectories of {len(steps)} step(s), micro-batches of {tokens} tokens"
    Console().print(_table(title, rows))
    if json is not None:
        write_json(json, [asdict(result) for result in rows])


def run_counts(
    run: Path, ranks: int, *, ranks_per_node: int, slots: int = 4
) -> tuple[ExpertLayout, list[Counts], ExpertShape] | None:
    """Returns the layout of ``ranks`` expert ranks, the counts ``[M, L, R, E]`` of all steps of ``run`` and the shape
    of its experts; None if its experts do not divide into the ranks. Raises ConfigError as :func:`run_balance`."""
    steps = [_samples(run, step) for step in steps_on_disk(run)]
    options = SimulationOptions(slots, ranks_per_node, None, len(steps))
    try:
        layout = _layout(steps[0][0], ranks, options)
    except ConfigError:
        return None
    tokens, cost = _batching(run, None)
    config = load_recorded(run / "config.yaml")
    model = planned_model(config.model)
    shape = ExpertShape(model.hidden, model.expert_inner, 2)
    return layout, [_counts(samples, layout, tokens, cost) for samples in steps], shape


def _last_steps(run: Path, count: int) -> list[int]:
    steps = steps_on_disk(run)[-count:]
    if not steps:
        raise ConfigError(
            f"{run}: no trajectories found; expected the directory of a run or the output of `agent-rl rollout`"
        )
    return steps


def _samples(run: Path, step: int) -> list[Sample]:
    try:
        trajectories = [t for group in read_trajectories(run.resolve(), step) for t in group.trajectories]
    except AgentRlError as error:
        raise ConfigError(f"{run}: {error}") from None
    samples = [Sample(t.tokens, t.loss_mask, t.logprobs, 0.0, t.routing) for t in trajectories if t.routing is not None]
    if not samples:
        raise ConfigError(f"{run}: the trajectories of step {step} have no routes; run with train.replay=r3")
    return samples


def _batching(run: Path, tokens: int | None) -> tuple[int, SequenceCost]:
    """Tokens per micro-batch and the cost model, from the run's config if it exists."""
    path = run / "config.yaml"
    if not path.is_file():
        return tokens or MICROBATCH_TOKENS, TOKENS
    config = load_recorded(path)
    return tokens or config.train.microbatch_tokens, sequence_cost(planned_model(config.model))


def _simulate(
    steps: Sequence[Sequence[Sample]], ranks: int, options: SimulationOptions, cost: SequenceCost
) -> Iterator[PlannerResult]:
    layout = _layout(steps[0][0], ranks, options)
    counts = [_counts(samples, layout, options.tokens or MICROBATCH_TOKENS, cost) for samples in steps]
    share = _expert_share(steps, cost)
    for planner, name in PLANNERS.items():
        known = list(zip(counts, [None, *counts], strict=False))
        if planner == "eplb" and not (known := known[1:]):
            continue  # the first step has no previous loads
        plans = [_planned(planner, layout, step, last) for step, last in known]
        before = np.concatenate([imbalance(rank_load(PlanArrays.identity(layout, step))).ravel() for step, _ in known])
        after = np.concatenate([imbalance(rank_load(one)).ravel() for one in plans])
        yield PlannerResult(
            expert_ranks=ranks,
            planner=name,
            imbalance_mean=float(after.mean()),
            imbalance_median=float(np.median(after)),
            imbalance_p95=float(np.quantile(after, 0.95)),
            borrowed=float(np.concatenate([borrowed(one).ravel() for one in plans]).mean()),
            link=float(np.concatenate([busiest_link(one).ravel() for one in plans]).mean()),
            gain=share and (1 - share + share * before.mean()) / (1 - share + share * after.mean()),
        )


def _planned(planner: Planner, layout: ExpertLayout, counts: Counts, last: Counts | None) -> PlanArrays:
    expected = None if last is None else last.sum(axis=(0, 2))
    return plan_pass(counts, layout, PlannerOptions(planner, expected=expected))


def _layout(sample: Sample, ranks: int, options: SimulationOptions) -> ExpertLayout:
    assert sample.routing is not None
    experts, per_node = sample.routing.num_experts, min(options.ranks_per_node or ranks, ranks)
    if ranks < 2 or experts % ranks or ranks % per_node:
        raise ConfigError(
            f"--expert-ranks {ranks}: expected a divisor of the model's {experts} experts, at least 2, and a multiple "
            f"of --ranks-per-node ({per_node})"
        )
    slots = min(options.slots, experts - experts // ranks)
    return ExpertLayout(experts, ranks, slots, tuple(rank // per_node for rank in range(ranks)))


def _counts(samples: Sequence[Sample], layout: ExpertLayout, tokens: int, cost: SequenceCost) -> Counts:
    """Tokens per expert ``[M, L, R, E]``. Every expert rank is its own data-parallel rank."""
    routing = samples[0].routing
    assert routing is not None
    spec, ranks = ShardSpec(tuple(range(routing.moe_layers))), layout.ranks
    split = split_step(samples, mini_steps=1, budget=tokens, ranks=ranks, cost=cost, lockstep=ranks, expert_ranks=ranks)
    by_id, parts = dict(enumerate(samples)), []
    for ((share,),) in zip(split, strict=True):
        batches = [pack(by_id, ids) for ids in share.micro_batches]
        shards = [shard_routes(samples, ids, spec) for ids in share.micro_batches]
        parts.append(count_foreseen(batches, shards, spec, layout.experts))
    micro_batches = max(len(part.counts) for part in parts)
    counts = np.zeros((micro_batches, routing.moe_layers, layout.ranks, layout.experts), np.int32)
    for rank, part in enumerate(parts):
        counts[: len(part.counts), :, rank] = part.counts
    return counts


def _expert_share(steps: Sequence[Sequence[Sample]], cost: SequenceCost) -> float | None:
    """The experts' share of all FLOPs; None for an unknown model."""
    if not cost.expert:
        return None
    samples = [sample for step in steps for sample in step]
    pairs = sum(sample.routing.experts.size for sample in samples if sample.routing is not None)
    return cost.expert * pairs / sum(cost.of([len(sample.tokens) for sample in samples]))


def _table(title: str, results: Sequence[PlannerResult]) -> Table:
    table = Table("ranks", "planner", title=title, title_justify="left", caption=CAPTION, caption_justify="left")
    for column in ("max / mean", "median", "p95", "borrowed", "link", "gain"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            str(result.expert_ranks),
            result.planner,
            *(f"{value:.3f}" for value in (result.imbalance_mean, result.imbalance_median, result.imbalance_p95)),
            f"{result.borrowed:.1f}",
            f"{result.link:,.0f}",
            "" if result.gain is None else f"{result.gain:.2f} x",
        )
        if result.planner == PLANNERS["foremoe"]:
            table.add_section()
    return table
