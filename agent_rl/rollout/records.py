"""Trajectories on disk: ``trajectories/step-NNNNNN.jsonl``, one row a trajectory, and their arrays beside it.

A row holds what a person reads (messages, tool calls, times, reward, ending) and refers to its arrays in
``step-NNNNNN.safetensors`` by key: ``<key>/tokens``, ``<key>/loss_mask``, ``<key>/logprobs``, and ``<key>/routes``, the
bytes of an :mod:`r3.archive`. The arrays are in place before the rows are, so a step whose JSONL exists is whole.

One trajectory alone, as bytes (:func:`encode_trajectory`), is a safetensors file of the same arrays with the row as
metadata. Rows say their ``format``; one of an unknown or incomplete format is refused in a line, never guessed at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save, save_file

from agent_rl.errors import AgentRlError
from agent_rl.observe.files import replacing, write_atomic
from agent_rl.types import Group, StopReason, Trajectory, Turn
from r3 import archive
from r3.routing import Routing, RoutingError

FORMAT = 2
"""The format of rows. Rows of 2 did not say so at first; those of 1 had their routes as plain arrays."""

FOLDER = "trajectories"
_ALONE = "trajectory"
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, SafetensorError)
"""What reading a file raises that is damaged, or was never one of ours."""
_PLAIN = ("task_id", "env", "reward", "resolved", "patch", "error", "seconds", "grade_seconds")


def write_trajectories(run_dir: Path, step: int, groups: Sequence[Group], *, routes: bool = True) -> Path:
    """Write the groups of ``step`` and return the JSONL's path. ``routes`` False leaves the routes out (they are most
    of the bytes). They are archived without their order within a row. Blocks on the disk: call it in a thread from an
    event loop."""
    path = trajectories_path(run_dir, step)
    members = [(index, group, t) for index, group in enumerate(groups) for t in group.trajectories]
    arrays: dict[str, NDArray] = {}
    rows: list[dict[str, Any]] = []
    for number, (index, group, trajectory) in enumerate(members):
        key = f"{number:05d}"
        arrays |= _arrays(key, trajectory, routes)
        rows.append(_row(trajectory, index, group, key, routes))
    # Not orjson: a model may write integers over 64 bits and lone surrogates, which it refuses.
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.unlink(missing_ok=True)  # rows of a step done before must not be read with the new arrays
    _save_arrays(path.with_suffix(".safetensors"), arrays)
    write_atomic(path, lines)
    return path


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """``trajectory`` with all its arrays, for :func:`decode_trajectory`. Here its routes keep their order within a row:
    a trainer that replays them then computes the same bits."""
    row = _described(trajectory, _ALONE, trajectory.routing is not None)
    return save(_arrays(_ALONE, trajectory, True, keep_order=True), metadata={"row": json.dumps(row)})


def decode_trajectory(data: bytes, where: str) -> Trajectory:
    """What :func:`encode_trajectory` made ``data`` of. Raises AgentRlError naming ``where`` on anything else."""
    try:
        arrays = load(data)
        length = int.from_bytes(data[:8], "little")
        row = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["row"])
    except _BROKEN as error:
        raise AgentRlError(f"{where}: not a trajectory: {error}") from error
    return _trajectory(row, arrays.__getitem__, where)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a step's JSONL as they stand, without arrays. Raises AgentRlError for a line that is no row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except _BROKEN as error:
                raise AgentRlError(f"{path}, line {number}: no JSON ({error})") from None
            if not isinstance(row, dict):
                raise AgentRlError(f"{path}, line {number}: not the row of a trajectory")
            yield row


def read_trajectories(run_dir: Path, step: int) -> tuple[Group, ...]:
    """The groups of ``step`` as they were written. Raises AgentRlError where rows or arrays are absent, are of a format
    that this version does not read, or routes were damaged."""
    path = trajectories_path(run_dir, step)
    arrays = path.with_suffix(".safetensors")
    for file in (path, arrays):
        if not file.is_file():
            raise AgentRlError(f"{file}: no trajectories of step {step} there")
    members: dict[int, list[Trajectory]] = {}
    failures: dict[int, int] = {}
    tasks: dict[int, str] = {}
    try:
        with safe_open(arrays, framework="numpy") as tensors:
            for number, row in enumerate(read_rows(path), 1):
                trajectory = _trajectory(row, tensors.get_tensor, f"{path}, line {number}")
                index = int(row["group"]["index"])
                members.setdefault(index, []).append(trajectory)
                failures[index], tasks[index] = int(row["group"]["infrastructure_failures"]), row["task_id"]
    except _BROKEN as error:
        raise AgentRlError(f"{path}: not trajectories that this version reads: {_why(error)}") from error
    return tuple(Group(tasks[index], tuple(members[index]), failures[index]) for index in members)


def steps_on_disk(run_dir: Path) -> list[int]:
    """The steps that have trajectories, in order."""
    return sorted(int(path.stem.removeprefix("step-")) for path in (run_dir / FOLDER).glob("step-*.jsonl"))


def trajectories_path(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:06d}.jsonl"


def _row(trajectory: Trajectory, index: int, group: Group, key: str, routes: bool) -> dict[str, Any]:
    return {
        **_described(trajectory, key, routes and trajectory.routing is not None),
        "group": {"index": index, "infrastructure_failures": group.infrastructure_failures},
    }


def _described(trajectory: Trajectory, key: str, routes: bool) -> dict[str, Any]:
    """All of a trajectory but its arrays, which are named ``<key>/<what>``."""
    return {
        "format": FORMAT,
        **{name: getattr(trajectory, name) for name in _PLAIN},
        "stop": trajectory.stop.value,
        "weight_versions": trajectory.weight_versions,
        "suspected_hack": trajectory.suspected_hack,
        "messages": [dict(message) for message in trajectory.messages],
        "turns": [asdict(turn) for turn in trajectory.turns],
        "arrays": {"key": key, "tokens": len(trajectory.tokens), "routes": routes},
    }


def _arrays(key: str, trajectory: Trajectory, routes: bool, *, keep_order: bool = False) -> dict[str, NDArray]:
    arrays: dict[str, NDArray] = {
        f"{key}/tokens": trajectory.tokens,
        f"{key}/loss_mask": trajectory.loss_mask,
        f"{key}/logprobs": trajectory.logprobs,
    }
    if routes and trajectory.routing is not None:
        encoded = archive.encode(trajectory.routing, keep_order=keep_order)
        arrays[f"{key}/routes"] = np.frombuffer(encoded, np.uint8)
    # safetensors writes an array's buffer as it lies in memory, strides ignored.
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _save_arrays(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """As :func:`write_atomic`, without the bytes of a whole step in memory a second time."""
    with replacing(path) as temporary:
        save_file(dict(arrays), temporary)


def _trajectory(row: Mapping[str, Any], array: Callable[[str], NDArray], where: str) -> Trajectory:
    """The trajectory of a row; ``array`` gives its arrays by name."""
    try:
        found = row.get("format", FORMAT if "routes" in row.get("arrays", ()) else 1)
        if found != FORMAT:
            raise AgentRlError(
                f"{where}: written in format {found} of trajectories; this version reads format {FORMAT}"
            )
        key = row["arrays"]["key"]
        return Trajectory(
            **{name: row[name] for name in _PLAIN},
            tokens=array(f"{key}/tokens"),
            loss_mask=array(f"{key}/loss_mask"),
            logprobs=array(f"{key}/logprobs"),
            routing=_routing(key, array) if row["arrays"]["routes"] else None,
            stop=StopReason(row["stop"]),
            turns=tuple(Turn(**turn) for turn in row["turns"]),
            messages=tuple(row["messages"]),
            weight_versions=tuple(row["weight_versions"]),
            suspected_hack=tuple(row["suspected_hack"]),
        )
    except _BROKEN as error:
        raise AgentRlError(f"{where}: not a trajectory that this version reads: {_why(error)}") from error


def _why(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _routing(key: str, array: Callable[[str], NDArray]) -> Routing:
    try:
        return archive.decode(array(f"{key}/routes").data, where=f"routes of trajectory {key}")
    except RoutingError as error:
        raise AgentRlError(str(error)) from error
