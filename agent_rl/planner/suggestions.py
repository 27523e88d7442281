"""A plan with advice: where it does not fit, every knob is turned, the run planned again, and the gain noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from agent_rl.config import RunConfig
from agent_rl.planner.plan import Advice, PlannedPlace, RunPlan, gib
from agent_rl.planner.planner import plan_once

LEAST_GAIN = 0.02
"""A knob that brings less than this share of a place is not worth naming."""
MOST_KNOBS = 4
"""Knobs that are turned together at most."""


def make_plan(config: RunConfig, *, tokens: int | None = None) -> RunPlan:
    """RunPlan ``config``; ``tokens``: the mean length of its trajectories (the longest allowed by default).

    Raises UserError where the model is not known or the hardware cannot be found out.
    """
    plan = plan_once(config, tokens=tokens)
    return plan if plan.problems else replace(plan, advice=tuple(advise(config, plan, tokens=tokens)))


def slots_refusal(config: RunConfig) -> str | None:
    """Why what ``train.balance`` borrows does not fit, in one line; None where it does, where the run would not fit
    without it either, and where it is not known what a GPU holds."""
    train, gpu = config.train, config.hardware.gpu_memory_gb
    if not train.balance.enabled or (train.device == "cuda" and gpu is None):
        return None
    without = plan_once(_with(config, {"train.balance.enabled": False}))
    for place in plan_once(config).places:
        other = without.place(place.name)
        if not place.fits and place.capacity is not None and other is not None and other.fits:
            return (
                f"train.balance: {place.name}: {gib(place.total)} do not fit in {gib(place.capacity)}, "
                f"{gib(other.total)} without balancing do; lower slots ({train.balance.slots}), or set transfer to "
                "{recompute: exchange, update: exchange}, which keeps no pool"
            )
    return None


def advise(config: RunConfig, plan: RunPlan, *, tokens: int | None) -> Iterator[Advice]:
    """For every place that is too small the knobs that help: those that are enough, the gentlest change first; then,
    where no single one is, several together; then the others, what brings most first."""
    for place in plan.places:
        if place.fits:
            continue
        found = [advice for advice, _ in _turned(config, place, tokens)]
        enough = [advice for advice in found if advice.enough]
        yield from enough or _together(config, place, tokens)
        yield from sorted((advice for advice in found if not advice.enough), key=lambda advice: advice.total)


def _turned(config: RunConfig, place: PlannedPlace, tokens: int | None) -> Iterator[tuple[Advice, RunConfig]]:
    """Every knob that makes ``place`` noticeably smaller, and the config with it turned."""
    for change, other in _variants(config):
        changed = plan_once(other, tokens=tokens).place(place.name)
        if changed is not None and changed.total <= (1 - LEAST_GAIN) * place.total:
            yield Advice(place.name, change, changed.total, changed.fits), other


def _together(config: RunConfig, place: PlannedPlace, tokens: int | None) -> Iterator[Advice]:
    """The knob that brings most, then on top of it the next, until it fits; nothing where a few do not."""
    changes: list[str] = []
    for _ in range(MOST_KNOBS):
        options = list(_turned(config, place, tokens))
        if not options:
            return
        best, config = min(options, key=lambda option: option[0].total)
        changes.append(best.change)
        if best.enough:
            yield Advice(place.name, " ".join(changes), best.total, enough=True)
            return
        after = plan_once(config, tokens=tokens).place(place.name)
        assert after is not None
        place = after


def _variants(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes that cost speed or machines and not what is learned, cheapest first; then those that change the run."""
    knobs: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("train.parallel.distributed_optimizer", lambda _: True),
        ("train.recompute", lambda _: "full"),
        ("train.offload_optimizer", lambda _: True),
        ("train.offload_activations", lambda _: True),
        ("train.microbatch_tokens", lambda _: config.rollout.max_tokens),
        *((f"train.parallel.{name}", _double) for name in ("context", "expert", "tensor", "pipeline", "world_size")),
        ("train.balance.slots", _half),
        ("train.balance.transfer.recompute", lambda _: "exchange"),
        ("engine.max_total_tokens", _half),
        ("engine.max_total_tokens", lambda value: value // 4),
        ("engine.gpus", _double),
        ("train.keep_checkpoints", lambda _: 1),
        ("train.optimizer_moments", lambda _: "bfloat16"),
        ("rollout.max_tokens", _half),  # and with it the micro-batch
        ("rollout.tasks_per_step", _half),
    )
    for key, change in knobs:
        before = _get(config, key)
        after = change(before)
        if after == before or not after:
            continue
        changes = {key: after}
        if key == "rollout.max_tokens":
            changes["train.microbatch_tokens"] = min(after, config.train.microbatch_tokens)
        try:
            yield " ".join(f"{name}={_yaml(value)}" for name, value in changes.items()), _with(config, changes)
        except ValidationError:
            continue  # a knob that this config cannot take


def _double(value: int) -> int:
    return 2 * value


def _half(value: int) -> int:
    return value // 2


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _get(config: RunConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _with(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    data = config.model_dump()
    for key, value in changes.items():
        node = data
        *parents, leaf = key.split(".")
        for part in parents:
            node = node[part]
        node[leaf] = value
    return RunConfig.model_validate(data)
