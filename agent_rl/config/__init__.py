"""The schema of a config, one class per section. Imports no torch. :mod:`agent_rl.config.loader` reads the files."""

from __future__ import annotations

from agent_rl.config.base import MAX_STALENESS
from agent_rl.config.engine import EngineConfig, parse_addresses
from agent_rl.config.monitoring import GuardConfig, LimitConfig, MonitoringConfig, OnSpike, SinkName
from agent_rl.config.r3 import Ablation, R3Config, RouteSource, TraceConfig
from agent_rl.config.rollout import (
    CompactionConfig,
    DynamicSamplingConfig,
    HarnessConfig,
    RolloutConfig,
    SubagentsConfig,
)
from agent_rl.config.run import RunConfig
from agent_rl.config.sft import SftConfig, SftSource
from agent_rl.config.tasks import DEFAULT_SCAFFOLD, EnvConfig, EvalConfig, EvalSettings, SandboxConfig, TaskSource
from agent_rl.config.train import (
    AdvantageScale,
    BalanceConfig,
    Baseline,
    Clip,
    CorrectionConfig,
    CorrectionMask,
    CorrectionWeight,
    DistillConfig,
    FilterKind,
    KlConfig,
    KlEstimator,
    LoraConfig,
    OldLogprobSource,
    OverlongConfig,
    ParallelConfig,
    Recompute,
    Replay,
    TrainConfig,
)
