"""Pieces of a checkpoint are read bit for bit in every layout."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.checkpoint_pieces import whole_part

from agent_rl.errors import TrainerError
from agent_rl.train.checkpoint.piece_files import FlatRange, ParamShard, PieceReader, write_pieces

Floats = NDArray[np.float32]
WHOLE = (12, 12)


def parts(axis: int, count: int) -> list[ParamShard]:
    shape = tuple(n // count if at == axis else n for at, n in enumerate(WHOLE))
    return [ParamShard("w", shape, axis, index, count) for index in range(count)]


def part_of(whole: Floats, part: ParamShard) -> Floats:
    return np.split(whole, part.count, axis=part.axis)[part.index].reshape(-1)


def stretches(part: ParamShard, cuts: list[int]) -> list[FlatRange]:
    edges = [0, *sorted(cuts), math.prod(part.shape)]
    return [FlatRange(part, start, stop) for start, stop in itertools.pairwise(edges) if start < stop]


def write(directory: Path, ranks: list[list[FlatRange]], whole: Floats) -> list[Path]:
    """Writes one file per rank, with two slots; ``exp_avg`` is twice ``master``."""
    files = []
    for rank, own in enumerate(ranks):
        slots = [(stretch, slot, factor) for stretch in own for slot, factor in (("master", 1), ("exp_avg", 2))]
        pieces = [(stretch, slot) for stretch, slot, _ in slots]
        values = [part_of(whole, each.part)[each.start : each.stop] * factor for each, _, factor in slots]
        files.append(directory / f"rank-{rank}.safetensors")
        with files[-1].open("wb") as file:
            write_pieces(file, pieces, np.concatenate([np.empty(0, np.float32), *values]))
    return files


@given(
    axis=st.integers(0, 1),
    old=st.sampled_from([1, 2, 3, 4, 6]),
    new=st.sampled_from([1, 2, 3, 4, 6, 12]),
    cuts=st.lists(st.integers(0, 24), max_size=3),
    wanted=st.tuples(st.integers(0, 11), st.integers(1, 12)),
)
def test_any_layout_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, axis: int, old: int, new: int, cuts: list[int], wanted: tuple[int, int]
) -> None:
    whole = np.random.default_rng(0).standard_normal(WHOLE).astype(np.float32)
    ranks = [[stretch] for part in parts(axis, old) for stretch in stretches(part, cuts)]
    reader = PieceReader(write(tmp_path_factory.mktemp("pieces"), ranks, whole))
    for part in parts(axis, new):
        start = wanted[0]
        stop = min(start + wanted[1], math.prod(part.shape))
        for slot, factor in (("master", 1), ("exp_avg", 2)):
            found = reader.read(FlatRange(part, start, stop), slot)
            np.testing.assert_array_equal(found, part_of(whole, part)[start:stop] * factor)


@given(order=st.permutations(range(12)), ranks=st.sampled_from([1, 2, 3, 4]), start=st.integers(0, 35))
def test_rows_in_any_order_over_ranks_are_read_in_order(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], ranks: int, start: int
) -> None:
    """Like experts that are placed in any order over the ranks, each a part of its own."""
    whole = np.random.default_rng(1).standard_normal(WHOLE).astype(np.float32)
    rows = parts(0, 12)
    held = [[whole_part(rows[row]) for row in order[rank::ranks]] for rank in range(ranks)]
    reader = PieceReader(write(tmp_path_factory.mktemp("rows"), held, whole))
    for part in (*parts(0, 4), *rows):
        stop = math.prod(part.shape)
        first = min(start, stop - 1)
        found = reader.read(FlatRange(part, first, stop), "exp_avg")
        np.testing.assert_array_equal(found, part_of(whole, part)[first:] * 2)


def test_several_ranks_may_write_the_same_piece(tmp_path: Path) -> None:
    whole = np.arange(144, dtype=np.float32).reshape(WHOLE)
    first, second = map(whole_part, parts(0, 2))
    reader = PieceReader(write(tmp_path, [[first], [first], [second], []], whole))
    (all_of_it,) = map(whole_part, parts(0, 1))
    np.testing.assert_array_equal(reader.read(all_of_it, "master"), whole.reshape(-1))


@pytest.mark.parametrize("new", [1, 2, 4])
def test_missing_pieces_are_named(tmp_path: Path, new: int) -> None:
    whole = np.zeros(WHOLE, np.float32)
    (first, second) = parts(0, 2)
    gappy = [[whole_part(first)], [FlatRange(second, 0, 30)], [FlatRange(second, 31, 72)]]
    reader = PieceReader(write(tmp_path, gappy, whole))
    with pytest.raises(TrainerError, match=r"lacks elements 30 to \d+ of a part of w"):
        reader.read(whole_part(parts(0, new)[-1]), "master")
    lone = PieceReader(write(tmp_path, [[whole_part(second)]], whole))
    with pytest.raises(TrainerError, match="has 6 of 12 rows or columns of w"):
        lone.read(whole_part(parts(0, 1)[0]), "master")


def test_pieces_of_another_model_are_refused(tmp_path: Path) -> None:
    reader = PieceReader(write(tmp_path, [[whole_part(parts(0, 1)[0])]], np.zeros(WHOLE, np.float32)))
    with pytest.raises(TrainerError, match="has no state of v: it belongs to another model"):
        reader.read(whole_part(ParamShard("v", (3,))), "master")
    with pytest.raises(TrainerError, match=r"the checkpoint's w is \(12, 12\), the model's \(24, 12\)"):
        reader.read(whole_part(ParamShard("w", (12, 12), 0, 0, 2)), "master")


def test_values_and_pieces_must_agree(tmp_path: Path) -> None:
    piece = (whole_part(ParamShard("w", (4,))), "master")
    with (tmp_path / "x").open("wb") as file:
        with pytest.raises(TrainerError, match="12 bytes for pieces of 16"):
            write_pieces(file, [piece], np.zeros(3, np.float32))
        with pytest.raises(TrainerError, match="or a piece named twice"):
            write_pieces(file, [piece, piece], np.zeros(8, np.float32))


def test_a_file_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    whole = np.arange(144, dtype=np.float32).reshape(WHOLE)
    (path,) = write(tmp_path, [[whole_part(parts(0, 1)[0])]], whole)
    found = load_file(path)
    assert found.keys() == {"w.master", "w.exp_avg"}
    np.testing.assert_array_equal(found["w.exp_avg"], whole.reshape(-1) * 2)
