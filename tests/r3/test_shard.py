"""Sharding: nothing moves, nothing is lost. Every (token, layer, slot) of the routes differs from all others."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import r3.shard
from r3.routing import Routing, RoutingError, check_experts
from r3.shard import (
    Packing,
    RouteShard,
    ShardSpec,
    check_identity,
    context_order,
    context_places,
    cut_routes,
    filler,
    identify,
    moe_columns,
    own_routes,
    router_places,
    stage_layers,
    unshard,
)

TOP_K, EXPERTS = 2, 1 << 16
layouts = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class World:
    """A parallel layout and sequences to spread over it; ``specs`` are all its ranks."""

    specs: tuple[ShardSpec, ...]
    packing: Packing
    samples: tuple[int, ...]
    moe_layers: int

    @property
    def tokens(self) -> np.ndarray:
        """Token ids of which many are equal, so that they alone would not tell rows apart."""
        return np.arange(sum(self.packing.lengths)) // 3

    def routings(self, present: np.ndarray | None = None) -> list[Routing]:
        """Token t, layer l, slot s uses expert ``(t * L + l) * K + s``."""
        tokens = sum(self.packing.lengths)
        experts = np.arange(tokens * self.moe_layers * TOP_K).reshape(tokens, self.moe_layers, TOP_K).astype(np.uint16)
        kept = np.ones(tokens, np.bool_) if present is None else present
        bounds = self.packing.cu_seqlens[1:-1]
        parts = zip(np.split(experts, bounds), np.split(kept, bounds), strict=True)
        return [Routing(rows, mask, (), EXPERTS) for rows, mask in parts]

    def cut(self, spec: ShardSpec, present: np.ndarray | None = None) -> RouteShard:
        return cut_routes(self.routings(present), self.samples, self.tokens, self.packing, spec)

    def check(self, shard: RouteShard, spec: ShardSpec) -> int:
        return check_identity(shard, self.samples, self.tokens, self.packing, spec)


@st.composite
def worlds(draw: Any) -> World:
    context, tensor, pipeline, virtual = (draw(st.integers(1, most)) for most in (4, 4, 4, 3))
    layers = pipeline * virtual * draw(st.integers(1, 2)) + draw(st.integers(0, 2))
    dense = draw(st.integers(0, layers - 1))
    moe_layers = tuple(range(dense + 1, layers + 1))
    if draw(st.booleans()):  # every other layer dense, as with decoder_sparse_step 2
        moe_layers = moe_layers[::2]
    columns = [
        moe_columns([number for chunk in stage for number in chunk], moe_layers)
        for stage in stage_layers(layers, pipeline, virtual)
    ]
    cut = draw(st.sampled_from(["zigzag", "contiguous"]))
    ranks = product(columns, range(context), range(tensor))
    specs = tuple(ShardSpec(held, c, context, t, tensor, cut) for held, c, t in ranks)
    lengths = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)))
    samples = tuple(draw(st.permutations(range(len(lengths) + 3)))[: len(lengths)])
    return World(specs, Packing(lengths, specs[0].multiple), samples, len(moe_layers))


def test_worked_examples() -> None:
    assert doctest.testmod(r3.shard).failed == 0


def test_the_modules_example() -> None:
    packing = Packing((6, 3), 8)
    spec = ShardSpec((0,), context_size=2, tensor_size=2)
    ranks = [replace(spec, context_rank=c, tensor_rank=t) for c, t in product(range(2), range(2))]
    assert [packing.source[router_places(packing, rank)].tolist() for rank in ranks] == [
        [0, 1, -1, -1],
        [6, 7, -1, -1],
        [2, 3, 4, 5],
        [8, -1, -1, -1],
    ]


@layouts
@given(worlds(), st.data())
def test_cutting_and_putting_back_are_inverses(world: World, data: Any) -> None:
    present = np.array(data.draw(st.lists(st.booleans(), min_size=(n := len(world.tokens)), max_size=n)))
    shards = [world.cut(spec, present) for spec in world.specs]
    whole = unshard(world.packing, world.specs, [shard.experts for shard in shards], world.moe_layers)
    expected = np.concatenate([routing.experts for routing in world.routings()])
    np.testing.assert_array_equal(whole[present], expected[present])
    rows = [np.repeat(shard.present[:, None], len(shard.columns), axis=1) for shard in shards]
    found = unshard(world.packing, world.specs, rows, world.moe_layers)
    np.testing.assert_array_equal(found, np.repeat(present[:, None], world.moe_layers, axis=1))
    for shard, spec in zip(shards, world.specs, strict=True):
        check_experts(shard.experts, EXPERTS, "padding and absent rows too")
        assert world.check(shard, spec) == len(shard.experts)


@layouts
@given(worlds())
def test_context_order_is_the_order_of_the_sequences(world: World) -> None:
    spec = world.specs[0]
    ranks = [replace(spec, context_rank=rank) for rank in range(spec.context_size)]
    rank_major = np.concatenate([context_places(world.packing, rank) for rank in ranks])
    assert rank_major[context_order(world.packing, spec)].tolist() == list(range(int(world.packing.cu_padded[-1])))


@layouts
@given(worlds())
def test_zigzag_pairs_an_early_chunk_with_a_late_one(world: World) -> None:
    """Written out once more: chunk by chunk, sequence by sequence, with plain lists."""
    for spec in world.specs:
        rows: list[int] = []
        pieces = spec.context_size * (2 if spec.cut == "zigzag" and spec.context_size > 1 else 1)
        at = 0
        for length in world.packing.lengths:
            tokens = list(range(at, at + length))
            at += length
            while len(tokens) % (pieces * spec.tensor_size):
                tokens.append(-1)
            size = len(tokens) // pieces
            mine = {spec.context_rank, pieces - 1 - spec.context_rank} if pieces > spec.context_size else None
            for piece in sorted(mine) if mine else [spec.context_rank]:
                rows += tokens[piece * size : (piece + 1) * size]
        share = len(rows) // spec.tensor_size
        wanted = rows[spec.tensor_rank * share : (spec.tensor_rank + 1) * share]
        assert world.packing.source[router_places(world.packing, spec)].tolist() == wanted


@layouts
@given(worlds(), st.data())
def test_another_ranks_shard_is_found(world: World, data: Any) -> None:
    mine, other = (data.draw(st.sampled_from(world.specs)) for _ in range(2))
    shard = world.cut(other)
    same_rows = router_places(world.packing, mine).tolist() == router_places(world.packing, other).tolist()
    if mine.columns == other.columns and same_rows:
        assert world.check(shard, mine) == len(shard.experts)
    else:
        with pytest.raises(RoutingError, match=r"sample"):
            world.check(shard, mine)


@layouts
@given(worlds(), st.integers(1, 3), st.data())
def test_rows_moved_by_any_distance_are_found(world: World, distance: int, data: Any) -> None:
    spec = data.draw(st.sampled_from(world.specs))
    shard = world.cut(spec)
    parts = {name: np.roll(getattr(shard, name), distance, 0) for name in ("experts", "present", "identity")}
    moved = replace(shard, **parts)
    if len(shard.experts) > 1 and distance % len(shard.experts):
        with pytest.raises(RoutingError, match=r"sample \d+, (padding|token \d+ \(id \d+\)): the routes"):
            world.check(moved, spec)


def test_what_does_not_belong_is_named() -> None:
    packing, spec, tokens = Packing((4, 3), 1), ShardSpec((0, 1)), np.array([5, 6, 7, 8, 5, 6, 9])
    world = World((spec,), packing, (3, 7), 2)
    shard = cut_routes(world.routings(), (3, 7), tokens, packing, spec)
    assert check_identity(shard, (3, 7), tokens, packing, spec) == 7
    with pytest.raises(RoutingError, match=r"^sample 2, token 0 \(id 5\): the routes that came for it belong to anoth"):
        check_identity(shard, (2, 7), tokens, packing, spec)
    changed = tokens.copy()
    changed[6] = 10
    with pytest.raises(RoutingError, match=r"^sample 7, token 2 \(id 10\).*\(1 of 7 rows do\)$"):
        check_identity(shard, (3, 7), changed, packing, spec)
    with pytest.raises(RoutingError, match=r"the MoE layers \[0, 1\], this rank has \[2, 3\]"):
        check_identity(shard, (3, 7), tokens, packing, ShardSpec((2, 3)))
    with pytest.raises(RoutingError, match="7 rows of routes came for the 6 tokens"):
        check_identity(shard, (3, 7), tokens[:6], Packing((4, 2)), spec)


@given(st.lists(st.tuples(*[st.integers(-1, 1 << 20)] * 3), min_size=2, max_size=50, unique=True))
def test_identities_differ(rows: list[tuple[int, int, int]]) -> None:
    assert len(set(identify(*np.array(rows).T).tolist())) == len(rows)


@layouts
@given(worlds())
def test_own_routes_replay_where_they_were_recorded(world: World) -> None:
    spec = world.specs[-1]
    used = world.cut(spec).experts
    shard = own_routes(used, world.samples, world.tokens, world.packing, spec)
    assert world.check(shard, spec) == len(used)
    assert shard.present.tolist() == (world.packing.source[router_places(world.packing, spec)] >= 0).tolist()


def test_nothing_but_a_ranks_share_is_held() -> None:
    """Bytes of all ranks together: every expert id once, and padding."""
    packing = Packing((30, 17), 8)
    specs = [ShardSpec(columns, c, 2, t, 2) for columns in ((0, 1), (2,)) for c in range(2) for t in range(2)]
    world = World(tuple(specs), packing, (0, 1), 3)
    shards = [world.cut(spec) for spec in specs]
    assert sum(shard.experts.nbytes for shard in shards) == (32 + 24) * 3 * TOP_K * 2
    assert all(shard.experts.base is None or shard.experts.base.nbytes == shard.experts.nbytes for shard in shards)


@given(st.integers(1, 70), st.integers(1, 8), st.integers(1, 3))
def test_stages_hold_every_layer_once_in_order(layers: int, pipeline: int, virtual: int) -> None:
    if layers < pipeline * virtual:
        with pytest.raises(RoutingError, match="can't be spread over"):
            stage_layers(layers, pipeline, virtual)
        return
    stages = stage_layers(layers, pipeline, virtual)
    chunks = [stages[rank][chunk] for chunk in range(virtual) for rank in range(pipeline)]
    assert [number for chunk in chunks for number in chunk] == list(range(1, layers + 1))
    assert [len(chunk) for chunk in chunks] == sorted(map(len, chunks), reverse=True)
    assert len(chunks[0]) - len(chunks[-1]) <= 1


def test_missing_or_doubled_ranks_are_found() -> None:
    packing = Packing((8,), 2)
    specs = [ShardSpec((0,), tensor_rank=rank, tensor_size=2) for rank in range(2)]
    parts = [np.zeros((4, 1)), np.ones((4, 1))]
    assert unshard(packing, specs, parts, 1)[:, 0].tolist() == [0] * 4 + [1] * 4
    with pytest.raises(RoutingError, match="token 4, MoE layer 0 is held by 0 ranks"):
        unshard(packing, specs[:1], parts[:1], 1)
    with pytest.raises(RoutingError, match="token 0, MoE layer 0 is held by 2 ranks"):
        unshard(packing, [specs[0], *specs], [parts[0], *parts], 1)
    with pytest.raises(RoutingError, match=r"should hold \[4, 1\] rows and columns, it holds \[3, 1\]"):
        unshard(packing, specs, [parts[0], parts[1][1:]], 1)


def cut_of(change: Callable[[Routing, Routing], list[Routing]], columns: tuple[int, ...] = (0,)) -> RouteShard:
    """Cut two sequences' routes after ``change``."""
    world = World((ShardSpec(columns),), Packing((4, 3)), (0, 1), 2)
    return cut_routes(change(*world.routings()), world.samples, world.tokens, world.packing, world.specs[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShardSpec((0,), context_rank=2, context_size=2), "context rank 2 of 2 does not exist"),
        (lambda: ShardSpec((0,), tensor_rank=-1), "tensor rank -1 of 1"),
        (lambda: ShardSpec((1, 0)), r"columns \(1, 0\) do not rise"),
        (lambda: Packing((3, 0)), "can't pack lengths"),
        (lambda: context_places(Packing((6,), 2), ShardSpec((0,), context_size=2)), "this cut needs 4"),
        (lambda: filler(2, 1, 3, 2), "top-3 of 2 experts"),
        (lambda: cut_of(lambda one, other: [one]), r"routes of \[4\] rows for sequences of \[4, 3\] tokens"),
        (
            lambda: cut_of(lambda one, other: [one, replace(other, num_experts=7)]),
            "routes of different shapes in one mic",
        ),
        (lambda: cut_of(lambda one, other: [one, other], (2,)), "column 2 asked of routes of 2 MoE layers"),
    ],
)
def test_impossible_cuts_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        make()


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 8))
def test_filler_is_spread_evenly(rows: int, layers: int, top_k: int) -> None:
    experts = filler(rows, layers, top_k, 8)
    assert all(len(set(slots)) == top_k for row in experts.tolist() for slots in row)
    for layer in range(layers):
        load = np.bincount(experts[:, layer].ravel(), minlength=8)
        assert load.max() - load.min() <= 1
