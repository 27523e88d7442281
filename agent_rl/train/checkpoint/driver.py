"""Checkpoints on the driver: workers write their files in the background, then the manifest completes the directory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from agent_rl.config import TrainConfig
from agent_rl.train.checkpoint import directory as checkpoint
from agent_rl.train.worker_group import WorkerGroup
from agent_rl.utils.concurrency import shielded


class CheckpointDriver:
    """Saves and loads the state of ``workers``, one checkpoint at a time. All workers must see its directory."""

    def __init__(self, workers: WorkerGroup, train: TrainConfig) -> None:
        self._workers, self._train = workers, train
        self._saving: asyncio.Task[None] | None = None

    async def begin(self, directory: Path, run: Mapping[str, object]) -> asyncio.Task[None]:
        """See :meth:`agent_rl.train.ray_trainer.RayTrainer.begin_save`."""
        if self._saving is not None:
            await asyncio.wait([self._saving])
        directory = absolute(directory)
        partial = await asyncio.to_thread(checkpoint.begin, directory)
        try:
            (updates, counts), *_ = await self._workers.call(lambda actor: actor.save.remote(partial))
        except BaseException:
            checkpoint.abandon(directory)
            raise
        self._saving = asyncio.create_task(self._finish(directory, updates, counts, run))
        return self._saving

    async def _finish(self, target: Path, updates: int, counts: Mapping[str, int], run: Mapping[str, object]) -> None:
        try:
            checksums = await self._workers.written()
        except BaseException:
            checkpoint.abandon(target)
            raise
        manifest = checkpoint.Manifest(
            format=checkpoint.FORMAT,
            updates=updates,
            counts=counts,
            parallel=self._train.parallel.model_dump(),
            dtype=self._train.dtype,
            checksums=checksums,
            run=dict(run),
        )
        # Shielded: a thread cannot be cancelled, and needs its files.
        await shielded(asyncio.to_thread(checkpoint.commit, target, manifest))

    async def load(self, directory: Path) -> checkpoint.Manifest:
        """See :meth:`agent_rl.train.ray_trainer.RayTrainer.load`."""
        directory = absolute(directory)
        manifest = checkpoint.read_manifest(directory)
        await self._workers.call(lambda actor: actor.load.remote(directory, manifest))
        return manifest

    async def stop(self) -> None:
        """Cancel a save in progress. Idempotent."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.wait([self._saving])


def absolute(directory: Path) -> Path:
    """Make a path absolute, because workers may run in another working directory."""
    return Path(os.path.abspath(directory))
