"""Proves from a trace (:mod:`.events`) that the routers used the rollout's routes, token by token.

Each step is checked at six hand-overs, once for the old-log-prob pass and once for the update::

    rollout ─1─> payload ─2─> fetch ─3─> shard ─4─> router ─5─> used in forward ─6─> used in backward

1. The parts of a sample sent to the ranks cover each of its rows and layers exactly once.
2. A rank received the rows, layers, tokens and routes that were sent to it.
3. The micro-batch of its routers contains the same, at the positions of the same tokens.
4. Each layer receives its own column of that micro-batch.
5. Each router used the experts it received; only rows without routes were routed without replay.
6. The recomputation used the same experts as the forward pass.

A record that the plan announces and that is missing is a break, and so is a record that the plan does not announce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from r3.trace.events import (
    FETCH_STAGE,
    STAGES,
    Action,
    Assignment,
    End,
    Event,
    Fetch,
    ForwardVerify,
    Payload,
    RankPlan,
    ReplayAction,
    Runs,
    SampleRows,
    Shard,
    Stage,
    TraceError,
    TracePlan,
    read_trace,
)

BatchKey = tuple[Stage, int, int]
"""Stage, rank, micro-batch."""
LayerKey = tuple[Stage, int, int, int]
"""Stage, rank, micro-batch, layer."""


class HandOver(IntEnum):
    """The hand-overs in the order of the data flow."""

    PAYLOAD = 1
    FETCH = 2
    SHARD = 3
    ROUTER = 4
    FORWARD = 5
    BACKWARD = 6
    RUN = 7

    @property
    def title(self) -> str:
        return _TITLES[self]


_TITLES = {
    HandOver.PAYLOAD: "rollout -> payload",
    HandOver.FETCH: "payload -> fetch",
    HandOver.SHARD: "fetch -> shard",
    HandOver.ROUTER: "shard -> router",
    HandOver.FORWARD: "router -> used in forward",
    HandOver.BACKWARD: "forward -> used in backward",
    HandOver.RUN: "the step's end",
}


@dataclass(frozen=True, slots=True)
class Break:
    """A mismatch at a hand-over. ``layer`` counts from 1; ``row`` is that of the sample, or of the rank's micro-batch
    if ``sample`` is None. None: unknown or not applicable."""

    hand_over: HandOver
    step: int
    what: str
    stage: Stage | None = None
    rank: int | None = None
    microbatch: int | None = None
    sample: int | None = None
    layer: int | None = None
    row: int | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """Sort key: by pass, then by the data flow."""
        stage = -1 if self.stage is None else STAGES.index(self.stage)
        stage = len(STAGES) if self.hand_over is HandOver.RUN else stage
        places = (self.microbatch, self.layer, self.rank, self.sample, self.row)
        return (self.step, stage, self.hand_over, *(-1 if place is None else place for place in places))

    def __str__(self) -> str:
        named = ("stage", "rank", "microbatch", "sample", "layer", "row")
        places = [f"{name} {value}" for name in named if (value := getattr(self, name)) is not None]
        return f"{self.hand_over.title}: {', '.join([f'step {self.step}', *places])}: {self.what}"


@dataclass(frozen=True, slots=True)
class Tally:
    """Numbers of checked records and of breaks at a hand-over; ``stage`` None: it belongs to both passes."""

    hand_over: HandOver
    stage: Stage | None
    checked: int
    broken: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result for a directory of traces; ``breaks`` in the order of the data flow."""

    steps: tuple[int, ...]
    records: int
    tallies: tuple[Tally, ...]
    breaks: tuple[Break, ...]

    @property
    def holds(self) -> bool:
        return not self.breaks

    def as_json(self) -> dict[str, Any]:
        """Returns the report as plain values."""
        return {
            "holds": self.holds,
            "steps": list(self.steps),
            "records": self.records,
            "hand_overs": [asdict(tally) | {"hand_over": tally.hand_over.title} for tally in self.tallies],
            "breaks": [asdict(each) | {"hand_over": each.hand_over.title} for each in self.breaks],
        }


def check_dir(
    directory: Path, *, require_forward_verify: bool = False, require_shard_identity: bool = False
) -> CheckReport:
    """Check every traced step in ``directory``.

    ``require_forward_verify``: a missing record of the experts that a router used is a break.
    ``require_shard_identity``: a micro-batch with rows that were not compared with their tokens is a break.
    Raises TraceError if there is no trace or if it cannot be read.
    """
    trace = read_trace(directory)
    breaks = [
        Break(HandOver.RUN, step, f"{name} was changed after it was written", rank=rank)
        for step, rank, name in trace.changed
    ]
    counts: Counter[tuple[HandOver, Stage | None]] = Counter()
    for step, of_step in sorted(trace.steps.items()):
        checker = _StepChecker(_index(step, of_step), require_forward_verify, require_shard_identity)
        checker.run()
        breaks += checker.breaks
        counts += checker.counts
    breaks.sort(key=lambda each: (each.order, each.what))
    broken = Counter((each.hand_over, each.stage) for each in breaks)
    keys = sorted({*counts, *broken}, key=lambda key: (key[0], "" if key[1] is None else STAGES.index(key[1])))
    return CheckReport(
        steps=tuple(sorted(trace.steps)),
        records=sum(len(of_step) for of_step in trace.steps.values()),
        tallies=tuple(Tally(*key, counts[key], broken[key]) for key in keys),
        breaks=tuple(breaks),
    )


@dataclass
class _Step:
    """The records of one step by key."""

    plan: TracePlan
    payloads: dict[str, Payload] = field(default_factory=dict)
    fetches: dict[tuple[Stage, str], Fetch] = field(default_factory=dict)
    shards: dict[BatchKey, Shard] = field(default_factory=dict)
    assigned: dict[LayerKey, Assignment] = field(default_factory=dict)
    actions: dict[tuple[ReplayAction, LayerKey], Action] = field(default_factory=dict)
    verified: dict[tuple[ReplayAction, LayerKey], ForwardVerify] = field(default_factory=dict)
    ends: dict[int | None, End] = field(default_factory=dict)
    duplicates: list[Event] = field(default_factory=list)

    @cached_property
    def ranks(self) -> dict[int, RankPlan]:
        return {rank.rank: rank for rank in self.plan.ranks}


_PASS_OF = {fetch: stage for stage, fetch in FETCH_STAGE.items()}


def _index(step: int, events: Sequence[Event]) -> _Step:
    plans = [event for event in events if isinstance(event, TracePlan)]
    if len(plans) != 1:
        raise TraceError(f"step {step}: {len(plans)} trace_plan records, expected the driver's one")
    if len({rank.rank for rank in plans[0].ranks}) != len(plans[0].ranks):
        raise TraceError(f"step {step}: its trace_plan lists a rank twice")
    records = _Step(plans[0])
    for event in events:
        table, key = _table_and_key(records, event)
        if key in table:
            records.duplicates.append(event)
        table.setdefault(key, event)
    return records


def _table_and_key(records: _Step, event: Event) -> tuple[dict[Any, Any], Hashable]:
    """Returns the table and the key of a record."""
    match event:
        case TracePlan():
            return {}, None
        case Payload():
            return records.payloads, event.key
        case Fetch():
            return records.fetches, (_PASS_OF[event.stage], event.key)
        case Shard():
            return records.shards, (event.stage, _rank(event), event.microbatch_idx)
        case Assignment():
            return records.assigned, _layer_key(event)
        case Action():
            return records.actions, (event.action, _layer_key(event))
        case ForwardVerify():
            return records.verified, (event.action, _layer_key(event))
        case End():
            return records.ends, event.rank


def _layer_key(event: Assignment | Action | ForwardVerify) -> LayerKey:
    return event.stage, _rank(event), event.microbatch_idx, event.layer_number


def _rank(event: Event) -> int:
    return -1 if event.rank is None else event.rank


class _StepChecker:
    """Checks one step; fills ``breaks`` and ``counts``."""

    def __init__(self, step: _Step, require_verify: bool, require_identity: bool) -> None:
        self.of, self.step = step, step.plan.trace_step
        self.verify = step.plan.verify_forward or require_verify
        self.require_identity = require_identity
        self.stopped = {rank for rank in step.ranks if (end := step.ends.get(rank)) is None or end.error is not None}
        self.breaks: list[Break] = []
        self.counts: Counter[tuple[HandOver, Stage | None]] = Counter()

    def run(self) -> None:
        for event in self.of.duplicates:
            self._break(_hand_over_of(event), f"its {event.event} record is there twice", **_location(event))
        self._payload()
        for stage in STAGES:
            self._fetch(stage)
            self._shard(stage)
            self._router(stage)
            self._used(stage, "replay_forward", HandOver.FORWARD, self._forward)
            self._used(stage, "replay_backward", HandOver.BACKWARD, self._backward)
        for rank in [None, *self.of.ranks]:
            self._end(rank)

    def _break(self, hand_over: HandOver, what: str, **places: Any) -> None:
        self.breaks.append(Break(hand_over, self.step, what, **places))

    def _count(self, hand_over: HandOver, stage: Stage | None) -> None:
        self.counts[hand_over, stage] += 1

    def _match_keys(
        self,
        hand_over: HandOver,
        expected: Iterable[Any],
        records: Mapping[Any, Event],
        places: Callable[[Any], dict[str, Any]],
    ) -> list[Any]:
        """Returns the expected keys that have a record; adds a break for each missing and each unannounced record.

        Missing records of a rank that stopped early are not counted: the stop itself is a break.
        """
        keys = list(dict.fromkeys(expected))
        for key in keys:
            if key not in records and places(key)["rank"] not in self.stopped:
                self._break(hand_over, "no record of it", **places(key))
        for key in records.keys() - set(keys):
            self._break(hand_over, "a record that the plan does not announce", **_location(records[key]))
        return [key for key in keys if key in records]

    def _payload(self) -> None:
        samples: dict[int, list[Payload]] = {}
        for payload in self.of.payloads.values():
            samples.setdefault(payload.sample_idx, []).append(payload)
        if not samples:
            self._break(HandOver.PAYLOAD, "no sample was traced")
        for sample, parts in samples.items():
            self._count(HandOver.PAYLOAD, None)
            if problem := self._coverage_problem(parts):
                layer, row, what = problem
                self._break(HandOver.PAYLOAD, what, sample=sample, layer=layer, row=row)

    def _coverage_problem(self, parts: Sequence[Payload]) -> tuple[int | None, int | None, str] | None:
        """Returns why ``parts`` of one sample do not cover its rows and layers exactly once: layer, row, reason."""
        if len({(part.sample_length, part.microbatch_idx) for part in parts}) > 1:
            return None, None, "its parts do not agree on its length or micro-batch"
        holders = {rank.data_rank for part in parts if (rank := self.of.ranks.get(part.to_rank))}
        if len(holders) != 1 or any(part.to_rank not in self.of.ranks for part in parts):
            return None, None, "its parts are meant for ranks that are not one data-parallel rank's"
        length = parts[0].sample_length
        for layer in self.of.plan.layers:
            covered = sorted(run for part in parts if layer in part.layers for run in part.rows)
            for (_, stop), (start, _) in pairwise([(0, 0), *covered, (length, length)]):
                if start != stop:
                    what = "is meant for no rank" if start > stop else "is meant for two ranks"
                    return layer, min(start, stop), f"the row {what}"
        if extra := {layer for part in parts for layer in part.layers} - set(self.of.plan.layers):
            return min(extra), None, "not a layer with experts"
        return None

    def _fetch(self, stage: Stage) -> None:
        fetches = {key: fetch for key, fetch in self.of.fetches.items() if key[0] == stage}

        def places(key: tuple[Stage, str]) -> dict[str, Any]:
            payload = self.of.payloads[key[1]]
            return _location(payload) | {"stage": stage, "rank": payload.to_rank}

        expected = [(stage, key) for key in self.of.payloads]
        for key in self._match_keys(HandOver.FETCH, expected, fetches, places):
            self._count(HandOver.FETCH, stage)
            payload, fetch = self.of.payloads[key[1]], fetches[key]
            if fetch.rank != payload.to_rank:
                what = f"rank {fetch.rank} holds what was meant for rank {payload.to_rank}"
                self._break(HandOver.FETCH, what, **places(key))
            elif (fetch.sample_idx, fetch.microbatch_idx) != (payload.sample_idx, payload.microbatch_idx):
                self._break(HandOver.FETCH, "it came as another sample or micro-batch", **places(key))
            else:
                self._compare(HandOver.FETCH, payload, fetch, places(key))

    def _shard(self, stage: Stage) -> None:
        shards = {key: shard for key, shard in self.of.shards.items() if key[0] == stage}
        expected = [
            (stage, plan.rank, index)
            for plan in self.of.plan.ranks
            for index in range(min(plan.micro_batches, len(shards) + 1) if plan.layers else 0)
        ]
        segments: dict[str, tuple[Shard, SampleRows]] = {}
        for key in self._match_keys(HandOver.SHARD, expected, shards, _key_location):
            shard = shards[key]
            self._shard_alone(shard)
            segments |= {segment.key: (shard, segment) for segment in shard.segments}
        for (_, name), fetch in ((k, f) for k, f in self.of.fetches.items() if k[0] == stage):
            places = _location(fetch)
            self._count(HandOver.SHARD, stage)
            if name not in segments:
                if fetch.rank not in self.stopped:
                    self._break(HandOver.SHARD, "the sample is in no micro-batch", **places)
                continue
            shard, segment = segments.pop(name)
            if (shard.rank, shard.microbatch_idx) != (fetch.rank, fetch.microbatch_idx):
                self._break(
                    HandOver.SHARD, f"it is in micro-batch {shard.microbatch_idx} of rank {shard.rank}", **places
                )
            else:
                self._compare(HandOver.SHARD, fetch, segment, places)
        for shard, segment in segments.values():
            self._break(HandOver.SHARD, f"holds {segment.key}, which was not fetched", **_location(shard))

    def _shard_alone(self, shard: Shard) -> None:
        plan = self.of.ranks[_rank(shard)]
        rows, checked = shard.tensor.shape[0], shard.cp_token_identity_verified_count
        if shard.layers != plan.layers:
            what = f"holds layers {list(shard.layers)}, the rank has {list(plan.layers)}"
            self._break(HandOver.SHARD, what, **_location(shard))
        if checked != rows and not (checked is None and not self.require_identity):
            what = f"{checked or 0} of {rows} rows were compared with the tokens fed"
            self._break(HandOver.SHARD, what, **_location(shard))

    def _layer_keys(self, stage: Stage) -> list[LayerKey]:
        return [
            (stage, rank, index, layer)
            for (of, rank, index) in self.of.shards
            if of == stage and rank in self.of.ranks
            for layer in self.of.ranks[rank].layers
        ]

    def _router(self, stage: Stage) -> None:
        assigned = {key: given for key, given in self.of.assigned.items() if key[0] == stage}
        for key in self._match_keys(HandOver.ROUTER, self._layer_keys(stage), assigned, _key_location):
            self._count(HandOver.ROUTER, stage)
            given, shard = assigned[key], self.of.shards[key[:3]]
            layer_hashes = dict(zip(shard.layers, shard.layer_sha256, strict=True))
            columns = {layer: column for column, layer in enumerate(self.of.plan.layers)}
            if given.layer_number not in layer_hashes or columns.get(given.layer_number) != given.payload_idx:
                self._break(HandOver.ROUTER, f"column {given.payload_idx} is not this layer's", **_key_location(key))
            elif given.tensor.sha256 != layer_hashes[given.layer_number] or given.differs_at is not None:
                others = [layer for layer, sha in layer_hashes.items() if sha == given.tensor.sha256]
                what = f"was given layer {others[0]}'s routes" if others else "was given other routes than the shard's"
                self._break(HandOver.ROUTER, what, **self._row_location(key, given.differs_at))

    def _used(
        self,
        stage: Stage,
        action: ReplayAction,
        hand_over: HandOver,
        check: Callable[[LayerKey, ForwardVerify], str | None],
    ) -> None:
        """Check that each router was switched to ``action`` and ran with it when expected."""
        expected = self._layer_keys(stage) if action == "replay_forward" or stage == "train" else []
        verifiable = expected if action == "replay_forward" or self.of.plan.recompute else []
        actions = {key[1]: event for key, event in self.of.actions.items() if key[0] == action and key[1][0] == stage}
        verified = {key[1]: event for key, event in self.of.verified.items() if key[0] == action and key[1][0] == stage}
        switched = self._match_keys(hand_over, expected, actions, _key_location)
        self.counts[hand_over, stage] += len(switched)
        if not (self.verify or verified):
            return
        for key in self._match_keys(hand_over, verifiable, verified, _key_location):
            if problem := check(key, verified[key]):
                self._break(hand_over, problem, **self._row_location(key, verified[key].differs_at))

    def _forward(self, key: LayerKey, used: ForwardVerify) -> str | None:
        given, shard = self.of.assigned.get(key), self.of.shards[key[:3]]
        if given is None:
            return "used routes it was not given"
        if used.actual.shape != given.tensor.shape or used.topk != given.tensor.shape[1]:
            return f"used {list(used.actual.shape)}, top-{used.topk}; it was given {list(given.tensor.shape)}"
        if used.given_sha256 != given.sorted_sha256:
            return "used other experts than it was given"
        if used.fallback_rows != shard.missing_rows:
            return f"{used.fallback_rows} rows were routed without replay, {shard.missing_rows} have no routes"
        return _reported_mismatch(used)

    def _backward(self, key: LayerKey, used: ForwardVerify) -> str | None:
        forward = self.of.verified.get(("replay_forward", key))
        if forward is None:
            return "was recomputed without a record of its forward pass"
        if (used.actual.shape, used.actual.sha256) != (forward.actual.shape, forward.actual.sha256):
            return "used other experts than in the forward pass"
        if used.given_sha256 != forward.given_sha256 or used.fallback_rows != forward.fallback_rows:
            return "its rows without routes are not those of the forward pass"
        return _reported_mismatch(used)

    def _row_location(self, key: LayerKey, local: int | None) -> dict[str, Any]:
        """Returns the location of ``key``, and the sample and row at index ``local`` of the micro-batch."""
        places = _key_location(key)
        if local is None:
            return places
        for segment in self.of.shards[key[:3]].segments:
            if (index := _index_in(segment.local, local)) is not None:
                payload = self.of.payloads.get(segment.key)
                sample = None if payload is None else payload.sample_idx
                return places | {"sample": sample, "row": _nth(segment.rows, index)}
        return places | {"row": local}

    def _compare(self, hand_over: HandOver, before: SampleRows, after: SampleRows, places: dict[str, Any]) -> None:
        if difference := _difference(before, after):
            layer, row, what = difference
            self._break(hand_over, what, **(places | {"layer": layer, "row": row}))

    def _end(self, rank: int | None) -> None:
        end = self.of.ends.get(rank)
        who = "the driver" if rank is None else "the rank"
        if end is None:
            self._break(HandOver.RUN, f"{who} left no trace", rank=rank)
        elif end.error is not None:
            self._break(HandOver.RUN, f"{who} stopped: {end.error}", rank=rank)


def _reported_mismatch(used: ForwardVerify) -> str | None:
    """Returns a mismatch between the experts that the rank expected and used, by its own report and by its hashes."""
    if used.expected is None:
        return "no routes were assigned to it"
    if (used.expected.shape, used.expected.sha256) != (used.actual.shape, used.actual.sha256):
        return "used other experts than were asked of it"
    if not used.matches_expected or used.differs_at is not None:
        return "the rank found that it used other experts than were asked of it"
    return None


def _difference(before: SampleRows, after: SampleRows) -> tuple[int | None, int | None, str] | None:
    """Returns the first difference of two records of one part of a sample: layer, row, description."""
    if before.rows != after.rows:
        row = next((a[0] for a, b in zip(before.rows, after.rows, strict=False) if a != b), None)
        return None, row, f"rows {_format_runs(after.rows)} came, expected {_format_runs(before.rows)}"
    if before.layers != after.layers:
        return None, None, f"layers {list(after.layers)} came, expected {list(before.layers)}"
    for name in ("input_ids", "routed_experts"):
        left, right = getattr(before, name), getattr(after, name)
        if (left.valid_shape, left.dtype) != (right.valid_shape, right.dtype):
            came, expected = (f"{r.dtype} {list(r.valid_shape)}" for r in (right, left))
            return None, None, f"{name} came as {came}, expected {expected}"
    if before.routed_experts.valid_sha256 != after.routed_experts.valid_sha256:
        return _differing_routes(before, after)
    if before.input_ids.valid_sha256 != after.input_ids.valid_sha256:
        return None, None, "the routes belong to other tokens"
    if before.identity_sha256 != after.identity_sha256:
        return None, None, "the rows' identities are not those of their tokens"
    return None


def _differing_routes(before: SampleRows, after: SampleRows) -> tuple[int | None, int | None, str]:
    left, right = before.routed_experts, after.routed_experts
    wrong = [i for i, (a, b) in enumerate(zip(left.layer_sha256, right.layer_sha256, strict=True)) if a != b]
    layer = before.layers[wrong[0]] if wrong else None
    a, b = _digests(left.row_digests), _digests(right.row_digests)
    moved = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
    row = _nth(before.rows, moved[0]) if moved else None
    if wrong and right.layer_sha256[wrong[0]] in left.layer_sha256:
        other = before.layers[left.layer_sha256.index(right.layer_sha256[wrong[0]])]
        return layer, row, f"the layer's routes are those of layer {other}"
    for by, side in ((1, "before"), (-1, "after")):
        followed = sum(b[i] == a[i - by] for i in moved if 0 <= i - by < len(a))
        if len(moved) > 1 and 2 * followed > len(moved):
            return layer, row, f"from here on the routes are those of the row {side}"
    if moved and b[moved[0]] in a:
        return layer, row, f"the row's routes are those of row {_nth(before.rows, a.index(b[moved[0]]))}"
    return layer, row, "other routes came"


def _digests(text: str) -> list[str]:
    return [text[start : start + 4] for start in range(0, len(text), 4)]


def _nth(runs: Runs, index: int) -> int | None:
    for start, stop in runs:
        if index < stop - start:
            return start + index
        index -= stop - start
    return None


def _index_in(runs: Runs, value: int) -> int | None:
    before = 0
    for start, stop in runs:
        if start <= value < stop:
            return before + value - start
        before += stop - start
    return None


def _format_runs(runs: Runs) -> str:
    shown = ", ".join(f"{start}..{stop - 1}" for start, stop in runs[:4])
    return f"{shown}{', ...' if len(runs) > 4 else ''}" or "none"


def _hand_over_of(event: Event) -> HandOver:
    match event:
        case Payload():
            return HandOver.PAYLOAD
        case Fetch():
            return HandOver.FETCH
        case Shard():
            return HandOver.SHARD
        case Assignment():
            return HandOver.ROUTER
        case Action(action="replay_forward") | ForwardVerify(action="replay_forward"):
            return HandOver.FORWARD
        case Action() | ForwardVerify():
            return HandOver.BACKWARD
        case _:
            return HandOver.RUN


def _location(event: Event) -> dict[str, Any]:
    """Returns the location of a record, by the field names of :class:`Break`."""
    names = {"microbatch_idx": "microbatch", "sample_idx": "sample", "layer_number": "layer"}
    named = {name: getattr(event, field, None) for field, name in names.items()}
    stage = getattr(event, "stage", None)
    return named | {"rank": event.rank, "stage": _PASS_OF.get(stage, stage) if stage else None}


def _key_location(key: BatchKey | LayerKey) -> dict[str, Any]:
    """Returns the location of a key; the key of a micro-batch has no layer."""
    return dict(zip(("stage", "rank", "microbatch", "layer"), key, strict=False))
