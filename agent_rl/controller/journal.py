"""Finished episodes that no checkpoint covers yet: ``journal/step-NNNNNN.journal``, one file per training step.

::

    frame   a payload with its length and checksum (agent_rl.rollout.jsonl_zst)
    file    a header frame (JSON), then one frame per trajectory in the order they finished, one that lists the batch
            of the step and, with ``rollout.recover: turns``, one per turn of every episode and one per abandoned
            episode. A payload is a line of JSON, followed by the bytes of a trajectory or turn. The line of a resumed
            episode has its number of replayed turns, that of a restarted episode the reason

Files are append-only. A kill damages at most the last frame; reading stops there, and the next writer truncates it.
Frames are not synced to disk: a killed process loses nothing that it wrote. A machine that loses power loses the work
of seconds, which is sampled again, because a damaged frame fails its CRC.

A step's file holds the episodes that finished while its batch was collected, i.e. between the previous update and its
own. If sampling runs ahead it also holds episodes of later batches. Episodes are identified by their position in the
data. The weights of a file are identified by a :func:`lineage`, a hash of the metrics of all the run's updates; a
weight version is only a step number, which another attempt at the same step would share. If a repeated step produces
other weights, the files from the next step on are removed. Until then an episode of such a file waits for its weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from agent_rl.rollout import records
from agent_rl.rollout.episode_recovery import LoggedRunner, LoggedTurn, decode_turn, encode_turn
from agent_rl.rollout.group import EpisodeRunner
from agent_rl.rollout.jsonl_zst import frame_head, read_frames
from agent_rl.rollout.records import decode_trajectory, encode_trajectory
from agent_rl.types import StopReason, Trajectory
from agent_rl.utils.concurrency import Notifier
from agent_rl.utils.run_files import disk_error
from envs import Task

FORMAT = 3
_COUNTED = ("episodes", "turns", "differed", "too_old")
_NAMED_BY = ("train/updates", "train/loss", "train/grad_norm", "mismatch/k3_kl")


def lineage(before: str, metrics: Mapping[str, float]) -> str:
    """The name of the weights after a step that reported ``metrics``, given the name ``before`` it.

    Hashes loss, gradient norm and k3-KL bit for bit. Over thousands of tokens two different updates do not agree in all
    three, while the same update repeated on the same machine in float32 on a CPU does.
    """
    reported = [float(metrics[name]).hex() for name in _NAMED_BY if name in metrics]
    return hashlib.sha256(" ".join([before, *reported]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Position of a trajectory or turn in its file, after the payload's line of JSON."""

    step: int
    start: int
    length: int


@dataclass(slots=True)
class _Episode:
    """The turns of an episode in order, and the step whose file records its end."""

    key: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    turns: list[_Frame] = field(default_factory=list)
    ended_in: int | None = None

    def forget(self, step: int) -> None:
        """The file of ``step`` was removed."""
        self.turns = list(itertools.takewhile(lambda frame: frame.step != step, self.turns))
        self.ended_in = None if self.ended_in == step else self.ended_in


@dataclass(slots=True)
class _StepFile:
    """A step's file of an earlier start: its header, the end of its last complete frame, and the positions of its
    batch if recorded."""

    header: Mapping[str, Any]
    end: int
    batch: tuple[int, ...] = ()


class Journal:
    """All journals of a run in ``directory``. Call :meth:`recover` once, then :meth:`begin` for each step.
    ``turns``: log turns and resume unfinished episodes from them."""

    def __init__(self, directory: Path, run_id: str, *, turns: bool = False) -> None:
        self._directory, self._turns = directory, turns
        self._header = {"format": FORMAT, "trajectories": records.FORMAT, "run_id": run_id}
        self._files: dict[int, _StepFile] = {}
        self._unread: dict[int, list[_Frame]] = defaultdict(list)
        self._delivered: dict[int, list[_Frame]] = defaultdict(list)
        self._positions: dict[int, set[int]] = defaultdict(set)
        self._episodes: dict[int, dict[str, _Episode]] = defaultdict(dict)
        self._counts: dict[int, Counter[str]] = defaultdict(Counter)
        self._step_began = Notifier()
        self._step = 0
        self._file: IO[bytes] | None = None
        self._writing = threading.Lock()

    def recover(self, step: int, lineages: Mapping[int, str], is_open: Callable[[int], bool]) -> None:
        """Scan the files of an earlier start, for a run that continues after ``step``. ``lineages``: known weights
        by version. Of files up to ``step``, only positions for which ``is_open`` is True are used."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._step = step
        for path in sorted(self._directory.glob("step-*.journal")):
            number = int(path.stem.removeprefix("step-"))
            if not self._scan(number, path) or (number <= step and self._weights(number) != lineages.get(number - 1)):
                self._forget(number)
        for position in [position for position in self._unread if not is_open(position)]:
            del self._unread[position]
        for position in [position for position in self._episodes if not is_open(position)]:
            del self._episodes[position]
        self.forget_through(step, is_open)

    async def begin(self, step: int, weights: str) -> int:
        """Write finished episodes to the file of ``step`` from now on; its weights have lineage ``weights``. If an
        earlier start wrote that file with other weights, it and all later files are removed. Returns its number of
        trajectories."""
        count = await asyncio.to_thread(self._open, step, weights)
        # On the event loop: a task between its check and its wait would miss a signal from the thread.
        self._step_began.notify()
        return count

    def _open(self, step: int, weights: str) -> int:
        if step in self._files and self._weights(step) != weights:
            for later in [other for other in self._files if other >= step]:
                self._forget(later)
        with self._writing:
            self._close()
            self._step = step
            existing = self._files.get(step)
            self._file = self._path(step).open("r+b" if existing else "wb", buffering=0)
            if existing:
                self._file.truncate(existing.end)
                self._file.seek(existing.end)
            else:  # before any episode that finishes meanwhile
                self._append(json.dumps({**self._header, "step": step, "weights": weights}).encode())
        return sum(frame.step == step for frames in self._unread.values() for frame in frames) if existing else 0

    async def wait_usable(self, position: int) -> None:
        """Wait until it is known whether the recovered frames of ``position`` may be used."""
        while any(frame.step > self._step for frame in self._recovered_frames(position)):
            await self._step_began.wait()

    def _recovered_frames(self, position: int) -> Iterator[_Frame]:
        yield from self._unread.get(position, ())
        for episode in self._episodes.get(position, {}).values():
            yield from episode.turns

    def recorded_batch(self, step: int) -> tuple[int, ...]:
        """The positions of the batch of ``step`` in an earlier start of the run; empty if unknown."""
        return self._files[step].batch if step in self._files else ()

    def record_batch(self, step: int, positions: Sequence[int]) -> None:
        """Record the positions of the batch of ``step``."""
        if not self.recorded_batch(step):
            with self._writing:
                self._append(json.dumps({"batch": list(positions)}).encode() + b"\n")

    def runner(self, position: int, run: LoggedRunner, oldest: int = 0) -> EpisodeRunner:
        """``run``, but it returns recovered trajectories of ``position`` first and journals new ones.

        An unfinished episode resumes from its turns if its first turn was sampled with weights not older than
        ``oldest``: an episode of an earlier start, or one whose node was lost. Infrastructure failures are not
        journaled; they are run again. Reads and writes are serialized, so that a group has its members in frame order
        in this start and the next: an update sums over them in that order.
        """
        turn = asyncio.Lock()

        async def journaled(task: Task) -> Trajectory:
            if frames := self._unread.get(position):
                self._delivered[position].append(frame := frames.pop(0))
                async with turn:
                    return await asyncio.to_thread(self._read, frame)
            log = EpisodeLog(self, position, oldest) if self._turns else None
            trajectory = await run(task, log)
            if not trajectory.stop.infrastructure:
                async with turn:
                    written = await asyncio.to_thread(self._write, position, trajectory, log.key if log else None)
                    self._delivered[position].append(written)
            elif log is not None:
                await log.failed(trajectory.stop)
            return trajectory

        return journaled

    def metrics(self, step: int) -> dict[str, float]:
        """``recover/*``: counts of unfinished episodes from the file of ``step``, including entries of an earlier
        start; empty if turns are not logged."""
        counts = self._counts.pop(step, Counter())
        return {f"recover/{name}": float(counts[name]) for name in _COUNTED} if self._turns else {}

    def finished(self, position: int) -> Iterator[Trajectory]:
        """The trajectories that :meth:`runner` returned for ``position``, in order, once. Each is read from disk on
        demand, which blocks."""
        self._episodes.pop(position, None)
        return map(self._read, self._delivered.pop(position, ()))

    def forget_through(self, step: int, is_open: Callable[[int], bool]) -> None:
        """Remove the files up to ``step`` that hold no position for which ``is_open`` is True: a checkpoint covers
        them."""
        for path in self._directory.glob("step-*.journal"):
            number = int(path.stem.removeprefix("step-"))
            if number <= step and not any(map(is_open, tuple(self._positions[number]))):
                path.unlink()
                self._positions.pop(number, None)

    def close(self) -> None:
        with self._writing:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _weights(self, step: int) -> object:
        return self._files[step].header.get("weights")

    def _scan(self, step: int, path: Path) -> bool:
        """Index the frames of a file; False for a file of another run or format."""
        with path.open("rb") as file:
            frames = read_frames(file)
            first, end = next(frames, (b"", 0))
            header = _json(first)
            self._files[step] = step_file = _StepFile(header, end)
            if not {**self._header, "step": step}.items() <= header.items():
                return False
            for payload, after in frames:
                first, _, encoded = payload.partition(b"\n")
                line = _json(first)
                if "batch" in line:
                    step_file.batch = tuple(line["batch"])
                else:
                    self._index_entry(line, _Frame(step, after - len(encoded), len(encoded)))
                step_file.end = after
        return True

    def _index_entry(self, line: Mapping[str, Any], frame: _Frame) -> None:
        """Index a frame of an episode: a turn, its end, or that it was abandoned."""
        position, key = line["position"], line.get("episode")
        self._positions[frame.step].add(position)
        self._count(frame.step, line)
        if key is not None:
            episode = self._episodes[position].setdefault(key, _Episode(key))
            if "turn" not in line:
                episode.ended_in = frame.step
            elif line["turn"] == len(episode.turns):
                episode.turns.append(frame)
        if "turn" not in line and frame.length:
            self._unread[position].append(frame)

    def _count(self, step: int, line: Mapping[str, Any]) -> None:
        if replayed := line.get("replayed"):
            self._counts[step].update(episodes=1, turns=replayed)
        if reason := line.get("anew"):
            self._counts[step][reason] += 1

    def _forget(self, step: int) -> None:
        self._path(step).unlink(missing_ok=True)
        self._files.pop(step, None)
        self._positions.pop(step, None)
        self._counts.pop(step, None)
        for position, frames in self._unread.items():
            if any(frame.step == step for frame in frames):  # episodes of other positions may be delivered meanwhile
                self._unread[position] = [frame for frame in frames if frame.step != step]
        for episodes in list(self._episodes.values()):
            for episode in list(episodes.values()):
                episode.forget(step)

    def _read(self, frame: _Frame) -> Trajectory:
        return replace(decode_trajectory(self._bytes(frame), str(self._path(frame.step))), recovered=True)

    def _read_turns(self, frames: Sequence[_Frame]) -> list[LoggedTurn]:
        return [decode_turn(self._bytes(frame), str(self._path(frame.step))) for frame in frames]

    def _bytes(self, frame: _Frame) -> bytes:
        with self._path(frame.step).open("rb") as file:
            file.seek(frame.start)
            return file.read(frame.length)

    def _write(self, position: int, trajectory: Trajectory, episode: str | None) -> _Frame:
        """Append a trajectory. If its turns were logged, its ``episode`` has ended."""
        line: dict[str, Any] = {"position": position}
        if episode is not None:
            line |= {"episode": episode, "replayed": trajectory.replayed_turns}
        return self._append_entry(line, encode_trajectory(trajectory))

    def _write_turn(self, position: int, episode: _Episode, turn: LoggedTurn) -> None:
        line = {"position": position, "episode": episode.key, "turn": len(episode.turns)}
        episode.turns.append(self._append_entry(line, encode_turn(turn)))

    def _abandon(self, position: int, episode: _Episode, anew: str = "") -> None:
        """Record that ``episode`` was abandoned, and why it restarts, if it does."""
        self._append_entry({"position": position, "episode": episode.key, "anew": anew})

    def _append_entry(self, line: Mapping[str, Any], data: bytes = b"") -> _Frame:
        with self._writing:
            step = self._step
            self._positions[step].add(line["position"])
            end = self._append(json.dumps(line).encode() + b"\n", data)
            self._count(step, line)
        return _Frame(step, end - len(data), len(data))

    def _append(self, *payload: bytes) -> int:
        """Append a frame to the file of the step; returns the new end of the file. The parts of ``payload`` are not
        joined, which would copy them."""
        assert self._file is not None, "a step was begun"
        try:
            _write_all(self._file, frame_head(*payload), *payload)
        except OSError as error:
            raise disk_error(self._path(self._step), error) from error
        return self._file.tell()

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}.journal"


class EpisodeLog:
    """Implements :class:`agent_rl.rollout.episode_recovery.TurnLog` in ``journal``: the first unfinished episode of
    ``position``, or a new one."""

    def __init__(self, journal: Journal, position: int, oldest: int) -> None:
        self._journal, self._position, self._oldest = journal, position, oldest
        unfinished = journal._episodes[position]
        resumable = next((each for each in unfinished.values() if each.turns and each.ended_in is None), None)
        self.episode = _Episode() if resumable is None else unfinished.pop(resumable.key)

    @property
    def key(self) -> str:
        """The episode's identifier."""
        return self.episode.key

    async def kept(self) -> Sequence[LoggedTurn]:
        """See :class:`TurnLog`; empty if the turns are too old."""
        turns = await asyncio.to_thread(self._journal._read_turns, self.episode.turns)
        if min(_versions(turns), default=self._oldest) < self._oldest:
            await self._restart("too_old")
            return []
        return turns

    async def keep(self, turn: LoggedTurn) -> None:
        await asyncio.to_thread(self._journal._write_turn, self._position, self.episode, turn)

    async def start_over(self) -> None:
        await self._restart("differed")

    async def failed(self, stop: StopReason) -> None:
        """The infrastructure failed the episode. It resumes only if its node was lost."""
        if stop is StopReason.NODE_LOST:
            self._journal._episodes[self._position][self.episode.key] = self.episode
        elif self.episode.turns:
            await asyncio.to_thread(self._journal._abandon, self._position, self.episode)

    async def _restart(self, reason: str) -> None:
        await asyncio.to_thread(self._journal._abandon, self._position, self.episode, reason)
        self.episode = _Episode()


def _versions(turns: Sequence[LoggedTurn]) -> Iterator[int]:
    return (int(span.version) for turn in turns for completion in turn.completions for span in completion.versions)


def _write_all(file: IO[bytes], *parts: bytes) -> None:
    start = file.tell()
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
    except OSError:
        # Frames after a damaged frame would be lost.
        with suppress(OSError):
            os.ftruncate(file.fileno(), start)
            file.seek(start)
        raise


def _json(line: bytes) -> dict[str, Any]:
    """The object in ``line``; an empty one if it is not a JSON object."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
