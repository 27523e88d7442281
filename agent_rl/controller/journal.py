"""Episodes that finished and that no checkpoint covers yet: ``journal/step-NNNNNN.journal``, a file a global step.

::

    frame   a payload with its length and checksum (agent_rl.rollout.framed_log)
    file    a frame with the header, as JSON, then one a trajectory, in the order they finished, one that says what
            the step's batch took and, with ``rollout.recover: turns``, one a turn of every episode and one for each
            episode that was given up; a payload is a line of JSON and, of a trajectory or a turn, its bytes. The
            line of an episode that went on has how many turns were taken again, that of one begun anew why

A file is only ever appended to, a frame in one write. A kill tears at most the last frame; reading stops there, and the
next writer cuts the tear off. Frames are not synced to the disk: a killed process loses none of what it wrote, and a
machine that loses its power loses the work of seconds, which is sampled again, for a torn frame has no matching CRC.

A step's file holds what finished while its batch was waited for: between the update before and its own, and so, where
sampling runs ahead, also episodes of later batches. They are known by their position of the data. The weights of a
file are named by a :func:`lineage`, a hash of all that the run's updates reported; a weight version alone is a step's
number, which another attempt at the same step would bear too. When a step that is done again gives other weights, the
files from the next step on are forgotten; until then an episode of such a file waits for its weights.
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
from agent_rl.rollout.framed_log import as_frame, frames_of
from agent_rl.rollout.group import EpisodeRunner
from agent_rl.rollout.records import decode_trajectory, encode_trajectory
from agent_rl.rollout.turn_log import LoggedRunner, LoggedTurn, decode_turn, encode_turn
from agent_rl.types import StopReason, Trajectory
from agent_rl.utils.concurrency import Pulse
from agent_rl.utils.run_files import disk_error
from envs import Task

FORMAT = 3
_COUNTED = ("episodes", "turns", "differed", "too_old")
_NAMED_BY = ("train/updates", "train/loss", "train/grad_norm", "mismatch/k3_kl")


def lineage(before: str, metrics: Mapping[str, float]) -> str:
    """What the weights are named after a step that reported ``metrics`` and began with weights named ``before``.

    It takes up the loss, gradient norm and k3-KL bit for bit: over thousands of tokens two different updates do not
    agree in all three, and the same update done again on the same machine in float32 on a CPU does.
    """
    reported = [float(metrics[name]).hex() for name in _NAMED_BY if name in metrics]
    return hashlib.sha256(" ".join([before, *reported]).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where a trajectory, or a turn, lies: after the line of JSON of a payload."""

    step: int
    start: int
    length: int


@dataclass(slots=True)
class _Episode:
    """The turns of an episode in their order, and the step whose file says that it ended or was given up."""

    key: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    turns: list[_Frame] = field(default_factory=list)
    over: int | None = None

    def forget(self, step: int) -> None:
        """The file of ``step`` is no more."""
        self.turns = list(itertools.takewhile(lambda frame: frame.step != step, self.turns))
        self.over = None if self.over == step else self.over


@dataclass(slots=True)
class _Found:
    """What an earlier start of the run left in a step's file: its header, where its last whole frame ends, and what
    its batch took, if that was settled."""

    header: Mapping[str, Any]
    end: int
    batch: tuple[int, ...] = ()


class Journal:
    """All journals of a run, in ``directory``. :meth:`recover` once, then :meth:`begin` a step after the other.
    ``turns``: whether turns are written down, and episodes that did not end go on from them."""

    def __init__(self, directory: Path, run_id: str, *, turns: bool = False) -> None:
        self._directory, self._turns = directory, turns
        self._header = {"format": FORMAT, "trajectories": records.FORMAT, "run_id": run_id}
        self._found: dict[int, _Found] = {}
        self._frames: dict[int, list[_Frame]] = defaultdict(list)
        self._given: dict[int, list[_Frame]] = defaultdict(list)
        self._holds: dict[int, set[int]] = defaultdict(set)
        self._episodes: dict[int, dict[str, _Episode]] = defaultdict(dict)
        self._counts: dict[int, Counter[str]] = defaultdict(Counter)
        self._settled = Pulse()
        self._step = 0
        self._file: IO[bytes] | None = None
        self._writing = threading.Lock()

    def recover(self, step: int, lineages: Mapping[int, str], is_open: Callable[[int], bool]) -> None:
        """Look through what an earlier start left, for a run that goes on after ``step``. ``lineages`` name the weights
        that are known, by version; of older files only what ``is_open`` counts."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._step = step
        for path in sorted(self._directory.glob("step-*.journal")):
            at = int(path.stem.removeprefix("step-"))
            if not self._look_through(at, path) or (at <= step and self._weights(at) != lineages.get(at - 1)):
                self._forget(at)
        for position in [position for position in self._frames if not is_open(position)]:
            del self._frames[position]
        for position in [position for position in self._episodes if not is_open(position)]:
            del self._episodes[position]
        self.forget_through(step, is_open)

    async def begin(self, step: int, weights: str) -> int:
        """From now on what finishes is written to the file of ``step``, whose weights are of lineage ``weights``. What
        an earlier start wrote there is used if it was sampled with them too, and all from there on forgotten otherwise.
        Returns how many trajectories it has."""
        found = await asyncio.to_thread(self._open, step, weights)
        self._settled.give()  # here and not on the thread: one that had looked and not yet waited would miss it
        return found

    def _open(self, step: int, weights: str) -> int:
        if step in self._found and self._weights(step) != weights:
            for later in [at for at in self._found if at >= step]:
                self._forget(later)
        with self._writing:
            self._close()
            self._step = step
            found = self._found.get(step)
            self._file = self._path(step).open("r+b" if found else "wb", buffering=0)
            if found:
                self._file.truncate(found.end)
                self._file.seek(found.end)
            else:  # before anything that finishes meanwhile
                self._put(as_frame(json.dumps({**self._header, "step": step, "weights": weights}).encode()))
        return sum(frame.step == step for frames in self._frames.values() for frame in frames) if found else 0

    async def settled(self, position: int) -> None:
        """Return when it is known of all that was found of ``position`` whether it may be used."""
        while any(frame.step > self._step for frame in self._found_of(position)):
            await self._settled.wait()

    def _found_of(self, position: int) -> Iterator[_Frame]:
        yield from self._frames.get(position, ())
        for episode in self._episodes.get(position, {}).values():
            yield from episode.turns

    def recorded(self, step: int) -> tuple[int, ...]:
        """The positions that the batch of ``step`` took in an earlier start of the run; none where it is not known."""
        return self._found[step].batch if step in self._found else ()

    def record(self, step: int, positions: Sequence[int]) -> None:
        """Write down what the batch of ``step`` takes."""
        if not self.recorded(step):
            with self._writing:
                self._put(as_frame(json.dumps({"batch": list(positions)}).encode() + b"\n"))

    def runner(self, position: int, run: LoggedRunner, oldest: int = 0) -> EpisodeRunner:
        """``run``, but giving what was found of ``position`` first, and writing down what finishes afresh.

        An episode that did not end goes on from its turns, if the weights that sampled the first are not before
        ``oldest``: one of an earlier start of the run, or one whose sandbox was lost with its host.
        Infrastructure failures are not written down: they are run again in any case. One is read or written at a time,
        so that a group has its members in the order of its frames, in this start of the run and in the next: an update
        adds up over them in that order.
        """
        turn = asyncio.Lock()

        async def journaled(task: Task) -> Trajectory:
            if frames := self._frames.get(position):
                self._given[position].append(frame := frames.pop(0))
                async with turn:
                    return await asyncio.to_thread(self._read, frame)
            log = EpisodeLog(self, position, oldest) if self._turns else None
            trajectory = await run(task, log)
            if not trajectory.stop.infrastructure:
                async with turn:
                    written = await asyncio.to_thread(self._write, position, trajectory, log.key if log else None)
                    self._given[position].append(written)
            elif log is not None:
                await log.failed(trajectory.stop)
            return trajectory

        return journaled

    def metrics(self, step: int) -> dict[str, float]:
        """``recover/*``: what the file of ``step`` says of episodes that did not end, also what an earlier start of the
        run wrote there; none where turns are not written down."""
        counts = self._counts.pop(step, Counter())
        return {f"recover/{name}": float(counts[name]) for name in _COUNTED} if self._turns else {}

    def finished(self, position: int) -> Iterator[Trajectory]:
        """What :meth:`runner` gave of ``position``, in that order, once; each is read again when it is asked for, which
        blocks on the disk."""
        self._episodes.pop(position, None)
        return map(self._read, self._given.pop(position, ()))

    def forget_through(self, step: int, is_open: Callable[[int], bool]) -> None:
        """Remove the files up to that of ``step`` that hold nothing of a position that ``is_open``: a checkpoint holds
        what was learned from them."""
        for path in self._directory.glob("step-*.journal"):
            at = int(path.stem.removeprefix("step-"))
            if at <= step and not any(map(is_open, tuple(self._holds[at]))):
                path.unlink()
                self._holds.pop(at, None)

    def close(self) -> None:
        with self._writing:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _weights(self, step: int) -> object:
        return self._found[step].header.get("weights")

    def _look_through(self, step: int, path: Path) -> bool:
        """Note where the frames of a file are; False for a file that is not of this run, or of another format."""
        with path.open("rb") as file:
            frames = frames_of(file)
            first, end = next(frames, (b"", 0))
            header = _json(first)
            self._found[step] = found = _Found(header, end)
            if not {**self._header, "step": step}.items() <= header.items():
                return False
            for payload, after in frames:
                first, _, encoded = payload.partition(b"\n")
                line = _json(first)
                if "batch" in line:
                    found.batch = tuple(line["batch"])
                else:
                    self._note(line, _Frame(step, after - len(encoded), len(encoded)))
                found.end = after
        return True

    def _note(self, line: Mapping[str, Any], frame: _Frame) -> None:
        """Take up a frame that is of an episode: a turn, its end, or that it was given up."""
        position, key = line["position"], line.get("episode")
        self._holds[frame.step].add(position)
        self._count(frame.step, line)
        if key is not None:
            episode = self._episodes[position].setdefault(key, _Episode(key))
            if "turn" not in line:
                episode.over = frame.step
            elif line["turn"] == len(episode.turns):
                episode.turns.append(frame)
        if "turn" not in line and frame.length:
            self._frames[position].append(frame)

    def _count(self, step: int, line: Mapping[str, Any]) -> None:
        if replayed := line.get("replayed"):
            self._counts[step].update(episodes=1, turns=replayed)
        if why := line.get("anew"):
            self._counts[step][why] += 1

    def _forget(self, step: int) -> None:
        self._path(step).unlink(missing_ok=True)
        self._found.pop(step, None)
        self._holds.pop(step, None)
        self._counts.pop(step, None)
        for position, frames in self._frames.items():
            if any(frame.step == step for frame in frames):  # of others episodes may be given out meanwhile
                self._frames[position] = [frame for frame in frames if frame.step != step]
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
        """Write a trajectory down; with it its ``episode``, if its turns were, is over."""
        line: dict[str, Any] = {"position": position}
        if episode is not None:
            line |= {"episode": episode, "replayed": trajectory.replayed_turns}
        return self._put_down(line, encode_trajectory(trajectory))

    def _write_turn(self, position: int, episode: _Episode, turn: LoggedTurn) -> None:
        line = {"position": position, "episode": episode.key, "turn": len(episode.turns)}
        episode.turns.append(self._put_down(line, encode_turn(turn)))

    def _give_up(self, position: int, episode: _Episode, anew: str = "") -> None:
        """Write down that ``episode`` is over, and why it is begun anew, if it is."""
        self._put_down({"position": position, "episode": episode.key, "anew": anew})

    def _put_down(self, line: Mapping[str, Any], data: bytes = b"") -> _Frame:
        payload = as_frame(json.dumps(line).encode() + b"\n" + data)
        with self._writing:
            step = self._step
            self._holds[step].add(line["position"])
            end = self._put(payload)
            self._count(step, line)
        return _Frame(step, end - len(data), len(data))

    def _put(self, frame: bytes) -> int:
        """Append to the file of the step; where it then ends."""
        assert self._file is not None, "a step was begun"
        try:
            _write_whole(self._file, frame)
        except OSError as error:
            raise disk_error(self._path(self._step), error) from error
        return self._file.tell()

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:06d}.journal"


class EpisodeLog:
    """Implements :class:`agent_rl.rollout.turn_log.TurnLog`: the turns of an episode of ``position``, in ``journal``.
    It is the first there that did not end, or a new one."""

    def __init__(self, journal: Journal, position: int, oldest: int) -> None:
        self._journal, self._position, self._oldest = journal, position, oldest
        waiting = journal._episodes[position]
        found = next((each for each in waiting.values() if each.turns and each.over is None), None)
        self.episode = _Episode() if found is None else waiting.pop(found.key)

    @property
    def key(self) -> str:
        """What the episode is known by."""
        return self.episode.key

    async def kept(self) -> Sequence[LoggedTurn]:
        """See :class:`TurnLog`; none where they are too old."""
        turns = await asyncio.to_thread(self._journal._read_turns, self.episode.turns)
        if min(_versions(turns), default=self._oldest) < self._oldest:
            await self._begin_anew("too_old")
            return []
        return turns

    async def keep(self, turn: LoggedTurn) -> None:
        await asyncio.to_thread(self._journal._write_turn, self._position, self.episode, turn)

    async def start_over(self) -> None:
        await self._begin_anew("differed")

    async def failed(self, stop: StopReason) -> None:
        """The infrastructure failed it. Only where its sandbox's host was lost does it go on, by whoever runs next."""
        if stop is StopReason.HOST_LOST:
            self._journal._episodes[self._position][self.episode.key] = self.episode
        elif self.episode.turns:
            await asyncio.to_thread(self._journal._give_up, self._position, self.episode)

    async def _begin_anew(self, why: str) -> None:
        await asyncio.to_thread(self._journal._give_up, self._position, self.episode, why)
        self.episode = _Episode()


def _versions(turns: Sequence[LoggedTurn]) -> Iterator[int]:
    return (int(span.version) for turn in turns for completion in turn.completions for span in completion.versions)


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


def _json(line: bytes) -> dict[str, Any]:
    """The object in ``line``; an empty one where there is none."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
