"""Episodes that finished and that no checkpoint covers yet: ``journal/step-NNNNNN.journal``, a file a global step.

::

    frame   length (4 bytes, little-endian), CRC-32 of the payload (4 bytes), payload
    file    a frame with the header, as JSON, then a frame a trajectory, in the order they finished

A file is only ever appended to, a frame in one write. A kill tears at most the last frame; reading stops there, and the
next writer cuts the tear off. Frames are not synced to the disk: a killed process loses none of what it wrote, and a
machine that loses its power loses the work of seconds, which is sampled again, for a torn frame has no matching CRC.

The weights of an episode are named by a :func:`lineage`, a hash of all that the run's updates reported; a
weight version alone is a step's number, which another attempt at the same step would bear too. A step's journal is used
only where its lineage is that of the weights at hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import zlib
from asyncio import to_thread
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from agent_rl.observe.files import disk_error
from agent_rl.rollout import records
from agent_rl.rollout.group import EpisodeRunner
from agent_rl.rollout.records import decode_trajectory, encode_trajectory
from agent_rl.types import Trajectory
from envs import Task

FORMAT = 1
_FRAME = struct.Struct("<II")
_NAMED_BY = ("train/updates", "train/loss", "train/grad_norm", "mismatch/k3_kl")


def lineage(before: str, metrics: Mapping[str, float]) -> str:
    """What the weights are named after a step that reported ``metrics`` and began with weights named ``before``.

    It takes up the loss, gradient norm and k3-KL bit for bit: over thousands of tokens two different updates do not
    agree in all three, and the same update done again on the same machine in float32 on a CPU does.
    """
    reported = [float(metrics[name]).hex() for name in _NAMED_BY if name in metrics]
    return hashlib.sha256(" ".join([before, *reported]).encode()).hexdigest()[:16]


class Journal:
    """All journals of a run, in ``folder``."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder, self._run_id = folder, run_id

    def open(self, step: int, weights: str) -> StepJournal:
        """The journal of ``step``, whose episodes are sampled with the weights of lineage ``weights``; what an earlier
        process wrote there is kept if it was sampled with them too, and forgotten otherwise."""
        self._folder.mkdir(parents=True, exist_ok=True)
        formats = {"format": FORMAT, "trajectories": records.FORMAT}
        header = {**formats, "run_id": self._run_id, "step": step, "weights": weights}
        return StepJournal(self._path(step), header)

    def forget_through(self, step: int) -> None:
        """Remove the journals up to that of ``step``: a checkpoint holds what was learned from them."""
        for path in self._folder.glob("step-*.journal"):
            if path <= self._path(step):
                path.unlink()

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.journal"


class StepJournal:
    """The journal of one step, while its episodes run. ``found`` counts the trajectories that were in it already."""

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        self.path = path
        self._waiting: dict[str, deque[Trajectory]] = defaultdict(deque)
        self._writing = threading.Lock()
        end = self._read(header)
        self.found = sum(map(len, self._waiting.values()))
        self._file = path.open("r+b" if end else "wb", buffering=0)
        self._file.truncate(end)
        self._file.seek(end)
        if not end:
            self._append(json.dumps(header).encode())

    def runner(self, run: EpisodeRunner) -> EpisodeRunner:
        """``run``, but giving what the journal holds of a task first, and writing down what finishes afresh.

        Infrastructure failures are not written down: they are run again in any case.
        """

        async def journaled(task: Task) -> Trajectory:
            if waiting := self._waiting.get(task.id):
                return waiting.popleft()
            trajectory = await run(task)
            if not trajectory.stop.infrastructure:
                await to_thread(self._write, trajectory)
            return trajectory

        return journaled

    def close(self) -> None:
        with self._writing:
            self._file.close()

    def _read(self, header: Mapping[str, object]) -> int:
        """Take up what was written under the same header; returns where the last whole frame ends (0: start anew)."""
        if not self.path.exists():
            return 0
        with self.path.open("rb") as file:
            frames = frames_of(file)
            first, end = next(frames, (b"", 0))
            if not _same(first, header):
                return 0
            for payload, after in frames:
                trajectory = replace(decode_trajectory(payload, str(self.path)), recovered=True)
                self._waiting[trajectory.task_id].append(trajectory)
                end = after
        return end

    def _write(self, trajectory: Trajectory) -> None:
        self._append(encode_trajectory(trajectory))

    def _append(self, payload: bytes) -> None:
        frame = _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
        with self._writing:
            try:
                _write_whole(self._file, frame)
            except OSError as error:
                raise disk_error(self.path, error) from error


def _write_whole(file: IO[bytes], data: bytes) -> None:
    start, view = file.tell(), memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError:
        # What follows a torn frame would be lost with it.
        with suppress(OSError):
            os.ftruncate(file.fileno(), start)
            file.seek(start)
        raise


def frames_of(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Every whole frame's payload, and where the frame ends; up to the first that is torn or damaged."""
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        length, checksum = _FRAME.unpack(head)
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield payload, file.tell()


def _same(frame: bytes, header: Mapping[str, object]) -> bool:
    try:
        return bool(json.loads(frame) == dict(header))
    except (ValueError, RecursionError):
        return False
