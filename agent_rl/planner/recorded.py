"""Adds the duration to a plan, corrected by the metrics of a run where one is given.

A run replaces the assumptions about episodes and sandboxes by its own means, and each phase of the prediction is
multiplied by what that phase took in the run over what the same model predicts for the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from agent_rl.config import RunConfig
from agent_rl.config.loader import load_config
from agent_rl.errors import UserError
from agent_rl.monitoring.metrics_log import read_metrics
from agent_rl.planner.assumptions import Assumptions, slowdown
from agent_rl.planner.known_models import planned_model
from agent_rl.planner.plan import PhaseTime, RunPlan, TimePlan
from agent_rl.planner.planner import planned_device
from agent_rl.planner.step_time import plan_time

METRICS = {
    "rollout": "time/rollout",
    "old log-probs": "time/old_logprob",
    "log-probs without replay": "time/logprob_without_replay",
    "reference log-probs": "time/reference_logprob",
    "update": "time/update",
    "weight sync": "time/weight_sync",
}
"""The metric of a phase. That of the update includes the optimizer."""
_EPISODE = {
    "turns": "rollout/turns_mean",
    "tokens": "rollout/tokens_mean",
    "sampled_tokens": "rollout/sampled_tokens_mean",
}


def predict_time(
    plan: RunPlan, config: RunConfig, *, tokens: int | None, settings: Sequence[str], run: Path | None
) -> RunPlan:
    """``plan`` with its duration; ``tokens``: mean length of an episode; ``settings``: assumptions as name=value.
    Without ``run``, a plan for CPUs measures this machine's speed, if torch is installed. Raises UserError. A plan with
    problems has no duration."""
    if plan.problems:
        return plan
    assume = Assumptions.of(config, plan.device)
    factors: Mapping[str, float] = {}
    if run is not None:
        values, name = step_means(run), f"measured in {run}"
        of_run = load_config(run / "config.yaml", ())
        model, device = planned_model(of_run.model), planned_device(of_run.train, of_run.hardware)
        measured = measured_assumptions(values)
        predicted = plan_time(of_run, model, device, Assumptions.of(of_run, device).changed(name, **measured))
        factors = phase_factors(predicted, values)
        assume = assume.changed(name, **measured)
    elif plan.device == "cpu" and importlib.util.find_spec("torch"):
        assume = assume.slowed(slowdown())
    if tokens is not None:
        factor = tokens / assume["tokens"]
        scaled = {name: factor * assume[name] for name in ("tokens", "sampled_tokens", "prompt_tokens")}
        assume = assume.changed("--tokens", **scaled)
    try:
        time = plan_time(config, plan.model, plan.device, assume.overridden(settings))
    except ZeroDivisionError:
        raise UserError("--assume: a speed, a share of one, cores or tokens are 0: give a positive number") from None
    return replace(plan, time=corrected(time, factors))


def step_means(run: Path) -> dict[str, float]:
    """The mean of each metric over the steps of ``run`` whose episodes all ran in this start; a missing value counts as
    0. Raises UserError."""
    try:
        rows = read_metrics(run)
    except (OSError, orjson.JSONDecodeError) as error:
        raise UserError(f"--from {run}: no readable metrics.jsonl ({error}): name the directory of a run") from None
    rows = [row for row in rows if "rollout/turns_mean" in row and not row.get("time/rollout_recovered")]
    if not rows:
        raise UserError(
            f"--from {run}: no step has ended yet: name the directory of a run with at least one finished step"
        )
    names = {*METRICS.values(), *_EPISODE.values(), "train/samples", "rollout/trajectories"}
    return {name: sum(row.get(name, 0.0) for row in rows) / len(rows) for name in names}


def measured_assumptions(values: Mapping[str, float]) -> dict[str, float]:
    """The assumptions about episodes that the metrics replace."""
    found = {name: values[metric] for name, metric in _EPISODE.items()}
    return found | {"trained_share": values["train/samples"] / values["rollout/trajectories"]}


def phase_factors(predicted: TimePlan, values: Mapping[str, float]) -> dict[str, float]:
    """Measured over predicted seconds of each phase that has been measured."""
    seconds = {phase.name: phase.seconds for phase in predicted.phases}
    seconds["update"] += seconds["optimizer"]
    measured = {name: values[metric] for name, metric in METRICS.items() if name in seconds}
    return {name: took / seconds[name] for name, took in measured.items() if took > 0}


def corrected(time: TimePlan, factors: Mapping[str, float]) -> TimePlan:
    """``time`` with each phase multiplied by its factor; evaluations have the rollout's, the optimizer the update's."""
    same = {"evaluations": "rollout", "optimizer": "update"}

    def correct(phase: PhaseTime) -> PhaseTime:
        factor = factors.get(same.get(phase.name, phase.name))
        if factor is None:
            return phase
        return replace(phase, seconds=factor * phase.seconds, bound=f"{phase.bound}; x {factor:.2f} as in the run")

    training, outside = (tuple(map(correct, phases)) for phases in (time.training, time.outside))
    return replace(time, rollout=correct(time.rollout), training=training, sync=correct(time.sync), outside=outside)
