"""The trainer as the controller sees it. The controller's side imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agent_rl.types import Sample
from agent_rl.weight_sync.order import PublishReport


class Trainer(Protocol):
    """Owns the training weights, optimizer and schedule; ranks are Ray actors behind it. All methods are awaitable."""

    async def step(
        self,
        samples: Sequence[Sample],
        *,
        measure_native: bool,
        step: int | None = None,
        spike_norm: float | None = None,
    ) -> Mapping[str, float]:
        """One GRPO global step: old log-probs (replayed), then the update(s) (replayed).

        An update whose loss or gradient norm is not finite is left out and counted; one whose norm is beyond
        ``spike_norm`` is dealt with by policy.
        ``measure_native`` also runs a pass without replay for the ``mismatch_native/*`` metrics. Returns metrics under
        the names of docs/metrics.md (``train/*``, ``mismatch/*``, ``r3/*``, ``time/old_logprob``, ``time/update``).
        """
        ...

    async def logprobs(self, samples: Sequence[Sample], *, replay: bool) -> Sequence[Sequence[float]]:
        """Log-probs of every token given those before it (0 for the first), one list a sample, in float32."""
        ...

    async def publish(self, engine_urls: Sequence[str], weight_version: str) -> PublishReport:
        """Send the weights to every engine under ``weight_version``; the report names those that did not take them."""
        ...

    async def save(self, folder: Path) -> None:
        """Write a checkpoint that :meth:`load` resumes from exactly; atomic (a killed save leaves nothing)."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint."""
        ...

    async def close(self) -> None:
        """Stop the ranks. Idempotent."""
        ...
