"""Trajectories on disk: ``trajectories/step-NNNNNN.*``, and ``evaluations/step-NNNNNN-sampled.*`` for evaluations.

::

    <stem>.jsonl.zst           one row per trajectory, for people: turns, times, reward, status
    <stem>.safetensors         its arrays: <key>/tokens, loss_mask, logprobs, routes (see r3.archive),
                               kept_counts and kept_ids (see r3.kept_tokens)
    <stem>.train.safetensors   the trainer's per-token values (agent_rl.rollout.token_details)
    <stem>.index.json.zst      the rows as a few numbers, for lists and filters (agent_rl.rollout.step_index)

Arrays are written before rows, so a step with rows is complete. The step index is written last and can be rebuilt from
the rows. Log-probs are stored for sampled tokens only; the mask takes one bit per token. A message that repeats the
text of a turn stores the number of the turn.

:func:`encode_trajectory` encodes one trajectory as a safetensors file of the same arrays with its row as metadata.
Every row names its ``format``; any other format is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save, save_file

from agent_rl.errors import AgentRlError
from agent_rl.rollout.jsonl_zst import SUFFIX, encode_rows, read_rows
from agent_rl.rollout.step_index import step_index_path, write_step_index
from agent_rl.rollout.token_details import Details, bounded_tensor, details_path, worst, write_details
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
)
from agent_rl.utils import foreign
from agent_rl.utils.run_files import replacing, write_atomic
from envs.model_calls import ModelCall
from r3 import archive
from r3.kept_tokens import KeptTokens
from r3.routing import Routing, RoutingError

FORMAT = 4
_READABLE = (3, 4)
"""Format 3 has no kept tokens."""

DIRECTORY = "trajectories"
EVALUATIONS = "evaluations"
LOG_CHARACTERS = 8192
"""Characters kept from the end of a test log."""
_ALONE = "trajectory"
_BROKEN = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, SafetensorError)
"""Exceptions raised while reading a file that is damaged or of another kind."""
_PLAIN = ("task_id", "env", "reward", "resolved", "patch", "error", "seconds", "grade_seconds")
_TIMES = ("began", "queue_seconds", "start_seconds", "grade_began")


def write_trajectories(
    run_dir: Path,
    step: int,
    groups: Sequence[Group],
    *,
    decisions: Sequence[TrainingDecision] = (),
    details: Details | None = None,
    routes: bool = True,
) -> Path:
    """:func:`write_records` for a training step."""
    return write_records(step_stem(run_dir, step), groups, decisions=decisions, details=details, routes=routes)


def write_records(
    stem: Path,
    groups: Sequence[Group],
    *,
    decisions: Sequence[TrainingDecision] = (),
    details: Details | None = None,
    routes: bool = True,
) -> Path:
    """Write the trajectories of ``groups`` under ``stem``; returns the path of the rows.

    ``decisions``: one per trajectory in the order of groups and members, or empty. ``details``: the trainer's per-token
    values by number of trajectory and branch; None if they were not recorded. ``routes`` False omits the routes, which
    are most of the bytes. Routes are archived without their order within a row. Blocks on disk I/O: call it in a
    thread.
    """
    members = [(index, group, t) for index, group in enumerate(groups) for t in group.trajectories]
    arrays: dict[str, NDArray] = {}
    rows: list[dict[str, Any]] = []
    for number, (index, group, trajectory) in enumerate(members):
        key = f"{number:05d}"
        arrays |= _arrays(key, trajectory, routes)
        rows.append(
            {
                **_row_fields(trajectory, key, routes),
                "group": {"index": index, "infrastructure_failures": group.infrastructure_failures},
                **asdict(decisions[number] if decisions else TrainingDecision(None)),
                **_worst([detail for (owner, _), detail in (details or {}).items() if owner == number]),
            }
        )
    path = stem.with_name(stem.name + SUFFIX)
    encoded, positions = encode_rows(rows)
    _remove_rows(stem)  # old rows must not be read with the new arrays
    _save_arrays(arrays_path(path), arrays)
    if details is not None:
        write_details(stem, details, groups)
    write_atomic(path, encoded)
    write_step_index(stem, rows, positions)
    return path


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """``trajectory`` with all arrays, for :func:`decode_trajectory`. Routes keep their order within a row, so that a
    trainer that replays them computes the same bits."""
    row = _row_fields(trajectory, _ALONE, True)
    return save(_arrays(_ALONE, trajectory, True, keep_order=True), metadata={"row": json.dumps(row)})


def decode_trajectory(data: bytes, where: str) -> Trajectory:
    """The trajectory in ``data`` (see :func:`encode_trajectory`). Raises AgentRlError that names ``where`` for
    anything else."""
    row = row_of_encoded(data, where)
    try:
        arrays = load(data)
    except _BROKEN as error:
        raise AgentRlError(f"{where}: not a trajectory: {error}") from error
    return read_trajectory(row, arrays.__getitem__, where)


def row_of_encoded(data: bytes, where: str) -> dict[str, Any]:
    """The row of an encoded trajectory, without its arrays. Raises the same errors as :func:`decode_trajectory`."""
    try:
        length = int.from_bytes(data[:8], "little")
        row = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["row"])
    except _BROKEN as error:
        raise AgentRlError(f"{where}: not a trajectory: {error}") from error
    if not isinstance(row, dict):
        raise AgentRlError(f"{where}: not a trajectory: its row is a {type(row).__name__}")
    return row


def read_trajectories(run_dir: Path, step: int) -> tuple[Group, ...]:
    """The groups of ``step``, in order. Raises AgentRlError for missing or damaged files."""
    path = trajectories_path(run_dir, step)
    for file in (path, arrays_path(path)):
        foreign.require_regular(file)
        if not file.is_file():
            raise AgentRlError(f"{file}: no trajectories of step {step}")
    return read_groups(path)


def read_groups(path: Path) -> tuple[Group, ...]:
    """The groups in ``path``, with the arrays beside it. Raises the same errors as :func:`read_trajectories`."""
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
        raise AgentRlError(f"{path}: damaged trajectories: {_why(error)}") from error
    return tuple(Group(tasks[index], tuple(members[index]), failures[index]) for index in members)


def steps_on_disk(run_dir: Path) -> list[int]:
    """The steps that have trajectories, in order."""
    files = (run_dir / DIRECTORY).glob(f"step-*{SUFFIX}")
    numbers = (path.name.split(".")[0].removeprefix("step-") for path in files)
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


def step_stem(run_dir: Path, step: int) -> Path:
    """Path prefix of a step's files."""
    return run_dir / DIRECTORY / f"step-{step:06d}"


def evaluation_stem(run_dir: Path, key: str) -> Path:
    """Path prefix of the files of evaluation ``key``, e.g. ``step-20/sampled`` or ``step-20/SOURCE/sampled``."""
    step, _, kind = key.partition("/")
    return run_dir / EVALUATIONS / f"step-{int(step.removeprefix('step-')):06d}-{kind.replace('/', '-')}"


def trajectories_path(run_dir: Path, step: int) -> Path:
    """Path of the rows of ``step``; the file may not exist."""
    return rows_path(step_stem(run_dir, step))


def rows_path(stem: Path) -> Path:
    """Path of the rows under ``stem``."""
    return stem.with_name(stem.name + SUFFIX)


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, NDArray]:
    """Arrays of the file ``path`` by name. Raises AgentRlError if the file is damaged or an array is missing."""
    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: bounded_tensor(tensors, name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise AgentRlError(f"{path}: damaged ({error})") from None


def arrays_path(rows: Path) -> Path:
    """Path of the arrays that belong to ``rows``."""
    return rows.with_name(rows.name.removesuffix(SUFFIX) + ".safetensors")


def row_messages(row: Mapping[str, Any], branch: int = 0) -> list[dict[str, str]]:
    """The messages of a row's branch with their full text; empty for a further branch of an agent program. Raises the
    errors in :data:`_BROKEN` for a damaged row."""
    messages = row["branches"][branch].get("messages", ()) if branch else row["messages"]
    return [_unfold_message(message, row["turns"]) for message in messages]


def _worst(details: Sequence[TokenDetail]) -> dict[str, float | None]:
    """The largest gaps over a trajectory's branches."""
    return {
        f"worst_{name}": max((gap for d in details if (gap := worst(getattr(d, name))) is not None), default=None)
        for name in ("gap", "gap_without_replay")
    }


def _remove_rows(stem: Path) -> None:
    for path in (rows_path(stem), step_index_path(stem), details_path(stem)):
        path.unlink(missing_ok=True)


def _row_fields(trajectory: Trajectory, key: str, routes: bool) -> dict[str, Any]:
    """All fields of a trajectory except its arrays, which are stored as ``<key>/<name>``."""
    return {
        "format": FORMAT,
        **{name: getattr(trajectory, name) for name in (*_PLAIN, *_TIMES)},
        "stop": trajectory.stop.value,
        "weight_versions": trajectory.weight_versions,
        "suspected_hack": trajectory.suspected_hack,
        "mutant_seconds": trajectory.mutant_seconds,
        "tests": dict(trajectory.tests),
        "parts": dict(trajectory.parts),
        "metrics": dict(trajectory.metrics),
        "turn_rewards": trajectory.turn_rewards,
        "model_calls": [asdict(call) for call in trajectory.model_calls],
        "test_log": trajectory.test_log[-LOG_CHARACTERS:],
        "turns": [asdict(turn) for turn in trajectory.turns],
        "messages": _folded(trajectory.messages, trajectory.turns),
        "branches": [_branch_fields(trajectory, number, routes) for number in range(1 + len(trajectory.further))],
        "harness": dict(trajectory.harness),
        "arrays": {"key": key, "tokens": len(trajectory.tokens), "routes": routes and trajectory.routing is not None},
    }


def _branch_fields(trajectory: Trajectory, number: int, routes: bool) -> dict[str, Any]:
    branch = trajectory.branches[number]
    messages = {"messages": _folded(branch.messages, trajectory.turns)} if number and branch.messages else {}
    return {
        **messages,
        "parent": branch.parent,
        "shared": branch.shared,
        "cause": branch.cause.value,
        "tokens": len(branch.tokens),
        "sampled": branch.sampled_tokens,
        "routes": routes and branch.routing is not None,
        "kept": branch.kept is not None,
        "versions": [[span.start, span.stop, span.version] for span in branch.versions],
    }


def _folded(messages: Sequence[Mapping[str, str]], turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return fold_messages([dict(message) for message in messages], [(turn.text, turn.observation) for turn in turns])


def fold_messages(messages: Sequence[dict[str, Any]], turns: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """``messages`` with repeated text replaced. ``turns`` are (text, observation) pairs. The content of a message
    that repeats a turn becomes ``{"turn": 0}``, or ``{"observed": 0, "rest": "text after the observation"}``."""
    current, result = -1, list[dict[str, Any]]()
    for message in messages:
        content: Any = message["content"]
        is_reply = message["role"] == "assistant"
        following = range(current + 1, len(turns)) if is_reply else ()
        if (turn := next((number for number in following if turns[number][0] == content), None)) is not None:
            current = turn
            content = {"turn": current}
        elif current >= 0 and not is_reply and isinstance(content, str) and content.startswith(turns[current][1]):
            content = {"observed": current, "rest": content[len(turns[current][1]) :]}
        result.append({**message, "content": content})
    return result


def _unfold_message(message: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    content = message["content"]
    if isinstance(content, Mapping):
        if "turn" in content:
            return {**message, "content": turns[content["turn"]]["text"]}
        content = turns[content["observed"]]["observation"] + content["rest"]
    return {**message, "content": content}


def branch_key(key: str, branch: int) -> str:
    """Name prefix of a branch's arrays; the first branch uses the row's key."""
    return f"{key}.{branch}" if branch else key


def _arrays(key: str, trajectory: Trajectory, routes: bool, *, keep_order: bool = False) -> dict[str, NDArray]:
    arrays: dict[str, NDArray] = {}
    for number, branch in enumerate(trajectory.branches):
        prefix = branch_key(key, number)
        arrays[f"{prefix}/tokens"] = branch.tokens
        arrays[f"{prefix}/loss_mask"] = np.packbits(branch.loss_mask)
        arrays[f"{prefix}/logprobs"] = branch.logprobs[branch.loss_mask]
        if branch.kept is not None:
            arrays |= {f"{prefix}/kept_counts": branch.kept.counts, f"{prefix}/kept_ids": branch.kept.ids}
        if routes and branch.routing is not None:
            encoded = archive.encode(branch.routing, keep_order=keep_order)
            arrays[f"{prefix}/routes"] = np.frombuffer(encoded, np.uint8)
    # safetensors writes an array's buffer and ignores its strides.
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _save_arrays(path: Path, arrays: Mapping[str, NDArray]) -> None:
    """Like write_atomic, but without a second copy of the step's bytes in memory."""
    with replacing(path) as temporary:
        save_file(dict(arrays), temporary)


def read_trajectory(row: Mapping[str, Any], array: Callable[[str], NDArray], where: str) -> Trajectory:
    """The trajectory of ``row``; ``array`` returns its arrays by name. Raises AgentRlError that names ``where``."""
    try:
        if row.get("format") not in _READABLE:
            raise AgentRlError(f"{where}: trajectory format {row.get('format')!r}, expected 3 or 4")
        first, *further = (read_branch(row, number, array) for number in range(len(row["branches"])))
        return Trajectory(
            **{name: row[name] for name in (*_PLAIN, *_TIMES, "tests", "test_log", "harness")},
            tokens=first.tokens,
            loss_mask=first.loss_mask,
            logprobs=first.logprobs,
            routing=first.routing,
            kept=first.kept,
            stop=StopReason(row["stop"]),
            turns=tuple(Turn(**turn) for turn in row["turns"]),
            messages=tuple(row_messages(row)),
            versions=first.versions,
            suspected_hack=tuple(row["suspected_hack"]),
            mutant_seconds=row.get("mutant_seconds", 0.0),
            parts=row.get("parts", {}),
            metrics=row.get("metrics", {}),
            turn_rewards=tuple(row.get("turn_rewards", ())),
            model_calls=tuple(_model_call(call) for call in row.get("model_calls", ())),
            further=tuple(further),
        )
    except _BROKEN as error:
        raise AgentRlError(f"{where}: damaged trajectory: {_why(error)}") from error


def read_branch(row: Mapping[str, Any], number: int, array: Callable[[str], NDArray], *, routes: bool = True) -> Branch:
    """One branch of ``row``; ``routes`` False skips its routes. Raises the errors in :data:`_BROKEN` for a damaged
    file."""
    key = branch_key(row["arrays"]["key"], number)
    tokens, loss_mask, logprobs = (array(f"{key}/{name}") for name in ("tokens", "loss_mask", "logprobs"))
    loss_mask = np.unpackbits(loss_mask, count=len(tokens)).view(np.bool_)
    fields = row["branches"][number]
    return Branch(
        tokens,
        loss_mask,
        _scatter(logprobs, loss_mask),
        _routing(key, array) if routes and fields["routes"] else None,
        tuple(VersionSpan(int(start), int(stop), str(version)) for start, stop, version in fields["versions"]),
        fields["parent"],
        fields["shared"],
        BranchCause(fields["cause"]),
        KeptTokens(array(f"{key}/kept_counts"), array(f"{key}/kept_ids")) if fields.get("kept") else None,
        tuple(row_messages(row, number)) if number else (),
    )


def _model_call(row: Mapping[str, Any]) -> ModelCall:
    return ModelCall(**{**row, "messages": tuple(row["messages"])})


def _scatter(values: NDArray[np.float32], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """``[len(mask)]``: ``values`` where ``mask`` is True, else 0."""
    scattered = np.zeros(len(mask), np.float32)
    scattered[mask] = values
    return scattered


def _why(error: Exception) -> str:
    return f"missing key {error}" if isinstance(error, KeyError) else str(error)


def _routing(key: str, array: Callable[[str], NDArray]) -> Routing:
    try:
        return archive.decode(array(f"{key}/routes").data, where=f"routes of trajectory {key}")
    except RoutingError as error:
        raise AgentRlError(str(error)) from error
