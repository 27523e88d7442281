"""``agent-rl r3 compare``: one rollout, then trainer passes over it with and without replay, and what differs.

::

    config or run ── rollout (or trajectories on disk) ──▶ samples ──▶ replay        against the engine
                            │                                     ├──▶ native        against the engine
                            │                                     └──▶ native again  against without_replay: the
                            noise floor
                            └─ --rescore: the config's engine computes them again, and takes the engine's place
                               (engine again, against what it or another engine sampled: the engine's own noise)
    ──▶ OUT/compare.json, probabilities.png, f_tau.png, routers.png, trajectories/

The second native pass packs the same sequences into other micro-batches: the same ones would give the same bits on a
CPU, whose kernels are deterministic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from agent_rl.commands.rollout import roll_out
from agent_rl.config import RunConfig
from agent_rl.config.loader import load_config, load_recorded
from agent_rl.controller.preflight import check_lengths, check_model
from agent_rl.controller.rollout_runtime import open_rollout_runtime
from agent_rl.engine.types import Scores
from agent_rl.errors import ConfigError
from agent_rl.models.hub import with_models
from agent_rl.models.spec import read_model_spec
from agent_rl.monitoring.console import Display
from agent_rl.rollout.records import read_trajectories, steps_on_disk
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Group, Sample, Trajectory
from agent_rl.utils.concurrency import cancel_on_signals
from agent_rl.utils.run_files import write_atomic, write_json
from r3.mismatch.breakdown import Mismatch, MismatchReport, Pair, mismatch_report
from r3.mismatch.figures import differing_routers, f_tau_curves, probability_scatter
from r3.mismatch.report import TOKEN_VALUES, Estimate, estimate_ratios, log_ratios, per_sequence
from r3.routing import Routing
from r3.stitch import RouteStitcher

PASS_TOKENS = 65_536
"""Tokens of one call to the trainer: what lies between two moves of the progress bar."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainerPass:
    """What one pass gave for each sample: log-probs ``[S]`` and the experts used ``[S, moe_layers, top_k]``."""

    logprobs: Sequence[NDArray[np.float32]]
    routes: Sequence[Routing]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The reports of the passes. ``engine``: of the engine that computed the trajectories again, against what was
    sampled; None where none did. ``without_over_with_replay``: the ratio of the two means of each log-prob metric."""

    replay: MismatchReport
    without_replay: MismatchReport
    floor: MismatchReport
    without_over_with_replay: Mapping[str, Estimate]
    engine: MismatchReport | None = None

    @property
    def reports(self) -> dict[str, MismatchReport]:
        again = {} if self.engine is None else {"engine again": self.engine}
        return {"without_replay": self.without_replay, "replay": self.replay, "native again": self.floor, **again}


async def run_compare(
    source: Path,
    overrides: Sequence[str],
    *,
    tasks: int,
    split: str,
    out: Path | None,
    trajectories: Path | None,
    rescore: bool,
) -> None:
    """Compare engine and trainer on the model of ``source``, a config or a finished run's directory.

    ``tasks`` of ``split`` are rolled out ``group_size`` times each, unless ``trajectories`` names a directory that
    holds some (of an earlier comparison, or of a run: all its steps). ``rescore``: the config's engine computes them
    again, and the trainer is compared with that pass. Raises ConfigError for what cannot be compared.
    """
    config = config_of(source, overrides)
    if rescore and config.rollout.logprob_temperature != 1:
        raise ConfigError(
            "--rescore: SGLang gives a prompt's log-probs at temperature 1 whatever is asked, and "
            f"rollout.temperature is {config.rollout.temperature:g}: add rollout.temperature=1"
        )
    config = with_models(config)
    config = config.model_copy(update={"train": config.train.model_copy(update={"replay": "r3"})})  # to be replayed
    check_model(config.model)
    check_lengths(config, read_model_spec(config.model))
    out = out or _directory(source, config) / "compare"
    display = Display(f"r3 compare {config.name}")
    with display:
        if trajectories is None:
            groups = (await roll_out(config, out, display, tasks=tasks, split=split)).groups
        else:
            groups = read_all(trajectories)
        sampled = comparable([trajectory for group in groups for trajectory in group.trajectories])
        kept = await rescored(config, out, display, sampled) if rescore else sampled
        display.stage("starting the trainer")
        async with RayTrainer(config) as trainer:
            cancel_on_signals()
            passes = await _passes(trainer, config, kept, display)
        display.stage("reports")
        comparison = compare(kept, *passes)
        if rescore:
            comparison = replace(comparison, engine=_report(sampled, of_engine(kept), of_engine(sampled)))
        write_json(out / "compare.json", {**_facts(config, kept), **_json(comparison)})
        _draw(out, kept, passes[0], passes[1], comparison)
    for table in tables(comparison):
        display.table(table)
    display.note(f"{out}: compare.json, probabilities.png, f_tau.png, routers.png")


def config_of(source: Path, overrides: Sequence[str]) -> RunConfig:
    """The config at ``source``; of a run's directory its resolved one, with the model it trained."""
    if not source.is_dir():
        return load_config(source, overrides)
    config = load_recorded(source / "config.yaml", overrides)
    if not (source / "model" / "config.json").is_file():
        raise ConfigError(f"{source}: no trained model there ({source / 'model'}): the run has not finished")
    return config.model_copy(update={"model": source / "model"})


def _directory(source: Path, config: RunConfig) -> Path:
    return source if source.is_dir() else config.run_dir


def read_all(directory: Path) -> tuple[Group, ...]:
    """The trajectories of all steps in ``directory``. Raises ConfigError where there are none."""
    steps = steps_on_disk(directory)
    if not steps:
        raise ConfigError(
            f"--trajectories {directory}: no trajectories there; name a run's directory, or a comparison's"
        )
    return tuple(group for step in steps for group in read_trajectories(directory, step))


def comparable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those with a sampled token. Raises ConfigError where there is none, or one has no routes."""
    kept = [trajectory for trajectory in trajectories if trajectory.loss_mask[1:].any()]
    if not kept:
        raise ConfigError(f"nothing to compare: none of {len(trajectories)} trajectories has a sampled token")
    for trajectory in kept:
        if trajectory.routing is None:
            raise ConfigError(f"nothing to compare: a trajectory of {trajectory.task_id} was kept without its routes")
    return kept


async def rescored(
    config: RunConfig, out: Path, display: Display, trajectories: Sequence[Trajectory]
) -> list[Trajectory]:
    """The trajectories with the log-probs and routes of one more pass of the config's engine, a prefill each."""
    facts = read_model_spec(config.model)
    async with open_rollout_runtime(config, facts, out / "logs", display, routes=True) as runtime:
        display.stage("the engine again", total=len(trajectories))

        async def again(index: int, trajectory: Trajectory) -> Trajectory:
            async with runtime.limiter:
                scores = await runtime.engine.rescore(trajectory.tokens.tolist(), session=str(index), routes=True)
            display.advance()
            return _with_scores(trajectory, scores)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(again(*pair)) for pair in enumerate(trajectories)]
    return [task.result() for task in tasks]


def _with_scores(trajectory: Trajectory, scores: Scores) -> Trajectory:
    held, length = _routing(trajectory), len(trajectory.tokens)
    stitcher = RouteStitcher(moe_layers=held.moe_layers, top_k=held.top_k, num_experts=held.num_experts)
    stitcher.append(scores.routing, sequence=length)
    logprobs = np.where(trajectory.loss_mask, scores.logprobs, 0).astype(np.float32)
    return replace(trajectory, logprobs=logprobs, routing=stitcher.finish(length))


async def _passes(
    trainer: RayTrainer, config: RunConfig, trajectories: Sequence[Trajectory], display: Display
) -> tuple[TrainerPass, TrainerPass, TrainerPass]:
    """Replay, without_replay, and native once more in other micro-batches."""
    samples = [Sample(t.tokens, t.loss_mask, t.logprobs, 0.0, t.routing) for t in trajectories]

    async def run(name: str, budget: int, *, replay: bool) -> TrainerPass:
        display.stage(name, total=len(samples))
        found: list[tuple[NDArray[np.float32], NDArray[np.unsignedinteger]]] = []
        for chunk in chunks([len(sample.tokens) for sample in samples], budget):
            # A greedy rollout's log-probs are the raw ones, so 0 counts as 1.
            found += await trainer.routes(samples[chunk], replay=replay, temperature=config.rollout.logprob_temperature)
            display.advance(chunk.stop - chunk.start)
        return TrainerPass(
            [logprobs for logprobs, _ in found],
            [_used(sample, experts) for sample, (_, experts) in zip(samples, found, strict=True)],
        )

    half = max(1, min(PASS_TOKENS, sum(len(sample.tokens) for sample in samples)) // 2)
    return (
        await run("pass with replay", PASS_TOKENS, replay=True),
        await run("pass without replay", PASS_TOKENS, replay=False),
        await run("pass without replay, again", half, replay=False),
    )


def chunks(lengths: Sequence[int], budget: int) -> list[slice]:
    """Runs of sequences that hold at most ``budget`` tokens together; a longer sequence is one of its own."""
    cuts, held = [0], 0
    for index, length in enumerate(lengths):
        if held and held + length > budget:
            cuts.append(index)
            held = 0
        held += length
    return [slice(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(lengths)], strict=True)]


def _used(sample: Sample, experts: NDArray[np.unsignedinteger]) -> Routing:
    """The experts of a pass where the rollout's routes are known, under the rollout's spans."""
    assert sample.routing is not None
    return replace(sample.routing, experts=experts)


def compare(
    trajectories: Sequence[Trajectory], replay: TrainerPass, without_replay: TrainerPass, again: TrainerPass
) -> Comparison:
    """Both passes against the engine, and the second native one against the first."""
    engine = of_engine(trajectories)
    sums = {
        name: _metric_sums(trajectories, passed, engine)
        for name, passed in (("without_replay", without_replay), ("replay", replay))
    }
    return Comparison(
        replay=_report(trajectories, replay, engine),
        without_replay=_report(trajectories, without_replay, engine),
        floor=_report(trajectories, again, without_replay),
        without_over_with_replay={
            name: estimate_ratios({name: column}, sums["replay"][name])[name]
            for name, column in sums["without_replay"].items()
        },
    )


def of_engine(trajectories: Sequence[Trajectory]) -> TrainerPass:
    """The engine's log-probs and experts of the trajectories, as a pass."""
    return TrainerPass([t.logprobs for t in trajectories], [_routing(t) for t in trajectories])


def _report(trajectories: Sequence[Trajectory], passed: TrainerPass, reference: TrainerPass) -> MismatchReport:
    return mismatch_report(
        [
            Pair(
                logprobs=passed.logprobs[index],
                reference_logprobs=reference.logprobs[index],
                sampled=trajectory.loss_mask,
                turns=turns_of(trajectory),
                routes=passed.routes[index],
                reference_routes=reference.routes[index],
            )
            for index, trajectory in enumerate(trajectories)
        ]
    )


def _metric_sums(
    trajectories: Sequence[Trajectory], passed: TrainerPass, engine: TrainerPass
) -> dict[str, NDArray[np.float64]]:
    """Each metric's sum over the sampled tokens of each trajectory, ``[trajectories]``."""
    trainer_T, engine_T = _sampled(trajectories, passed), _sampled(trajectories, engine)
    sequence = np.repeat(np.arange(len(trajectories)), [t.loss_mask[1:].sum() for t in trajectories])
    log_r = log_ratios(trainer_T, engine_T)
    return {name: per_sequence(values(log_r), sequence) for name, values in TOKEN_VALUES.items()}


def _sampled(trajectories: Sequence[Trajectory], passed: TrainerPass) -> NDArray[np.float32]:
    """The log-probs of all sampled tokens, one trajectory after another."""
    both = zip(trajectories, passed.logprobs, strict=True)
    return np.concatenate([logprobs[1:][trajectory.loss_mask[1:]] for trajectory, logprobs in both])


def turns_of(trajectory: Trajectory) -> NDArray[np.int64]:
    """The turn each token belongs to, from 1, ``[S]``: prompt and observation tokens belong to the turn they open."""
    ends = [turn.prompt_tokens + turn.completion_tokens for turn in trajectory.turns]
    return np.searchsorted(ends, np.arange(len(trajectory.tokens)), side="right") + 1


def _routing(trajectory: Trajectory) -> Routing:
    assert trajectory.routing is not None
    return trajectory.routing


def _facts(config: RunConfig, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    return {
        "model": str(config.model),
        "engine_dtype": config.engine.dtype,
        "trainer_dtype": config.train.dtype,
        "temperature": config.rollout.temperature,
        "trajectories": len(trajectories),
        "tokens": sum(len(trajectory.tokens) for trajectory in trajectories),
        "sampled_tokens": sum(int(trajectory.loss_mask[1:].sum()) for trajectory in trajectories),
    }


def _json(comparison: Comparison) -> dict[str, Any]:
    return {
        "without_over_with_replay": {
            name: asdict(ratio) for name, ratio in comparison.without_over_with_replay.items()
        },
        **{name.replace(" ", "_"): report.to_json() for name, report in comparison.reports.items()},
    }


def _draw(
    out: Path,
    trajectories: Sequence[Trajectory],
    replay: TrainerPass,
    without_replay: TrainerPass,
    comparison: Comparison,
) -> None:
    engine = np.concatenate([t.logprobs[1:][t.loss_mask[1:]] for t in trajectories])
    scatter = {"without replay": without_replay, "with replay": replay}
    panels = {name: (_sampled(trajectories, passed), engine) for name, passed in scatter.items()}
    logprobs = {name: report.total.logprobs for name, report in comparison.reports.items()}
    curves = {name: found.f_tau for name, found in logprobs.items() if found is not None}
    write_atomic(out / "probabilities.png", probability_scatter(panels))
    write_atomic(out / "f_tau.png", f_tau_curves(curves))
    if comparison.without_replay.total.routes is not None:
        write_atomic(out / "routers.png", differing_routers(comparison.without_replay.total.routes))


def tables(comparison: Comparison) -> list[Table]:
    """The log-prob metrics of the passes; where the experts of the native pass differ; both by turn and version."""
    return [
        _metrics_table(comparison),
        _layers_table(comparison),
        _parts_table("turn", comparison.without_replay.by_turn, comparison.replay.by_turn),
        _parts_table(
            "weight version", comparison.without_replay.by_weight_version, comparison.replay.by_weight_version
        ),
    ]


def _metrics_table(comparison: Comparison) -> Table:
    noise = ["native again, against native"] + ["engine again, against what was sampled"] * bool(comparison.engine)
    table = Table("against the engine", "without_replay", "replay", "native / replay", *noise)
    totals = [report.total for report in comparison.reports.values()]
    for name in TOKEN_VALUES:
        # The mean factor differs from 1 in its last digits only.
        digits = ".5f" if name == "token_mult_prob_error" else ".3g"
        without_replay, replay, *again = [_text(t.logprobs.metrics[name], digits) if t.logprobs else "" for t in totals]
        table.add_row(name, without_replay, replay, _text(comparison.without_over_with_replay[name]), *again)
    for level, unit in (("router", "share of routers"), ("token", "share of tokens"), ("sequence", "layers a token")):
        without_replay, replay, *again = [f"{getattr(t.routes, level):.3g}" if t.routes else "" for t in totals]
        table.add_row(f"{level}_mismatch\n({unit})", without_replay, replay, "", *again)
    return table


def _text(estimate: Estimate, digits: str = ".3g") -> str:
    """The value over its interval; a ratio to 0 is no number."""
    if not np.isfinite(estimate.value):
        return "-"
    return f"{estimate.value:{digits}}\n[{estimate.low:{digits}}, {estimate.high:{digits}}]"


def _layers_table(comparison: Comparison) -> Table:
    table = Table("MoE layer", "sets that differ, native", title="routers by layer")
    routes = comparison.without_replay.total.routes
    for layer, share in enumerate(routes.by_layer if routes else ()):
        table.add_row(str(layer), f"{share:.3%}")
    return table


def _parts_table(what: str, without_replay: Mapping[Any, Mismatch], replay: Mapping[Any, Mismatch]) -> Table:
    table = Table(
        what, "sampled tokens", "k3-KL native", "k3-KL replay", "sets that differ, native", title=f"by {what}"
    )
    for label, part in without_replay.items():
        own, replayed = part.logprobs, replay[label].logprobs
        table.add_row(
            str(label),
            f"{own.tokens:,}" if own else "0",
            _text(own.metrics["k3_kl"]) if own else "",
            _text(replayed.metrics["k3_kl"]) if replayed else "",
            f"{part.routes.router:.3%}" if part.routes else "",
        )
    return table
