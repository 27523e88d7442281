"""``agent-rl r3 compare``: one rollout, then trainer passes with and without replay, and their mismatch reports.

::

    config or run ── rollout (or stored trajectories) ──▶ samples ──▶ with replay            against the engine
                                                                 ├──▶ without replay         against the engine
                                                                 └──▶ without replay, again  against without replay
    ──▶ OUT/compare.json, probabilities.png, f_tau.png, routers.png, trajectories/

The second pass without replay measures the trainer's noise. It packs the sequences into other micro-batches, because
the same micro-batches give identical bits on a CPU. With ``--rescore`` the engine evaluates the trajectories again; the
trainer is compared with this evaluation, and a fourth report compares it with the sampled values (the engine's noise).

A dense model has no routes, so no pass with replay. ``--dense`` names the directory of such a comparison, whose figures
then stand beside those of the MoE model, as in the R3 paper's figure 2 (arXiv 2510.11370).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.table import Table

from agent_rl.commands.rollout import roll_out
from agent_rl.config import Replay, RunConfig
from agent_rl.config.loader import load_config, load_recorded
from agent_rl.controller import preflight
from agent_rl.controller.preflight import Checked
from agent_rl.controller.rollout_runtime import open_rollout_runtime
from agent_rl.engine.types import Scores
from agent_rl.errors import AgentRlError, ConfigError
from agent_rl.monitoring.console import Display
from agent_rl.rollout.records import read_trajectories, steps_on_disk
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.types import Group, Sample, Trajectory
from agent_rl.utils import foreign
from agent_rl.utils.run_files import write_atomic, write_json
from r3.mismatch.breakdown import Mismatch, MismatchReport, Pair, mismatch_report
from r3.mismatch.figures import differing_routers, f_tau_curves, probability_scatter
from r3.mismatch.report import (
    TOKEN_VALUES,
    Estimate,
    LogprobMismatch,
    estimate_ratios,
    log_ratios,
    per_sequence,
)
from r3.routing import Routing, Span, SpanKind
from r3.stitch import RouteStitcher

ESTIMATE = ("value", "low", "high")
PASS_TOKENS = 65_536
"""Tokens per call to the trainer. The progress bar advances after every call."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainerPass:
    """Results of one pass for each sample: log-probs ``[S]`` and the experts used ``[S, moe_layers, top_k]``, of a
    dense model with 0 layers."""

    logprobs: Sequence[NDArray[np.float32]]
    routes: Sequence[Routing]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The mismatch reports of all passes.

    ``replay``: None for a dense model. ``noise``: second pass without replay against the first.
    ``without_over_with_replay``: per log-prob metric, the mean without replay over the mean with replay. ``engine``:
    rescored against sampled values; None without ``--rescore``. ``dense``: of the trainer against the engine, for the
    dense model of ``--dense``.
    """

    replay: MismatchReport | None
    without_replay: MismatchReport
    noise: MismatchReport
    without_over_with_replay: Mapping[str, Estimate]
    engine: MismatchReport | None = None
    dense: LogprobMismatch | None = None

    @property
    def reports(self) -> dict[str, MismatchReport]:
        reports = {"without_replay": self.without_replay, "replay": self.replay, "without_replay_again": self.noise}
        return {key: report for key, report in {**reports, "engine_again": self.engine}.items() if report is not None}

    @property
    def logprobs(self) -> dict[str, LogprobMismatch | None]:
        """The log-prob figures of each report, then those of the dense model."""
        figures = {key: report.total.logprobs for key, report in self.reports.items()}
        return figures if self.dense is None else {**figures, "dense": self.dense}


async def run_compare(
    source: Path,
    overrides: Sequence[str],
    *,
    tasks: int,
    split: str,
    out: Path | None,
    trajectories: Path | None,
    rescore: bool,
    dense: Path | None = None,
) -> None:
    """Compare engine and trainer on the model of ``source``, a config or the directory of a finished run.

    Rolls out ``tasks`` of ``split``, ``group_size`` times each, unless ``trajectories`` names a directory with
    trajectories (of an earlier comparison, or all steps of a run). ``rescore``: the engine evaluates them again, and
    the trainer is compared with that evaluation. ``dense``: directory of a dense model's comparison. Raises ConfigError
    if the inputs cannot be compared.
    """
    beside = None if dense is None else read_dense(dense)
    config = load_source(source, overrides)
    if rescore and config.rollout.logprob_temperature != 1:
        raise ConfigError(
            "--rescore requires rollout.temperature=1: SGLang returns prompt log-probs at temperature 1 only, and "
            f"rollout.temperature is {config.rollout.temperature:g}"
        )
    checked = preflight.run(_with_replay(config, "off"), "rollout" if trajectories is None or rescore else "model")
    routes = checked.model_spec.layout is not None
    if routes:
        checked = replace(checked, config=_with_replay(checked.config, "r3"))
    config = checked.config
    preflight.check_lengths(config.rollout, config.train, config.model, checked.model_spec)
    out = out or _directory(source, config) / "compare"
    display = Display(f"r3 compare {config.name}")
    with display:
        if trajectories is None:
            groups = (await roll_out(checked, out, display, tasks=tasks, split=split)).groups
        else:
            groups = read_groups(trajectories)
        every = [trajectory for group in groups for trajectory in group.trajectories]
        sampled = comparable_trajectories(every, routes=routes)
        compared = await rescore_trajectories(checked, out, display, sampled) if rescore else sampled
        display.stage("starting the trainer")
        async with RayTrainer(config, checked.model_spec) as trainer:
            passes = await _run_passes(trainer, config, compared, display)
        display.stage("reports")
        comparison = replace(compare(compared, *passes), dense=beside)
        if rescore:
            comparison = replace(comparison, engine=_report(sampled, engine_pass(compared), engine_pass(sampled)))
        write_json(out / "compare.json", {**_settings(config, compared), **comparison_json(comparison)})
        _draw(out, compared, passes[0], passes[1], comparison)
    for table in tables(comparison):
        display.table(table)
    display.note(f"{out}: compare.json, probabilities.png, f_tau.png" + ", routers.png" * routes)


def _with_replay(config: RunConfig, replay: Replay) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"replay": replay})})


def read_dense(directory: Path) -> LogprobMismatch:
    """The figures of trainer against engine in the comparison of a dense model in ``directory``. Raises ConfigError for
    a directory without one."""
    try:
        found = orjson.loads((directory / "compare.json").read_bytes())
        values = found["without_replay"]["total"]["logprobs"]
        metrics = {
            name: Estimate(*(_number(part[key]) for key in ESTIMATE)) for name, part in values["metrics"].items()
        }
        curves = np.array(values["taus"], np.float64), np.array(values["f_tau"], np.float64)
        figures = LogprobMismatch(values["tokens"], values["sequences"], metrics, *curves)
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--dense {directory}: no compare.json of `agent-rl r3 compare` ({error})") from None
    if "replay" in found or not metrics.keys() >= TOKEN_VALUES.keys():
        raise ConfigError(f"--dense {directory}: this is the comparison of a model with experts; name a dense model's")
    return figures


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def load_source(source: Path, overrides: Sequence[str]) -> RunConfig:
    """The config at ``source``. For a run's directory: its resolved config, with the trained model."""
    if not source.is_dir():
        return load_config(source, overrides)
    try:
        foreign.read_config(source.resolve())  # refuses a link and one that expands
    except AgentRlError as error:
        raise ConfigError(f"{source}: {error}") from None
    config = load_recorded(source / "config.yaml", overrides)
    if not (source / "model" / "config.json").is_file():
        raise ConfigError(f"{source}: no trained model in {source / 'model'}: the run has not finished")
    return config.model_copy(update={"model": source / "model"})


def _directory(source: Path, config: RunConfig) -> Path:
    return source if source.is_dir() else config.run_dir


def read_groups(directory: Path) -> tuple[Group, ...]:
    """The groups of all steps in ``directory``. Raises ConfigError if there is none."""
    steps = steps_on_disk(directory)
    if not steps:
        raise ConfigError(
            f"--trajectories {directory}: no trajectories found; expected the directory of a run or of a comparison"
        )
    try:
        return tuple(group for step in steps for group in read_trajectories(directory.resolve(), step))
    except AgentRlError as error:
        raise ConfigError(f"--trajectories {directory}: {error}") from None


def comparable_trajectories(trajectories: Sequence[Trajectory], *, routes: bool = True) -> list[Trajectory]:
    """The trajectories with a sampled token. Raises ConfigError if there is none, or with ``routes`` if one has no
    routes."""
    sampled = [trajectory for trajectory in trajectories if trajectory.loss_mask[1:].any()]
    if not sampled:
        raise ConfigError(f"nothing to compare: none of {len(trajectories)} trajectories has a sampled token")
    for trajectory in sampled:
        if routes and trajectory.routing is None:
            raise ConfigError(f"nothing to compare: a trajectory of {trajectory.task_id} has no routes")
    return sampled


async def rescore_trajectories(
    checked: Checked, out: Path, display: Display, trajectories: Sequence[Trajectory]
) -> list[Trajectory]:
    """The trajectories with log-probs and routes from a new prefill by the engine."""
    routes = checked.config.captures_routes
    async with open_rollout_runtime(checked, out / "logs", display, routes=routes) as runtime:
        display.stage("evaluation by the engine", total=len(trajectories))

        async def rescore(index: int, trajectory: Trajectory) -> Trajectory:
            async with runtime.limiter:
                scores = await runtime.engine.rescore(trajectory.tokens.tolist(), session=str(index), routes=routes)
            display.advance()
            return _with_scores(trajectory, scores)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(rescore(*pair)) for pair in enumerate(trajectories)]
    return [task.result() for task in tasks]


def _with_scores(trajectory: Trajectory, scores: Scores) -> Trajectory:
    routing, length = trajectory.routing, len(trajectory.tokens)
    logprobs = np.where(trajectory.loss_mask, scores.logprobs, 0).astype(np.float32)
    if routing is not None:
        stitcher = RouteStitcher(moe_layers=routing.moe_layers, top_k=routing.top_k, num_experts=routing.num_experts)
        stitcher.append(scores.routing, sequence=length)
        routing = stitcher.finish(length)
    return replace(trajectory, logprobs=logprobs, routing=routing, kept=None)


async def _run_passes(
    trainer: RayTrainer, config: RunConfig, trajectories: Sequence[Trajectory], display: Display
) -> tuple[TrainerPass | None, TrainerPass, TrainerPass]:
    """One pass with replay (None for a dense model) and two without; the second uses other micro-batches."""
    samples = [Sample(t.tokens, t.loss_mask, t.logprobs, 0.0, t.routing, kept=t.kept) for t in trajectories]
    temperature = config.rollout.logprob_temperature  # greedy rollouts record log-probs at temperature 1

    async def run(name: str, budget: int, *, replay: bool) -> TrainerPass:
        display.stage(name, total=len(samples))
        logprobs: list[NDArray[np.float32]] = []
        routes = [_routing(trajectory) for trajectory in trajectories]
        for chunk in token_chunks([len(sample.tokens) for sample in samples], budget):
            part = samples[chunk]
            if config.captures_routes:
                pairs = await trainer.routes(part, replay=replay, temperature=temperature)
                logprobs += [values for values, _ in pairs]
                used = [experts for _, experts in pairs]
                routes[chunk] = [replace(own, experts=new) for own, new in zip(routes[chunk], used, strict=True)]
            else:
                of_part = await trainer.logprobs(part, replay=False, temperature=temperature)
                logprobs += [np.array(values, np.float32) for values in of_part]
            display.advance(chunk.stop - chunk.start)
        return TrainerPass(logprobs, routes)

    half = max(1, min(PASS_TOKENS, sum(len(sample.tokens) for sample in samples)) // 2)
    return (
        await run("pass with replay", PASS_TOKENS, replay=True) if config.captures_routes else None,
        await run("pass without replay", PASS_TOKENS, replay=False),
        await run("pass without replay, again", half, replay=False),
    )


def token_chunks(lengths: Sequence[int], budget: int) -> list[slice]:
    """Slices of consecutive sequences with at most ``budget`` tokens in total; a longer sequence gets its own slice."""
    starts, tokens = [0], 0
    for index, length in enumerate(lengths):
        if tokens and tokens + length > budget:
            starts.append(index)
            tokens = 0
        tokens += length
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(lengths)], strict=True)]


def compare(
    trajectories: Sequence[Trajectory], replay: TrainerPass | None, without_replay: TrainerPass, again: TrainerPass
) -> Comparison:
    """Reports of both passes against the engine, and of the second pass without replay against the first."""
    engine, ratios = engine_pass(trajectories), dict[str, Estimate]()
    if replay is not None:
        base = _metric_sums(trajectories, replay, engine)
        sums = _metric_sums(trajectories, without_replay, engine)
        ratios = {name: estimate_ratios({name: column}, base[name])[name] for name, column in sums.items()}
    return Comparison(
        replay=None if replay is None else _report(trajectories, replay, engine),
        without_replay=_report(trajectories, without_replay, engine),
        noise=_report(trajectories, again, without_replay),
        without_over_with_replay=ratios,
    )


def engine_pass(trajectories: Sequence[Trajectory]) -> TrainerPass:
    """The engine's log-probs and experts of the trajectories, in the form of a trainer pass."""
    return TrainerPass([t.logprobs for t in trajectories], [_routing(t) for t in trajectories])


def _report(trajectories: Sequence[Trajectory], passed: TrainerPass, reference: TrainerPass) -> MismatchReport:
    return mismatch_report(
        [
            Pair(
                logprobs=passed.logprobs[index],
                reference_logprobs=reference.logprobs[index],
                sampled=trajectory.loss_mask,
                turns=turn_numbers(trajectory),
                routes=passed.routes[index],
                reference_routes=reference.routes[index],
            )
            for index, trajectory in enumerate(trajectories)
        ]
    )


def _metric_sums(
    trajectories: Sequence[Trajectory], passed: TrainerPass, engine: TrainerPass
) -> dict[str, NDArray[np.float64]]:
    """Each metric's sum over the sampled tokens of each trajectory, shape ``[trajectories]``."""
    trainer_T, engine_T = _sampled(trajectories, passed), _sampled(trajectories, engine)
    sequence = np.repeat(np.arange(len(trajectories)), [t.loss_mask[1:].sum() for t in trajectories])
    log_r = log_ratios(trainer_T, engine_T)
    return {name: per_sequence(values(log_r), sequence) for name, values in TOKEN_VALUES.items()}


def _sampled(trajectories: Sequence[Trajectory], passed: TrainerPass) -> NDArray[np.float32]:
    """The log-probs of all sampled tokens, one trajectory after another."""
    both = zip(trajectories, passed.logprobs, strict=True)
    return np.concatenate([logprobs[1:][trajectory.loss_mask[1:]] for trajectory, logprobs in both])


def turn_numbers(trajectory: Trajectory) -> NDArray[np.int64]:
    """Turn number of each token, from 1, ``[S]``. Prompt and observation tokens belong to the turn that follows."""
    ends = [turn.prompt_tokens + turn.completion_tokens + turn.inserted_tokens for turn in trajectory.turns]
    return np.searchsorted(ends, np.arange(len(trajectory.tokens)), side="right") + 1


def _routing(trajectory: Trajectory) -> Routing:
    """The routes; of a dense model rows of 0 layers, with the weight version of each turn."""
    if trajectory.routing is not None:
        return trajectory.routing
    turns, length = turn_numbers(trajectory), len(trajectory.tokens)
    starts = [int(np.searchsorted(turns, number)) for number in range(1, len(trajectory.turns) + 1)]
    pieces = zip(starts, [*starts[1:], length], trajectory.turns, strict=True)
    spans = [Span(first, last, turn.weight_version, "", SpanKind.MISSING) for first, last, turn in pieces]
    return Routing(np.zeros((length, 0, 1), np.uint8), np.zeros(length, bool), tuple(spans), 1)


def _settings(config: RunConfig, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    return {
        "model": str(config.model),
        "engine_dtype": config.engine.dtype,
        "trainer_dtype": config.train.dtype,
        "temperature": config.rollout.temperature,
        "trajectories": len(trajectories),
        "tokens": sum(len(trajectory.tokens) for trajectory in trajectories),
        "sampled_tokens": sum(int(trajectory.loss_mask[1:].sum()) for trajectory in trajectories),
    }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "without_over_with_replay": {key: asdict(ratio) for key, ratio in comparison.without_over_with_replay.items()},
        **{key: report.to_json() for key, report in comparison.reports.items()},
    }


def _draw(
    out: Path,
    sampled: Sequence[Trajectory],
    replay: TrainerPass | None,
    without_replay: TrainerPass,
    comparison: Comparison,
) -> None:
    engine = np.concatenate([t.logprobs[1:][t.loss_mask[1:]] for t in sampled])
    scatter = {"without replay": without_replay, "with replay": replay}
    panels = {name: (_sampled(sampled, passed), engine) for name, passed in scatter.items() if passed is not None}
    figures = comparison.logprobs
    curves = {name.replace("_", " "): values.f_tau for name, values in figures.items() if values is not None}
    write_atomic(out / "probabilities.png", probability_scatter(panels))
    write_atomic(out / "f_tau.png", f_tau_curves(curves))
    if comparison.without_replay.total.routes is not None:
        write_atomic(out / "routers.png", differing_routers(comparison.without_replay.total.routes))


def tables(comparison: Comparison) -> list[Table]:
    """Log-prob metrics of all passes; differing experts without replay by layer; both by turn and weight version."""
    return [
        _metrics_table(comparison),
        _layers_table(comparison),
        _breakdown_table(
            "turn", comparison.without_replay.by_turn, {} if comparison.replay is None else comparison.replay.by_turn
        ),
        _breakdown_table(
            "weight version",
            comparison.without_replay.by_weight_version,
            {} if comparison.replay is None else comparison.replay.by_weight_version,
        ),
    ]


COLUMNS = {
    "without_replay": "without replay",
    "replay": "replay",
    "ratio": "without / with",
    "without_replay_again": "noise of the trainer",
    "engine_again": "noise of the engine",
    "dense": "dense model",
}


def _metrics_table(comparison: Comparison) -> Table:
    routes = {key: report.total.routes for key, report in comparison.reports.items()}
    figures, ratios = comparison.logprobs, comparison.without_over_with_replay
    columns = [name for name in COLUMNS if name in figures or (name == "ratio" and ratios)]
    table = Table("against the engine", *(COLUMNS[name] for name in columns))
    for metric in TOKEN_VALUES:
        # The mean factor is close to 1.
        digits = ".5f" if metric == "token_mult_prob_error" else ".3g"
        cells = {name: _text(values.metrics[metric], digits) for name, values in figures.items() if values is not None}
        if ratios:
            cells["ratio"] = _text(ratios[metric])
        table.add_row(metric, *(cells.get(name, "") for name in columns))
    for level, unit in (("router", "share of routers"), ("token", "share of tokens"), ("sequence", "layers per token")):
        cells = {name: f"{getattr(values, level):.3g}" for name, values in routes.items() if values is not None}
        table.add_row(f"{level}_mismatch\n({unit})", *(cells.get(name, "") for name in columns))
    return table


def _text(estimate: Estimate, digits: str = ".3g") -> str:
    """The value and its interval; "-" for a ratio to 0."""
    if not np.isfinite(estimate.value):
        return "-"
    return f"{estimate.value:{digits}}\n[{estimate.low:{digits}}, {estimate.high:{digits}}]"


def _layers_table(comparison: Comparison) -> Table:
    table = Table("MoE layer", "expert sets that differ, without replay", title="routers by layer")
    routes = comparison.without_replay.total.routes
    for layer, share in enumerate(routes.by_layer if routes else ()):
        table.add_row(str(layer), f"{share:.3%}")
    return table


def _breakdown_table(label: str, without_replay: Mapping[Any, Mismatch], replay: Mapping[Any, Mismatch]) -> Table:
    table = Table(
        label,
        "sampled tokens",
        "k3-KL without replay",
        "k3-KL replay",
        "expert sets that differ, without replay",
        title=f"by {label}",
    )
    for value, part in without_replay.items():
        logprobs, replayed = part.logprobs, replay[value].logprobs if replay else None
        table.add_row(
            str(value),
            f"{logprobs.tokens:,}" if logprobs else "0",
            _text(logprobs.metrics["k3_kl"]) if logprobs else "",
            _text(replayed.metrics["k3_kl"]) if replayed else "",
            f"{part.routes.router:.3%}" if part.routes else "",
        )
    return table
