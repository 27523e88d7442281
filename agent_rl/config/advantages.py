"""The registries of baselines and scales of advantages. Their formulas are in agent_rl/controller/advantages.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agent_rl.errors import ConfigError
from sandbox.registry import Registry

Over = Literal["trajectory", "group", "batch"]


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """One baseline or scale.

    ``formula``: import path ``package.module:function`` of a :data:`agent_rl.controller.advantages.BaselineFormula` or
    ``ScaleFormula``. ``over``: the trajectories that it sees together, those of a group or of the whole step;
    "trajectory": each on its own, also where all rewards are equal.
    """

    formula: str
    over: Over = "group"


_FORMULAS = "agent_rl.controller.advantages"
MEAN = AdvantageSpec(f"{_FORMULAS}:mean_reward")
LEAVE_ONE_OUT = AdvantageSpec(f"{_FORMULAS}:mean_of_others")
BATCH_MEAN = AdvantageSpec(f"{_FORMULAS}:mean_reward", over="batch")
CRITIC = AdvantageSpec(f"{_FORMULAS}:no_baseline", over="trajectory")
GROUP_STD = AdvantageSpec(f"{_FORMULAS}:by_std")
BATCH_STD = AdvantageSpec(f"{_FORMULAS}:normalized_over_tokens", over="batch")
GROUP_MEAN = AdvantageSpec(f"{_FORMULAS}:by_mean")
NONE = AdvantageSpec(f"{_FORMULAS}:unscaled")

BASELINES = Registry(
    "baseline",
    "agent_rl.baselines",
    {
        "mean": "agent_rl.config.advantages:MEAN",
        "leave_one_out": "agent_rl.config.advantages:LEAVE_ONE_OUT",
        "batch": "agent_rl.config.advantages:BATCH_MEAN",
        "critic": "agent_rl.config.advantages:CRITIC",
    },
    ConfigError,
)
SCALES = Registry(
    "advantage scale",
    "agent_rl.advantage_scales",
    {
        "group": "agent_rl.config.advantages:GROUP_STD",
        "batch": "agent_rl.config.advantages:BATCH_STD",
        "mean": "agent_rl.config.advantages:GROUP_MEAN",
        "none": "agent_rl.config.advantages:NONE",
    },
    ConfigError,
)


def baseline_spec(name: str) -> AdvantageSpec:
    """The baseline ``name``. Raises ConfigError if it is not registered or cannot be imported."""
    return _load(BASELINES, name)


def scale_spec(name: str) -> AdvantageSpec:
    """The scale ``name``. Raises ConfigError as :func:`baseline_spec`."""
    return _load(SCALES, name)


def _load(registry: Registry, name: str) -> AdvantageSpec:
    spec = registry.load(name)
    if not isinstance(spec, AdvantageSpec):
        raise ConfigError(f"{registry.kind} {name!r} is a {type(spec).__name__}, not an AdvantageSpec")
    return spec
