"""A run's checkpoints: when one is due, that they are written beside the training, and which are kept.

::

    step N ── copy to host memory ──▶ step N+1 ...            training waits for the copy alone
                     └── written by the ranks' threads ──▶ renamed into place ──▶ older ones and journals removed

A checkpoint counts only when its directory is complete; until then the one before it and the journals since are
kept, so a kill at any moment loses no finished episode. A write that fails ends the run at the next step's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_rl.config import MAX_STALENESS, TrainConfig
from agent_rl.controller.async_rollout.task_ledger import Ledger
from agent_rl.controller.journal import Journal, lineage
from agent_rl.controller.state import RunState
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.checkpoint.directory import Manifest
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.utils.concurrency import shielded


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is after ``step``: the first ``position`` of the data that no batch took, those ``ahead`` that one
    took nevertheless, and the lineage of the ``weights`` and of those ``before``, which open positions may be of."""

    run_id: str
    step: int = 0
    position: int = 0
    weights: str = "start"
    ahead: tuple[int, ...] = ()
    before: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Progress:
        """What a checkpoint's manifest says."""
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in run.items()}
        return cls(**fields)

    def after(self, step: int, ledger: Ledger, metrics: Mapping[str, float]) -> Progress:
        """How far it is when ``step`` is done too, which reported ``metrics``."""
        before = (*self.before, self.weights)[-MAX_STALENESS:]
        return Progress(
            self.run_id, step, ledger.position, lineage(self.weights, metrics), ledger.ahead, before
        )  # fmt: skip

    @property
    def lineages(self) -> dict[int, str]:
        """The weights' names by version."""
        return {self.step - age: name for age, name in enumerate((self.weights, *reversed(self.before)))}

    def is_open(self, position: int) -> bool:
        """Whether no batch took ``position`` of the data."""
        return position >= self.position and position not in self.ahead


class Checkpoints:
    """Saves, keeps and finds the checkpoints of one run."""

    def __init__(self, config: TrainConfig, state: RunState, trainer: RayTrainer, journal: Journal) -> None:
        self._config, self._state, self._trainer, self._journal = config, state, trainer, journal
        self._writing: asyncio.Task[None] | None = None

    async def resume(self) -> tuple[Progress, Manifest | None]:
        """Load the newest checkpoint; where the run then is, and the checkpoint's manifest (None: there is none)."""
        checkpoint.tidy(self._state.checkpoints)
        latest = checkpoint.latest_checkpoint(self._state.checkpoints)
        manifest = None if latest is None else await self._trainer.load(latest)
        progress = Progress(self._state.run_id) if manifest is None else Progress.of(manifest.run)
        await asyncio.to_thread(self._journal.recover, progress.step, progress.lineages, progress.is_open)
        return progress, manifest

    def due(self, step: int) -> bool:
        """Whether the config wants a checkpoint after ``step``."""
        every = self._config.checkpoint_every
        return step == self._config.steps or bool(every and step % every == 0)

    def newest(self, until: int) -> Path | None:
        """The newest complete checkpoint of a step up to ``until``, or None."""
        found = checkpoint.complete_checkpoints(self._state.checkpoints)
        return max((f for f in found if checkpoint.checkpoint_step(f) <= until), key=lambda f: f.name, default=None)

    def newest_step(self) -> int:
        """The step of the newest complete checkpoint; 0 without."""
        latest = checkpoint.latest_checkpoint(self._state.checkpoints)
        return 0 if latest is None else checkpoint.checkpoint_step(latest)

    async def save(self, progress: Progress, *, good: int | None = None) -> None:
        """Begin the checkpoint of a step; returns when training may go on. Raises what the former one failed with.

        ``good``: a step after which the run may have gone wrong; the newest checkpoint up to it stays.
        """
        await self.finish()
        directory = self._state.checkpoint(progress.step)
        saved = await self._trainer.begin_save(directory, asdict(progress))
        self._writing = asyncio.create_task(self._complete(saved, progress, good))

    def check(self) -> None:
        """Raise what a write that has ended meanwhile failed with. Does not wait."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def finish(self) -> None:
        """Wait until the checkpoint under way is complete. Raises what it failed with."""
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        """Give up the checkpoint under way, if any; it leaves nothing. Idempotent."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _complete(self, saved: asyncio.Task[None], progress: Progress, good: int | None) -> None:
        await saved
        # To its end: another start of the run, in this process, looks through the same directories.
        await shielded(asyncio.to_thread(self._forget_old, progress, good))

    def _forget_old(self, progress: Progress, good: int | None) -> None:
        self._journal.forget_through(progress.step, progress.is_open)
        last_good = None if good is None else self.newest(good)
        for directory in checkpoint.complete_checkpoints(self._state.checkpoints)[: -self._config.keep_checkpoints]:
            if directory != last_good and not self._kept_for_good(directory):
                checkpoint.remove(directory)

    def _kept_for_good(self, directory: Path) -> bool:
        every = self._config.keep_every
        return bool(every and checkpoint.checkpoint_step(directory) % every == 0)
