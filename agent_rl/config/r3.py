"""The section ``r3``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from agent_rl.config.base import Section

RouteSource = Literal["sampled", "latest"]
Ablation = Literal[
    "none", "old_logprob_only", "update_only", "sampled_only", "fresh_only", "shifted", "alternate_layers"
]


class TraceConfig(Section):
    """Tracing of routes from the engine to the trainer. `agent-rl r3 check` verifies a trace."""

    steps: tuple[int, ...] = Field((), description="Global steps to trace. Empty: no step.")
    samples: int = Field(4, gt=0, description="Samples to trace per data-parallel rank.")
    microbatches: int = Field(2, gt=0, description="Micro-batches to trace per pass and data-parallel rank.")
    previews: int = Field(8, ge=0, description="Values of each tensor to write next to its hash.")
    verify_forward: bool = Field(True, description="Also compare the experts used by every router with the routes.")
    dir: Path | None = Field(None, description="Directory of the trace. null: r3_trace in the run's directory.")


class R3Config(Section):
    """Rollout routing replay (R3): which routes are recorded, and how missing routes are handled."""

    source: RouteSource = Field(
        "sampled",
        description="Which routes of a token are replayed. sampled: those computed when it was sampled. latest: those "
        "of the last prefill.",
    )
    missing: Literal["without_replay", "drop_sample", "error"] = Field(
        "error",
        description="How to handle tokens without routes. without_replay: the trainer's router selects their experts. "
        "drop_sample: drop the trajectory. error: stop the run.",
    )
    missing_budget: float = Field(
        0.01, ge=0, le=1, description="Share of a step's tokens that may lack routes. More ends the run."
    )
    probe: bool = Field(True, description="Test the engine's route capture before training starts.")
    audit: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of trajectories whose routes are requested from the engine a second time and compared.",
    )
    trace: TraceConfig = Field(TraceConfig(), description="Tracing of routes from the engine to the trainer.")
    ablation: Ablation = Field(
        "none",
        description="Experiment that discards or corrupts routes; not for production runs. none: replay all routes. "
        "old_logprob_only, update_only: replay in one pass only. sampled_only: only rows from which a token was "
        "sampled. fresh_only: no rows of older weights. shifted: each row moved by one token. alternate_layers: every "
        "second MoE layer.",
    )

    @property
    def allows_missing(self) -> bool:
        """Whether a rollout continues if an engine's response has no routes."""
        return self.missing != "error"
