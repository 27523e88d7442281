"""The typed schema of a config, a section a class. Imports no torch. :mod:`agent_rl.config.loader` reads the files."""

from __future__ import annotations

from agent_rl.config.base import MAX_STALENESS
from agent_rl.config.engine import EngineConfig, addresses
from agent_rl.config.layout import BalanceConfig, ParallelConfig
from agent_rl.config.r3 import Ablation, R3Config, RouteSource, TraceConfig
from agent_rl.config.rollout import DynamicSamplingConfig, HarnessConfig, RolloutConfig
from agent_rl.config.run import RunConfig
from agent_rl.config.tasks import OWN_SCAFFOLD, EnvConfig, EvalConfig, SandboxConfig
from agent_rl.config.train import (
    AdvantageScale,
    Baseline,
    Clip,
    CorrectionConfig,
    CorrectionMask,
    CorrectionWeight,
    FilterKind,
    KlConfig,
    KlEstimator,
    LoraConfig,
    OldLogprobSource,
    OverlongConfig,
    Recompute,
    Replay,
    TrainConfig,
)
from agent_rl.config.watch import GuardConfig, LimitConfig, OnSpike, SinkName

__all__ = [
    "MAX_STALENESS",
    "OWN_SCAFFOLD",
    "Ablation",
    "AdvantageScale",
    "BalanceConfig",
    "Baseline",
    "Clip",
    "CorrectionConfig",
    "CorrectionMask",
    "CorrectionWeight",
    "DynamicSamplingConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "FilterKind",
    "GuardConfig",
    "HarnessConfig",
    "KlConfig",
    "KlEstimator",
    "LimitConfig",
    "LoraConfig",
    "OldLogprobSource",
    "OnSpike",
    "OverlongConfig",
    "ParallelConfig",
    "R3Config",
    "Recompute",
    "Replay",
    "RolloutConfig",
    "RouteSource",
    "RunConfig",
    "SandboxConfig",
    "SinkName",
    "TraceConfig",
    "TrainConfig",
    "addresses",
]
