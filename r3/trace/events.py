"""The trace of routes from the rollout to the routers, for :mod:`r3.trace.check`. Imports numpy and pydantic only.

Each process writes its part of a traced step as JSON lines with hashes, shapes and previews, never the routes
themselves. Event and field names are those of NeMo RL's route trace, so that its checker reads these files too; further
events have names of this project. In the order of the data flow::

    event                          by       content
    trace_plan                     driver   which ranks, layers and micro-batches the trace must cover
    rollout_payload_sample         driver   a sample's rows and layers meant for one rank, cut from the rollout's routes
    tq_fetch_sample                rank     what that rank holds of the sample as a pass begins (stage prev_lp, train)
    cp_routed_experts              rank     a micro-batch's share as its routers get it, and whose each row is
    router_replay_assignment       router   the experts given to one layer
    router_replay_action           router   switched to replay_forward, and to replay_backward after it
    router_replay_forward_verify   router   the experts it then used, forward and under the backward pass
    trace_end                      all      how many lines the file has, and the error that ended the step if one did

A hash of routes is the SHA-256 of little-endian int32 ``[rows, layers, top_k]`` with -1 in absent rows, whose values
have no meaning. ``sorted_sha256`` hashes each row's experts in ascending order, because routers return sets. Steps and
layers count from 1; samples, rows, ranks and micro-batches from 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from r3.atomic_write import write_atomic


class TraceError(Exception):
    """A missing or unreadable trace; the message names file and line."""


Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Runs = tuple[tuple[Count, Count], ...]
"""Ascending integers as half-open runs: ``((0, 3), (9, 12))``."""

Stage = Literal["prev-logprob", "train"]
FetchStage = Literal["prev_lp", "train"]
ReplayAction = Literal["replay_forward", "replay_backward"]
STAGES: tuple[Stage, ...] = ("prev-logprob", "train")
FETCH_STAGE: dict[Stage, FetchStage] = {"prev-logprob": "prev_lp", "train": "train"}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorRecord(_Record):
    """A complete array that a router received or used."""

    shape: tuple[Count, ...]
    dtype: str
    sha256: Sha
    preview: tuple[int, ...]


class MatrixRecord(TensorRecord):
    """Experts of one layer, ``[tokens, top_k]``."""

    shape: tuple[Count, Count]


class ValidRecord(_Record):
    """The rows of one sample (``valid``) out of an array of ``full_shape``."""

    full_shape: tuple[Count, ...]
    valid_shape: tuple[Count, ...]
    dtype: str
    valid_sha256: Sha
    valid_preview: tuple[int, ...]


class RoutesRecord(ValidRecord):
    """Routes of one sample. ``layer_sha256``: one hash per layer; ``row_digests``: four hex digits per row.

    The digests only locate a difference; ``valid_sha256`` proves equality.
    """

    missing_rows: Count
    layer_sha256: tuple[Sha, ...]
    row_digests: Annotated[str, Field(pattern=r"^(?:[0-9a-f]{4})*$")]


class SampleRows(_Record):
    """Part of one sample: its ``rows`` in the rank's order, for ``layers`` (1-based numbers).

    ``identity_sha256``: hash of the rows' 32-bit identities (:func:`r3.shard.identify`).
    """

    key: str
    rows: Runs
    layers: tuple[Count, ...]
    input_ids: ValidRecord
    routed_experts: RoutesRecord
    identity_sha256: Sha

    @model_validator(mode="after")
    def _agrees(self) -> SampleRows:
        rows, routes = _total(self.rows), self.routed_experts
        if self.input_ids.valid_shape != (rows,) or routes.valid_shape[:2] != (rows, len(self.layers)):
            raise ValueError("rows and layers do not match the shapes")
        if len(routes.layer_sha256) != len(self.layers) or len(routes.row_digests) != 4 * rows:
            raise ValueError("expected one hash per layer and one digest per row")
        return self


class _Event(_Record):
    rank: Count | None
    trace_step: Count


def _total(rows: Runs) -> int:
    if any(start >= stop for start, stop in rows):
        raise ValueError("a run of rows ends before it starts")
    return sum(stop - start for start, stop in rows)


class RankPlan(_Record):
    """What a rank's trace must contain: ``micro_batches`` of each pass, at ``layers`` (1-based numbers)."""

    rank: Count
    data_rank: Count
    layers: tuple[Count, ...]
    micro_batches: Count


class TracePlan(_Event):
    """What the trace of a step must contain; ``layers`` are all MoE layers."""

    event: Literal["trace_plan"] = "trace_plan"
    layers: tuple[Count, ...]
    recompute: bool
    verify_forward: bool
    ranks: tuple[RankPlan, ...]


class _SampleEvent(_Event, SampleRows):
    sample_idx: Count
    valid_length: Count
    microbatch_idx: Count

    @model_validator(mode="after")
    def _has_length(self) -> _SampleEvent:
        if self.valid_length != _total(self.rows):
            raise ValueError("valid_length is not the number of rows")
        return self


class Payload(_SampleEvent):
    """Rows of a sample of ``sample_length`` tokens, sent to rank ``to_rank``."""

    event: Literal["rollout_payload_sample"] = "rollout_payload_sample"
    to_rank: Count
    sample_length: Count


class Fetch(_SampleEvent):
    event: Literal["tq_fetch_sample"] = "tq_fetch_sample"
    stage: FetchStage


class _PassEvent(_Event):
    stage: Stage
    microbatch_idx: Count


class Segment(SampleRows):
    """A traced sample inside a micro-batch; ``local``: the indices of its rows there."""

    local: Runs

    @model_validator(mode="after")
    def _has_places(self) -> Segment:
        if _total(self.local) != _total(self.rows):
            raise ValueError("expected one local index per row")
        return self


class Shard(_PassEvent):
    """A rank's shard of a micro-batch. ``cp_token_identity_verified_count``: rows compared with their tokens."""

    event: Literal["cp_routed_experts"] = "cp_routed_experts"
    cp_rank: Count
    cp_size: Count
    tensor: TensorRecord
    token_identity: TensorRecord
    input_ids: TensorRecord
    cp_token_identity_verified_count: Count | None
    missing_rows: Count
    layers: tuple[Count, ...]
    layer_sha256: tuple[Sha, ...]
    segments: tuple[Segment, ...]

    @model_validator(mode="after")
    def _agrees(self) -> Shard:
        if len(self.tensor.shape) != 3 or not self.tensor.shape[1] == len(self.layers) == len(self.layer_sha256):
            raise ValueError("expected one column and one hash per layer")
        return self


class _RouterEvent(_PassEvent):
    layer_number: Count


class Assignment(_RouterEvent):
    """``payload_idx``: the layer's column in the sample's routes. ``differs_at``: the first row that differs from the
    shard."""

    event: Literal["router_replay_assignment"] = "router_replay_assignment"
    payload_idx: Count
    tensor: MatrixRecord
    sorted_sha256: Sha
    differs_at: Count | None


class Action(_RouterEvent):
    event: Literal["router_replay_action"] = "router_replay_action"
    action: ReplayAction


class ForwardVerify(_RouterEvent):
    """``actual`` and ``expected`` hold every row; ``given_sha256`` is ``actual`` with the rows without routes at -1."""

    event: Literal["router_replay_forward_verify"] = "router_replay_forward_verify"
    action: ReplayAction
    topk: Count
    actual: MatrixRecord
    expected: MatrixRecord | None
    matches_expected: bool
    fallback_rows: Count
    given_sha256: Sha
    differs_at: Count | None


class End(_Event):
    """``records``: lines of the file, this one included; ``sha256``: of all before it."""

    event: Literal["trace_end"] = "trace_end"
    records: Count
    sha256: Sha
    error: str | None


Event = TracePlan | Payload | Fetch | Shard | Assignment | Action | ForwardVerify | End
EVENTS: dict[str, type[Event]] = {
    kind.model_fields["event"].default: kind
    for kind in (TracePlan, Payload, Fetch, Shard, Assignment, Action, ForwardVerify, End)
}


class TraceWriter:
    """Writes one process's trace of one step, atomically on close, also after an error. A context manager.

    ``rank`` None is the driver. ``previews``: number of values of an array written beside its hash.
    """

    def __init__(self, directory: Path, step: int, rank: int | None, previews: int = 0) -> None:
        self.step, self.rank, self.previews = step, rank, previews
        self.path = directory / f"{_stem(step)}_{'driver' if rank is None else f'rank-{rank:05d}'}.jsonl"
        self._lines: list[bytes] = []

    def add(self, kind: type[Event], **fields: Any) -> None:
        """Add one event."""
        record = kind(rank=self.rank, trace_step=self.step, **fields).model_dump(mode="json")
        ordered = {name: record.pop(name) for name in ("event", "rank", "trace_step")} | record
        self._lines.append(json.dumps(ordered, separators=(",", ":")).encode() + b"\n")

    def close(self, error: str | None = None) -> None:
        """Write the file; ``error``: the reason if the step ended early."""
        digest = hashlib.sha256(b"".join(self._lines)).hexdigest()
        self.add(End, records=len(self._lines) + 1, sha256=digest, error=error)
        write_atomic(self.path, b"".join(self._lines))

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(None if error is None else f"{type(error).__name__}: {error}")


def remove_step(directory: Path, step: int) -> None:
    """Remove the trace of ``step`` that an earlier start of the run wrote."""
    for path in directory.glob(f"{_stem(step)}_*.jsonl"):
        path.unlink()


def _stem(step: int) -> str:
    return f"r3_trace_step-{step:06d}"


def canonical(experts: NDArray[np.integer], present: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Returns routes in the form that is hashed: int32 ``[rows, layers, top_k]``, absent rows -1."""
    return np.where(present[:, None, None], experts.astype("<i4"), np.int32(-1))


def sha256(array: NDArray[Any]) -> str:
    """Returns the SHA-256 of an array's bytes in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def sorted_sha256(array: NDArray[np.integer]) -> str:
    """:func:`sha256` of experts with each row ascending."""
    return sha256(np.sort(array, axis=-1))


def tensor_record(array: NDArray[Any], previews: int) -> dict[str, Any]:
    """Returns the fields of :class:`TensorRecord` for an array."""
    return {
        "shape": array.shape,
        "dtype": array.dtype.name,
        "sha256": sha256(array),
        "preview": tuple(array.reshape(-1)[:previews].tolist()),
    }


def sample_rows(
    key: str,
    positions: NDArray[np.integer],
    layers: Sequence[int],
    tokens: NDArray[np.integer],
    experts: NDArray[np.integer],
    present: NDArray[np.bool_],
    identity: NDArray[np.uint32],
    *,
    full_shape: tuple[int, ...],
    previews: int,
) -> dict[str, Any]:
    """Returns the fields of :class:`SampleRows` for the rows ``positions`` of a sample with their ``tokens``,
    ``experts`` and ``identity``; ``full_shape``: shape of the routes that they are part of."""
    routes = canonical(experts, present)
    return {
        "key": key,
        "rows": runs(positions),
        "layers": tuple(layers),
        "input_ids": _valid(tokens.astype("<i8"), full_shape[:1], previews),
        "routed_experts": {
            **_valid(routes, full_shape, previews),
            "missing_rows": int((~present).sum()),
            "layer_sha256": layer_sha256(routes),
            "row_digests": row_digests(routes),
        },
        "identity_sha256": sha256(identity.astype("<u4")),
    }


def _valid(array: NDArray[Any], full_shape: tuple[int, ...], previews: int) -> dict[str, Any]:
    return {
        "full_shape": full_shape,
        "valid_shape": array.shape,
        "dtype": array.dtype.name,
        "valid_sha256": sha256(array),
        "valid_preview": tuple(array.reshape(-1)[:previews].tolist()),
    }


def layer_sha256(routes: NDArray[np.int32]) -> tuple[str, ...]:
    """Returns one hash per layer of ``[rows, layers, top_k]``."""
    return tuple(sha256(routes[:, layer]) for layer in range(routes.shape[1]))


def row_digests(routes: NDArray[np.int32]) -> str:
    """Returns four hex digits per row of ``[rows, layers, top_k]``; they locate differences and prove nothing."""
    flat = routes.reshape(len(routes), -1).astype(np.int64).view(np.uint64) + np.uint64(2)
    weights = np.cumprod(np.full(flat.shape[1], 0x9E3779B97F4A7C15, np.uint64))
    mixed = (flat * weights).sum(axis=1, dtype=np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(48)).astype(">u2").tobytes().hex()


def runs(values: NDArray[np.integer]) -> Runs:
    """Returns integers as half-open runs, in their order.

    >>> runs(np.array([0, 1, 2, 9, 10]))
    ((0, 3), (9, 11))
    """
    if not len(values):
        return ()
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(np.asarray(values), breaks))


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of a directory by step; ``changed``: step, rank and name of files whose hash does not match."""

    steps: Mapping[int, Sequence[Event]]
    changed: tuple[tuple[int, int | None, str], ...]


def read_trace(directory: Path) -> Trace:
    """Read ``directory/r3_trace_*.jsonl``. Raises TraceError naming file and line."""
    paths = sorted(directory.glob("r3_trace_*.jsonl")) if directory.is_dir() else []
    if not paths:
        raise TraceError(f"{directory}: no r3_trace_*.jsonl here; set r3.trace.steps to write one")
    steps: dict[int, list[Event]] = {}
    changed = []
    for path in paths:
        events, intact = _read_file(path)
        steps.setdefault(events[0].trace_step, []).extend(events)
        if not intact:
            changed.append((events[0].trace_step, events[0].rank, path.name))
    return Trace(steps, tuple(changed))


def _read_file(path: Path) -> tuple[list[Event], bool]:
    """Returns a file's events, and whether its hash matches."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    if not data.endswith(b"\n"):
        raise TraceError(f"{path}: its last line is incomplete")
    lines = data[:-1].split(b"\n")
    events = [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    last = events[-1]
    if not isinstance(last, End) or last.records != len(events):
        fault = f"says {last.records} lines" if isinstance(last, End) else "is no trace_end"
        raise TraceError(f"{path}: has {len(events)} lines and its last {fault}: lines are missing or added")
    for number, event in enumerate(events, start=1):
        if (event.rank, event.trace_step) != (last.rank, last.trace_step):
            raise TraceError(
                f"{path}:{number}: rank {event.rank}, step {event.trace_step} in the file of another rank or step"
            )
        if isinstance(event, End) and event is not last:
            raise TraceError(f"{path}:{number}: lines follow the trace_end")
    return events, hashlib.sha256(data[: -len(lines[-1]) - 1]).hexdigest() == last.sha256


def _read_line(line: bytes, where: str) -> Event:
    try:
        record = json.loads(line, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise TraceError(f"{where}: not a trace event: nested too deep") from None
    except ValueError as error:  # bad JSON, bad UTF-8, integers beyond what Python reads
        raise TraceError(f"{where}: not JSON: {error}") from None
    name = record.get("event") if isinstance(record, dict) else None
    if not isinstance(name, str) or name not in EVENTS:
        raise TraceError(f"{where}: unknown event {str(name)[:80]!r}, expected one of {', '.join(EVENTS)}")
    try:
        return EVENTS[name].model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field_name = ".".join(str(part) for part in problem["loc"])
        raise TraceError(f"{where}: {name}: {field_name or 'record'}: {problem['msg']}") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key occurs twice")
    return record
