"""``agent-rl r3 balance``: what balancing expert ranks would make of the routes that a run captured.

::

    trajectories of the newest steps ─ dealt out as the trainer would ─> counts [M, L, R, E] ─ each planner ─> a table
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from agent_rl.config.loader import load_recorded
from agent_rl.errors import ConfigError
from agent_rl.planner.known_models import planned_model
from agent_rl.rollout.records import read_trajectories, steps_on_disk
from agent_rl.train.batching.cost import TOKENS, SequenceCost, sequence_cost
from agent_rl.train.batching.mini_steps import split_step
from agent_rl.train.batching.packing import pack
from agent_rl.train.expert_balancing.worker import Counts, foresee
from agent_rl.train.route_sharding import cut
from agent_rl.types import Sample
from agent_rl.utils.run_files import write_json
from r3.balance import Grid, Options, Plans, plan_pass
from r3.balance.cost import borrowed, busiest_link, imbalance, rank_load
from r3.balance.planners import Planner
from r3.shard import ShardSpec

MICROBATCH_TOKENS = 8192
CAPTION = (
    "max / mean: the fullest expert rank's tokens over the mean, of every layer and micro-batch. borrowed: experts a "
    "rank. link: tokens over the busiest link between machines. gain: of a whole step by its FLOPs, at most."
)
PLANNERS: dict[Planner, str] = {
    "sequential": "none",
    "eplb": "EPLB, last step",
    "shadow": "shadowing",
    "foremoe": "foremoe",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a planner makes of all micro-batches and layers: the fullest rank's tokens over the mean, the experts that a
    rank borrows, tokens over the fullest link between machines, and how much faster than without balancing a step
    could be by its FLOPs (None where the model is not known)."""

    expert_ranks: int
    planner: str
    imbalance_mean: float
    imbalance_median: float
    imbalance_p95: float
    borrowed: float
    link: float
    gain: float | None


@dataclass(frozen=True, slots=True)
class Question:
    """``slots`` that a rank borrows at most, neighbours that share a machine (None: all do), tokens of a micro-batch
    (None: the run's own), and how many of the newest steps are looked at."""

    slots: int
    ranks_per_node: int | None
    tokens: int | None
    steps: int


def run_balance(run: Path, expert_ranks: Sequence[int], question: Question, json: Path | None) -> None:
    """Print the table, and write it as JSON. Raises ConfigError where the run has no routes, or its experts can't be
    spread so."""
    steps = [_samples(run, step) for step in _newest(run, question.steps)]
    tokens, cost = _batching(run, question.tokens)
    outcomes = [
        outcome for ranks in expert_ranks for outcome in _outcomes(steps, ranks, replace(question, tokens=tokens), cost)
    ]
    sequences = sum(map(len, steps))
    title = f"{run}: {sequences} trajectories of {len(steps)} step(s), micro-batches of {tokens} tokens"
    Console().print(_table(title, outcomes))
    if json is not None:
        write_json(json, [asdict(outcome) for outcome in outcomes])


def _newest(run: Path, count: int) -> list[int]:
    steps = steps_on_disk(run)[-count:]
    if not steps:
        raise ConfigError(f"{run}: no trajectories there; name a run's directory, or one of `agent-rl rollout`")
    return steps


def _samples(run: Path, step: int) -> list[Sample]:
    found = [t for group in read_trajectories(run, step) for t in group.trajectories]
    samples = [Sample(t.tokens, t.loss_mask, t.logprobs, 0.0, t.routing) for t in found if t.routing is not None]
    if not samples:
        raise ConfigError(f"{run}: the trajectories of step {step} were kept without their routes")
    return samples


def _batching(run: Path, tokens: int | None) -> tuple[int, SequenceCost]:
    """The tokens of a micro-batch and what a token costs, of the run's config where it has one."""
    path = run / "config.yaml"
    if not path.is_file():
        return tokens or MICROBATCH_TOKENS, TOKENS
    config = load_recorded(path)
    return tokens or config.train.microbatch_tokens, sequence_cost(planned_model(config.model))


def _outcomes(
    steps: Sequence[Sequence[Sample]], ranks: int, question: Question, cost: SequenceCost
) -> Iterator[Outcome]:
    grid = _grid(steps[0][0], ranks, question)
    counts = [_counts(samples, grid, question.tokens or MICROBATCH_TOKENS, cost) for samples in steps]
    share = _expert_share(steps, cost)
    for planner, name in PLANNERS.items():
        known = list(zip(counts, [None, *counts], strict=False))
        if planner == "eplb" and not (known := known[1:]):
            continue  # the first step has none before it
        plans = [_planned(planner, grid, step, last) for step, last in known]
        before = np.concatenate([imbalance(rank_load(Plans.identity(grid, step))).ravel() for step, _ in known])
        after = np.concatenate([imbalance(rank_load(one)).ravel() for one in plans])
        yield Outcome(
            expert_ranks=ranks,
            planner=name,
            imbalance_mean=float(after.mean()),
            imbalance_median=float(np.median(after)),
            imbalance_p95=float(np.quantile(after, 0.95)),
            borrowed=float(np.concatenate([borrowed(one).ravel() for one in plans]).mean()),
            link=float(np.concatenate([busiest_link(one).ravel() for one in plans]).mean()),
            gain=share and (1 - share + share * before.mean()) / (1 - share + share * after.mean()),
        )


def _planned(planner: Planner, grid: Grid, counts: Counts, last: Counts | None) -> Plans:
    expected = None if last is None else last.sum(axis=(0, 2))
    return plan_pass(counts, grid, Options(planner, expected=expected))


def _grid(sample: Sample, ranks: int, question: Question) -> Grid:
    assert sample.routing is not None
    experts, each = sample.routing.num_experts, min(question.ranks_per_node or ranks, ranks)
    if ranks < 2 or experts % ranks or ranks % each:
        raise ConfigError(
            f"--expert-ranks {ranks}: the model has {experts} experts: name numbers from 2 that divide it, and that "
            f"{each} ranks of a machine divide"
        )
    slots = min(question.slots, experts - experts // ranks)
    return Grid(experts, ranks, slots, tuple(rank // each for rank in range(ranks)))


def _counts(samples: Sequence[Sample], grid: Grid, tokens: int, cost: SequenceCost) -> Counts:
    """``[M, L, R, E]``, every expert rank a data rank of its own."""
    routing = samples[0].routing
    assert routing is not None
    spec = ShardSpec(tuple(range(routing.moe_layers)))
    dealt = split_step(
        samples, mini_steps=1, budget=tokens, ranks=grid.ranks, cost=cost, lockstep=grid.ranks, expert_ranks=grid.ranks
    )
    named, parts = dict(enumerate(samples)), []
    for ((share,),) in zip(dealt, strict=True):
        batches = [pack(named, ids) for ids in share.micro_batches]
        parts.append(foresee(batches, [cut(samples, ids, spec) for ids in share.micro_batches], spec, grid.experts))
    most = max(len(part.counts) for part in parts)
    counts = np.zeros((most, routing.moe_layers, grid.ranks, grid.experts), np.int32)
    for rank, part in enumerate(parts):
        counts[: len(part.counts), :, rank] = part.counts
    return counts


def _expert_share(steps: Sequence[Sequence[Sample]], cost: SequenceCost) -> float | None:
    """The experts' part of all FLOPs; None where the model's cost is not known."""
    if not cost.expert:
        return None
    samples = [sample for step in steps for sample in step]
    pairs = sum(sample.routing.experts.size for sample in samples if sample.routing is not None)
    return cost.expert * pairs / sum(cost.of([len(sample.tokens) for sample in samples]))


def _table(title: str, outcomes: Sequence[Outcome]) -> Table:
    table = Table("ranks", "planner", title=title, title_justify="left", caption=CAPTION, caption_justify="left")
    for column in ("max / mean", "median", "p95", "borrowed", "link", "gain"):
        table.add_column(column, justify="right")
    for one in outcomes:
        table.add_row(
            str(one.expert_ranks),
            one.planner,
            *(f"{value:.3f}" for value in (one.imbalance_mean, one.imbalance_median, one.imbalance_p95)),
            f"{one.borrowed:.1f}",
            f"{one.link:,.0f}",
            "" if one.gain is None else f"{one.gain:.2f} x",
        )
        if one.planner == PLANNERS["foremoe"]:
            table.add_section()
    return table
