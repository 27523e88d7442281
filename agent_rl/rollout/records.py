"""Trajectories on disk: ``trajectories/step-NNNNNN.*``, and an evaluation's ``evaluations/step-NNNNNN-sampled.*``.

::

    <stem>.jsonl.zst           one row a trajectory: what a person reads (turns, times, tests, reward, ending,
    training status) <stem>.safetensors         its arrays: <key>/tokens, loss_mask, logprobs, and routes (an
    r3.archive) <stem>.train.safetensors   what the trainer saw of their tokens (agent_rl.rollout.token_details)
    <stem>.index.json.zst      its row in a few numbers, for lists and filters (agent_rl.rollout.step_index)

The arrays are in place before the rows are, so a step whose rows exist is whole; the sidecar comes last and can be made
again of the rows. Log-probs are those of the sampled tokens alone, the mask is eight tokens a byte. A row's messages
name the turn whose text they have, so nothing is written twice.

One trajectory alone, as bytes (:func:`encode_trajectory`), is a safetensors file of the same arrays with the row as
metadata. Rows say their ``format``: 2 (plain JSONL; whole arrays and messages; no times, tests or fates) is still read;
any other is refused in a line, never guessed at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save, save_file

from agent_rl.errors import AgentRlError
from agent_rl.rollout.jsonl_zst import SUFFIX, encode_rows, read_rows
from agent_rl.rollout.step_index import sidecar_path, write_sidecar
from agent_rl.rollout.token_details import Details, details_path, worst, write_details
from agent_rl.types import (
    Branch,
    BranchCause,
    Group,
    StopReason,
    TokenDetail,
    TrainingDecision,
    Trajectory,
    Turn,
    VersionSpan,
    append_version,
)
from agent_rl.utils.run_files import replacing, write_atomic
from r3 import archive
from r3.routing import Routing, RoutingError

FORMAT = 3
"""What is written. Rows of 2 did not say so at first; those of 1 had their routes as plain arrays."""
_READ = (2, FORMAT)

DIRECTORY = "trajectories"
EVALUATIONS = "evaluations"
LOG_CHARACTERS = 8192
"""Of a test log its end is kept, so many characters."""
_ALONE = "trajectory"
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, SafetensorError)
"""What reading a file raises that is damaged, or was never one of ours."""
_PLAIN = ("task_id", "env", "reward", "resolved", "patch", "error", "seconds", "grade_seconds")
_TIMES = ("began", "queue_seconds", "start_seconds", "grade_began")


def write_trajectories(
    run_dir: Path,
    step: int,
    groups: Sequence[Group],
    *,
    verdicts: Sequence[TrainingDecision] = (),
    details: Details | None = None,
    routes: bool = True,
) -> Path:
    """:func:`write_records` of a global step."""
    return write_records(step_stem(run_dir, step), groups, verdicts=verdicts, details=details, routes=routes)


def write_records(
    stem: Path,
    groups: Sequence[Group],
    *,
    verdicts: Sequence[TrainingDecision] = (),
    details: Details | None = None,
    routes: bool = True,
) -> Path:
    """Write the trajectories of ``groups`` under ``stem`` and return the path of their rows.

    ``verdicts``: one a trajectory, in the order of groups and members, or none at all; ``details``: what the trainer
    saw of some, by their number in that order and their branch, None where nobody asked. ``routes`` False leaves the
    routes out (they are most of the bytes). They are archived without their order within a row. Blocks on the disk:
    call it in a thread from an event loop.
    """
    members = [(index, group, t) for index, group in enumerate(groups) for t in group.trajectories]
    arrays: dict[str, NDArray] = {}
    rows: list[dict[str, Any]] = []
    for number, (index, group, trajectory) in enumerate(members):
        key = f"{number:05d}"
        arrays |= _arrays(key, trajectory, routes)
        rows.append(
            {
                **_described(trajectory, key, routes),
                "group": {"index": index, "infrastructure_failures": group.infrastructure_failures},
                **asdict(verdicts[number] if verdicts else TrainingDecision(None)),
                **_worst([detail for (of, _), detail in (details or {}).items() if of == number]),
            }
        )
    path = stem.with_name(stem.name + SUFFIX)
    encoded, places = encode_rows(rows)
    _forget_rows(stem)  # rows that were written before must not be read with the new arrays
    _save_arrays(arrays_path(path), arrays)
    if details is not None:
        write_details(stem, details, groups)
    write_atomic(path, encoded)
    write_sidecar(stem, rows, places)
    return path


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """``trajectory`` with all its arrays, for :func:`decode_trajectory`. Here its routes keep their order within a row:
    a trainer that replays them then computes the same bits."""
    row = _described(trajectory, _ALONE, True)
    return save(_arrays(_ALONE, trajectory, True, keep_order=True), metadata={"row": json.dumps(row)})


def decode_trajectory(data: bytes, where: str) -> Trajectory:
    """What :func:`encode_trajectory` made ``data`` of. Raises AgentRlError naming ``where`` on anything else."""
    row = row_of_encoded(data, where)
    try:
        arrays = load(data)
    except _BROKEN as error:
        raise AgentRlError(f"{where}: not a trajectory: {error}") from error
    return read_trajectory(row, arrays.__getitem__, where)


def row_of_encoded(data: bytes, where: str) -> dict[str, Any]:
    """The row of what :func:`encode_trajectory` made ``data`` of, without its arrays. Raises as
    :func:`decode_trajectory`."""
    try:
        length = int.from_bytes(data[:8], "little")
        row = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["row"])
    except _BROKEN as error:
        raise AgentRlError(f"{where}: not a trajectory: {error}") from error
    if not isinstance(row, dict):
        raise AgentRlError(f"{where}: not a trajectory: its row is a {type(row).__name__}")
    return row


def read_trajectories(run_dir: Path, step: int) -> tuple[Group, ...]:
    """The groups of ``step`` as they were written. Raises AgentRlError where rows or arrays are absent, are of a format
    that this version does not read, or routes were damaged."""
    path = trajectories_path(run_dir, step)
    for file in (path, arrays_path(path)):
        if not file.is_file():
            raise AgentRlError(f"{file}: no trajectories of step {step} there")
    return read_groups(path)


def read_groups(path: Path) -> tuple[Group, ...]:
    """The groups whose rows ``path`` holds, with the arrays beside it. Raises as :func:`read_trajectories`."""
    members: dict[int, list[Trajectory]] = {}
    failures: dict[int, int] = {}
    tasks: dict[int, str] = {}
    try:
        with safe_open(arrays_path(path), framework="numpy") as tensors:
            for number, row in enumerate(read_rows(path), 1):
                trajectory = read_trajectory(row, tensors.get_tensor, f"{path}, line {number}")
                index = int(row["group"]["index"])
                members.setdefault(index, []).append(trajectory)
                failures[index], tasks[index] = int(row["group"]["infrastructure_failures"]), row["task_id"]
    except _BROKEN as error:
        raise AgentRlError(f"{path}: not trajectories that this version reads: {_why(error)}") from error
    return tuple(Group(tasks[index], tuple(members[index]), failures[index]) for index in members)


def steps_on_disk(run_dir: Path) -> list[int]:
    """The steps that have trajectories, in order."""
    files = chain.from_iterable((run_dir / DIRECTORY).glob(f"step-*{suffix}") for suffix in (SUFFIX, ".jsonl"))
    return sorted({int(path.name.split(".")[0].removeprefix("step-")) for path in files})


def step_stem(run_dir: Path, step: int) -> Path:
    """What the names of a step's files begin with."""
    return run_dir / DIRECTORY / f"step-{step:06d}"


def evaluation_stem(run_dir: Path, key: str) -> Path:
    """What the names of the files of evaluation ``key``, ``step-20/sampled``, begin with."""
    step, _, decoding = key.partition("/")
    return run_dir / EVALUATIONS / f"step-{int(step.removeprefix('step-')):06d}-{decoding}"


def trajectories_path(run_dir: Path, step: int) -> Path:
    """The rows of ``step``, whether or not they are there."""
    return rows_path(step_stem(run_dir, step))


def rows_path(stem: Path) -> Path:
    """The rows under ``stem``: those of format 2 where there are no others."""
    path, plain = stem.with_name(stem.name + SUFFIX), stem.with_name(stem.name + ".jsonl")
    return plain if plain.exists() and not path.exists() else path


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray]:
    """Arrays of the file ``path`` by name. Raises AgentRlError where the file is damaged or lacks one."""
    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tensors.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise AgentRlError(f"{path}: damaged ({error})") from None


def arrays_path(rows: Path) -> Path:
    """The arrays of the rows in ``rows``."""
    return rows.with_name(rows.name.removesuffix(".zst").removesuffix(".jsonl") + ".safetensors")


def messages_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a row, whole. Raises what reading a damaged row raises."""
    turns = row["turns"]
    return [_unfolded(message, turns) for message in row["messages"]]


def _worst(details: Sequence[TokenDetail]) -> dict[str, float | None]:
    """The largest gaps of a trajectory's branches."""
    return {
        f"worst_{name}": max(
            (far for detail in details if (far := worst(getattr(detail, name))) is not None), default=None
        )
        for name in ("gap", "gap_without_replay")
    }


def _forget_rows(stem: Path) -> None:
    for path in (rows_path(stem), stem.with_name(stem.name + ".jsonl"), sidecar_path(stem), details_path(stem)):
        path.unlink(missing_ok=True)


def _described(trajectory: Trajectory, key: str, routes: bool) -> dict[str, Any]:
    """All of a trajectory but its arrays, which are named ``<key>/<what>``."""
    return {
        "format": FORMAT,
        **{name: getattr(trajectory, name) for name in (*_PLAIN, *_TIMES)},
        "stop": trajectory.stop.value,
        "weight_versions": trajectory.weight_versions,
        "suspected_hack": trajectory.suspected_hack,
        "tests": dict(trajectory.tests),
        "test_log": trajectory.test_log[-LOG_CHARACTERS:],
        "turns": [asdict(turn) for turn in trajectory.turns],
        "messages": folded([dict(m) for m in trajectory.messages], [(t.text, t.observation) for t in trajectory.turns]),
        "branches": [_branch(branch, routes) for branch in trajectory.branches],
        "harness": dict(trajectory.harness),
        "arrays": {"key": key, "tokens": len(trajectory.tokens), "routes": routes and trajectory.routing is not None},
    }


def _branch(branch: Branch, routes: bool) -> dict[str, Any]:
    return {
        "parent": branch.parent,
        "shared": branch.shared,
        "cause": branch.cause.value,
        "tokens": len(branch.tokens),
        "sampled": branch.sampled_tokens,
        "routes": routes and branch.routing is not None,
        "versions": [[span.start, span.stop, span.version] for span in branch.versions],
    }


def folded(messages: Sequence[dict[str, Any]], turns: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """The messages; the content of one that only repeats a turn, of a text and an observation, is that turn's number
    (``{"turn": 0}``, or ``{"observed": 0, "rest": "what follows the observation"}``)."""
    at, result = -1, list[dict[str, Any]]()
    for message in messages:
        content: Any = message["content"]
        answer = message["role"] == "assistant"
        if answer and at + 1 < len(turns) and content == turns[at + 1][0]:
            at += 1
            content = {"turn": at}
        elif at >= 0 and not answer and isinstance(content, str) and content.startswith(turns[at][1]):
            content = {"observed": at, "rest": content[len(turns[at][1]) :]}
        result.append({**message, "content": content})
    return result


def _unfolded(message: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    content = message["content"]
    if isinstance(content, Mapping):
        if "turn" in content:
            return {**message, "content": turns[content["turn"]]["text"]}
        content = turns[content["observed"]]["observation"] + content["rest"]
    return {**message, "content": content}


def branch_key(key: str, branch: int) -> str:
    """What the names of a branch's arrays begin with; the first branch's begin with the row's key alone."""
    return f"{key}.{branch}" if branch else key


def _arrays(key: str, trajectory: Trajectory, routes: bool, *, keep_order: bool = False) -> dict[str, NDArray]:
    arrays: dict[str, NDArray] = {}
    for number, branch in enumerate(trajectory.branches):
        own = branch_key(key, number)
        arrays[f"{own}/tokens"] = branch.tokens
        arrays[f"{own}/loss_mask"] = np.packbits(branch.loss_mask)
        arrays[f"{own}/logprobs"] = branch.logprobs[branch.loss_mask]
        if routes and branch.routing is not None:
            encoded = archive.encode(branch.routing, keep_order=keep_order)
            arrays[f"{own}/routes"] = np.frombuffer(encoded, np.uint8)
    # safetensors writes an array's buffer as it lies in memory, strides ignored.
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _save_arrays(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """As write_atomic, without the bytes of a whole step in memory a second time."""
    with replacing(path) as temporary:
        save_file(dict(arrays), temporary)


def read_trajectory(row: Mapping[str, Any], array: Callable[[str], NDArray], where: str) -> Trajectory:
    """The trajectory of ``row``; ``array`` gives its arrays by name. Raises AgentRlError naming ``where``."""
    try:
        found = row.get("format", 2 if "routes" in row.get("arrays", ()) else 1)
        if found not in _READ:
            raise AgentRlError(
                f"{where}: written in format {found} of trajectories; this version reads formats 2 and {FORMAT}"
            )
        later = {name: row[name] for name in (*_TIMES, "tests", "test_log", "harness")} if found == FORMAT else {}
        first, *further = (read_branch(row, number, array) for number in range(len(row.get("branches", [None]))))
        return Trajectory(
            **{name: row[name] for name in _PLAIN},
            **later,
            tokens=first.tokens,
            loss_mask=first.loss_mask,
            logprobs=first.logprobs,
            routing=first.routing,
            stop=StopReason(row["stop"]),
            turns=tuple(Turn(**turn) for turn in row["turns"]),
            messages=tuple(messages_of(row)),
            versions=first.versions,
            suspected_hack=tuple(row["suspected_hack"]),
            further=tuple(further),
        )
    except _BROKEN as error:
        raise AgentRlError(f"{where}: not a trajectory that this version reads: {_why(error)}") from error


def read_branch(row: Mapping[str, Any], number: int, array: Callable[[str], NDArray], *, routes: bool = True) -> Branch:
    """One branch of ``row``; without ``routes`` they are not read. Raises what reading a damaged file raises."""
    key = branch_key(row["arrays"]["key"], number)
    tokens, loss_mask, logprobs = (array(f"{key}/{name}") for name in ("tokens", "loss_mask", "logprobs"))
    if row.get("format") == FORMAT:
        loss_mask = np.unpackbits(loss_mask, count=len(tokens)).view(np.bool_)
        logprobs = _spread(logprobs, loss_mask)
    own = row.get("branches", [None])[number] or {"routes": row["arrays"]["routes"]}
    return Branch(
        tokens,
        loss_mask,
        logprobs,
        _routing(key, array) if routes and own["routes"] else None,
        _versions(own, row),
        own.get("parent"),
        own.get("shared", 0),
        BranchCause(own.get("cause", BranchCause.START)),
    )


def _spread(values: NDArray[np.float32], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    whole = np.zeros(len(mask), np.float32)
    whole[mask] = values
    return whole


def _versions(branch: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[VersionSpan, ...]:
    """The versions of a branch. Rows of format 2 name them without their places: those of several are the turns'."""
    if "versions" in branch:
        return tuple(VersionSpan(int(start), int(stop), str(version)) for start, stop, version in branch["versions"])
    named, tokens = row["weight_versions"], int(row["arrays"]["tokens"])
    if len(named) == 1:
        return (VersionSpan(0, tokens, str(named[0])),)
    spans: list[VersionSpan] = []
    for turn in row["turns"]:
        start = turn["prompt_tokens"]
        append_version(spans, VersionSpan(start, start + turn["completion_tokens"], turn["weight_version"]))
    return tuple(spans)


def _why(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _routing(key: str, array: Callable[[str], NDArray]) -> Routing:
    try:
        return archive.decode(array(f"{key}/routes").data, where=f"routes of trajectory {key}")
    except RoutingError as error:
        raise AgentRlError(str(error)) from error
