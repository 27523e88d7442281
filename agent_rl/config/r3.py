"""The section ``r3``: which routes are replayed, and what of their way is written down."""

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
    """What of the routes' way from engine to trainer is written down, for ``agent-rl r3 check``."""

    steps: tuple[int, ...] = Field((), description="Global steps to trace; empty traces none.")
    samples: int = Field(4, gt=0, description="Samples to follow, of those that a data rank has in them.")
    microbatches: int = Field(2, gt=0, description="Micro-batches of a pass to trace, the first on every data rank.")
    previews: int = Field(8, ge=0, description="Values of a tensor that are written beside its hash.")
    verify_forward: bool = Field(True, description="Also compare the experts every router used with those given.")
    dir: Path | None = Field(None, description="Directory of the trace; None is r3_trace in the run's directory.")


class R3Config(Section):
    """Rollout routing replay: which routes are kept, and what is done where some are missing."""

    source: RouteSource = Field(
        "sampled", description="A token's routes: those it was sampled with, or the newest prefill's."
    )
    missing: Literal["without_replay", "drop_sample", "error"] = Field(
        "error", description="Tokens without routes: route natively, leave the trajectory out, or stop."
    )
    missing_budget: float = Field(
        0.01, ge=0, le=1, description="Share of a step's tokens that may lack routes before the run stops."
    )
    probe: bool = Field(True, description="Probe the engine's route capture before training starts.")
    audit: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the trajectories whose routes are asked for again, and compared.",
    )
    trace: TraceConfig = TraceConfig()
    ablation: Ablation = Field(
        "none", description="An experiment, not for training: which routes are kept from which pass; none: no route is."
    )

    @property
    def allows_missing(self) -> bool:
        """Whether a rollout goes on where an answer has no routes."""
        return self.missing != "error"
