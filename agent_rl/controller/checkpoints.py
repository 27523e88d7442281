"""A run's checkpoints: when one is due, writing it while training continues, and which are kept.

::

    step N ── copy to host memory ──▶ step N+1 ...            training waits only for the copy
                     └── written by the ranks' threads ──▶ renamed into place ──▶ older ones and journals removed

A checkpoint counts once its directory is complete. Until then the previous checkpoint and the journals since are kept,
so a kill loses no finished episode. A failed write ends the run at the end of the next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_rl.config import MAX_STALENESS, TrainConfig
from agent_rl.controller.async_rollout.task_ledger import TaskLedger
from agent_rl.controller.journal import Journal, lineage
from agent_rl.controller.run_state import RunState
from agent_rl.errors import TrainerDied
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.checkpoint.directory import Manifest
from agent_rl.train.ray_trainer import RayTrainer
from agent_rl.utils.concurrency import shielded


@dataclass(frozen=True, slots=True)
class Progress:
    """A run's progress after ``step``: the first ``position`` of the data that no batch took, the later positions
    ``ahead`` that a batch took, and the lineage of the ``weights`` and of the versions ``before``, which open
    positions may use."""

    run_id: str
    step: int = 0
    position: int = 0
    weights: str = "start"
    ahead: tuple[int, ...] = ()
    before: tuple[str, ...] = ()

    @classmethod
    def from_manifest(cls, run: Mapping[str, Any]) -> Progress:
        """The progress in a checkpoint's manifest."""
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in run.items()}
        return cls(**fields)

    def after(self, step: int, ledger: TaskLedger, metrics: Mapping[str, float]) -> Progress:
        """The progress after ``step``, which reported ``metrics``."""
        before = (*self.before, self.weights)[-MAX_STALENESS:]
        return Progress(
            self.run_id, step, ledger.position, lineage(self.weights, metrics), ledger.ahead, before
        )  # fmt: skip

    @property
    def lineages(self) -> dict[int, str]:
        """The lineages of the weights by version."""
        return {self.step - age: name for age, name in enumerate((self.weights, *reversed(self.before)))}

    def is_open(self, position: int) -> bool:
        """Whether no batch has taken ``position``."""
        return position >= self.position and position not in self.ahead


class Checkpoints:
    """Saves, prunes and finds the checkpoints of one run."""

    def __init__(
        self, config: TrainConfig, state: RunState, trainer: RayTrainer, journal: Journal | None = None
    ) -> None:
        self._config, self._state, self._trainer, self._journal = config, state, trainer, journal
        self._writing: asyncio.Task[None] | None = None

    async def resume(self) -> tuple[Progress, Manifest | None]:
        """Load the newest checkpoint; returns the run's progress and the checkpoint's manifest (None without
        checkpoint)."""
        checkpoint.remove_partial(self._state.checkpoints)
        latest = checkpoint.latest_checkpoint(self._state.checkpoints)
        manifest = None if latest is None else await self._trainer.load(latest)
        progress = Progress(self._state.run_id) if manifest is None else Progress.from_manifest(manifest.run)
        if self._journal is not None:
            await asyncio.to_thread(self._journal.recover, progress.step, progress.lineages, progress.is_open)
        return progress, manifest

    def due(self, step: int) -> bool:
        """Whether the config requires a checkpoint after ``step``."""
        every = self._config.checkpoint_every
        return step == self._config.steps or bool(every and step % every == 0)

    def newest(self, until: int) -> Path | None:
        """The newest complete checkpoint of a step up to ``until``, or None."""
        complete = checkpoint.complete_checkpoints(self._state.checkpoints)
        return max((f for f in complete if checkpoint.checkpoint_step(f) <= until), key=lambda f: f.name, default=None)

    def newest_step(self) -> int:
        """The step of the newest complete checkpoint; 0 if there is none."""
        latest = checkpoint.latest_checkpoint(self._state.checkpoints)
        return 0 if latest is None else checkpoint.checkpoint_step(latest)

    async def save(self, progress: Progress, *, good: int | None = None, best: int | None = None) -> None:
        """Start to write a step's checkpoint; returns when training may continue. Raises the error of the previous
        write.

        ``good``: last step before the run may have diverged; the newest checkpoint up to it is kept. ``best``: a step
        whose checkpoint is kept.
        """
        await self.finish()
        directory = self._state.checkpoint(progress.step)
        saved = await self._trainer.begin_save(directory, asdict(progress))
        self._writing = asyncio.create_task(self._complete(saved, progress, good, best))

    def check(self) -> None:
        """Raise the error of a write that has ended meanwhile. Does not wait."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def finish(self) -> None:
        """Wait until the running write is complete. Raises its error."""
        if self._writing is not None:
            await self._writing

    async def close(self) -> None:
        """Cancel the running write, if any; it leaves no files. Idempotent."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _complete(
        self, saved: asyncio.Task[None], progress: Progress, good: int | None, best: int | None
    ) -> None:
        await saved
        # Complete even if cancelled: a restart in this process reads the same directories.
        await shielded(asyncio.to_thread(self._remove_old, progress, good, best))

    def _remove_old(self, progress: Progress, good: int | None, best: int | None) -> None:
        if self._journal is not None:
            self._journal.forget_through(progress.step, progress.is_open)
        last_good = None if good is None else self.newest(good)
        for directory in checkpoint.complete_checkpoints(self._state.checkpoints)[: -self._config.keep_checkpoints]:
            is_kept = directory == last_good or checkpoint.checkpoint_step(directory) == best
            if not is_kept and not self._is_permanent(directory):
                checkpoint.remove(directory)

    def _is_permanent(self, directory: Path) -> bool:
        every = self._config.keep_every
        return bool(every and checkpoint.checkpoint_step(directory) % every == 0)


class TrainerRestarts:
    """Counts the trainer's deaths: at most ``limit`` in a row without a new checkpoint.

    After a rank dies, all ranks are restarted and load the last checkpoint. Engines, sandboxes and the controller keep
    running. The steps since the checkpoint are repeated with the journal's episodes, as after a kill of the run.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._step = limit, 0, 0

    def count(self, death: TrainerDied, step: int) -> str:
        """Count a ``death`` while the newest checkpoint is of ``step`` (0: none). Returns a line that says how the
        run continues; raises TrainerDied if the limit is exceeded."""
        if step != self._step:
            self._step, self._used = step, 0
        origin = f"the checkpoint of step {step}" if step else "the start: no checkpoint is complete yet"
        if self._used == self._limit:
            restarts = f"{self._used} restart(s) from {origin}" if self._limit else "train.restarts is 0"
            raise TrainerDied(f"{death}; giving up: {restarts}. The same command continues from there") from death
        self._used += 1
        return f"{death}; starting the trainer again from {origin} (restart {self._used} of {self._limit})"
