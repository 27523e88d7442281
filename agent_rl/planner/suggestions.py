"""Adds advice to a plan that does not fit: plans the run again with each knob changed, and keeps what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from agent_rl.config import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.models.spec import ModelSpec
from agent_rl.planner.plan import Advice, PlannedResource, RunPlan, gib
from agent_rl.planner.planner import plan_once

MIN_GAIN = 0.02
"""Least gain, as a share of the resource, of a change that is suggested."""
MAX_KNOBS = 4
"""Maximum number of knobs changed together."""


def make_plan(config: RunConfig, *, tokens: int | None = None) -> RunPlan:
    """Plan ``config`` with advice; ``tokens``: mean length of its trajectories (default: the longest allowed).

    Raises UserError for an unknown model or for GPUs of unknown size.
    """
    plan = plan_once(config, tokens=tokens)
    return plan if plan.problems else replace(plan, advice=tuple(advise(config, plan, tokens=tokens)))


def check_expert_slots(config: RunConfig, model_spec: ModelSpec) -> None:
    """Raises ConfigError if the run does not fit in memory with ``train.balance`` but does without. Skipped if the
    memory of a GPU is unknown."""
    train, gpu = config.train, config.hardware.gpu_memory_gb
    if not train.balance.enabled or (train.device == "cuda" and gpu is None):
        return
    without = plan_once(_with(config, {"train.balance.enabled": False}), model_spec=model_spec)
    for resource in plan_once(config, model_spec=model_spec).resources:
        other = without.resource(resource.name)
        if not resource.fits and resource.capacity is not None and other is not None and other.fits:
            raise ConfigError(
                f"train.balance: {resource.name}: {gib(resource.total)} do not fit in {gib(resource.capacity)}, "
                f"{gib(other.total)} without balancing do; lower slots ({train.balance.slots}), or set transfer to "
                "{recompute: exchange, update: exchange}, which keeps no pool"
            )


def advise(config: RunConfig, plan: RunPlan, *, tokens: int | None) -> Iterator[Advice]:
    """Returns the changes that help each resource that is too small: first single changes that are enough, the mildest
    first, or else a combination; then the other changes, the largest gain first."""
    for resource in plan.resources:
        if resource.fits:
            continue
        single = [advice for advice, _ in _single_changes(config, resource, tokens)]
        enough = [advice for advice in single if advice.enough]
        yield from enough or _combined_changes(config, resource, tokens)
        yield from sorted((advice for advice in single if not advice.enough), key=lambda advice: advice.total)


def _single_changes(
    config: RunConfig, resource: PlannedResource, tokens: int | None
) -> Iterator[tuple[Advice, RunConfig]]:
    """Returns every single change that makes ``resource`` smaller by at least MIN_GAIN, with the changed config."""
    for change, other in _changed_configs(config):
        changed = plan_once(other, tokens=tokens).resource(resource.name)
        if changed is not None and changed.total <= (1 - MIN_GAIN) * resource.total:
            yield Advice(resource.name, change, changed.total, changed.fits), other


def _combined_changes(config: RunConfig, resource: PlannedResource, tokens: int | None) -> Iterator[Advice]:
    """Returns the greedy combination of changes until ``resource`` fits; nothing if MAX_KNOBS are too few."""
    changes: list[str] = []
    for _ in range(MAX_KNOBS):
        options = list(_single_changes(config, resource, tokens))
        if not options:
            return
        best, config = min(options, key=lambda option: option[0].total)
        changes.append(best.change)
        if best.enough:
            yield Advice(resource.name, " ".join(changes), best.total, enough=True)
            return
        after = plan_once(config, tokens=tokens).resource(resource.name)
        assert after is not None
        resource = after


def _changed_configs(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Returns changes, cheapest first: those that cost speed or nodes, then those that change what is trained."""
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
        ("rollout.max_tokens", _half),  # also changes the micro-batch
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
            continue  # not valid in this config


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
