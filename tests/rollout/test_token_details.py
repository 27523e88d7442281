"""What the trainer saw of every token, written and read again: its values, its size, what it says of a damaged file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.trajectories import trajectory

from agent_rl.errors import AgentRlError
from agent_rl.rollout.records import step_stem, write_trajectories
from agent_rl.rollout.token_details import BYTES_A_SAMPLED_TOKEN, BYTES_A_TOKEN, details_path, read_detail, read_loads
from agent_rl.types import Group, TokenDetail
from r3.mismatch.report import k3_kl
from r3.routing import Routing

LAYERS = 48


def detail(tokens: int, sampled: int, *, differing: float, scale: float = 0.05, seed: int = 0) -> TokenDetail:
    """Gaps of deviation ``scale``; the fraction ``differing`` of routers differs without replay, none with it."""
    random = np.random.default_rng(seed)
    bits = np.packbits(random.random((tokens, LAYERS)) < differing, axis=1)
    gaps = random.normal(0, scale, (2, sampled)).astype(np.float32)
    entropy, flags = random.random(sampled).astype(np.float16), random.integers(0, 8, sampled).astype(np.uint8)
    return TokenDetail(gaps[0] / 10, gaps[1], entropy, flags, LAYERS, np.zeros_like(bits), bits)


def written(directory: Path, details: dict[int, TokenDetail]) -> Path:
    group = Group("t", tuple(trajectory(float(n % 2), sampled=40) for n in range(4)))
    write_trajectories(directory, 3, [group], details={(number, 0): own for number, own in details.items()})
    return step_stem(directory, 3)


def test_detail_is_read_by_trajectory(tmp_path: Path) -> None:
    details = {number: detail(50 + number, 30 + number, differing=0.01, seed=number) for number in (0, 2, 3)}
    stem = written(tmp_path, details)
    assert read_detail(stem, 1) is None
    for number, given in details.items():
        found = read_detail(stem, number)
        assert np.array_equal(found.gap, given.gap.astype(np.float16))
        assert np.array_equal(found.gap_without_replay, given.gap_without_replay.astype(np.float16))
        assert np.array_equal(found.entropy, given.entropy)
        assert np.array_equal(found.flags, given.flags)
        bits = np.unpackbits(given.differs_without_replay, axis=1, count=LAYERS).view(bool)
        assert np.array_equal(found.differs_without_replay.layers, bits)
        assert np.array_equal(found.differs_without_replay.numbers, bits.sum(axis=1))


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 0.05, 1.0])
def test_half_precision_keeps_k3(tmp_path: Path, scale: float) -> None:
    given = detail(5000, 5000, differing=0.0, scale=scale)
    found = read_detail(written(tmp_path, {0: given}), 0)
    zeros = np.zeros(5000)
    for stored, whole in ((found.gap, given.gap), (found.gap_without_replay, given.gap_without_replay)):
        assert k3_kl(stored.astype(float), zeros) == pytest.approx(k3_kl(whole.astype(float), zeros), rel=0.01)


@pytest.mark.parametrize("differing", [0.0, 0.007, 0.07, 0.5])
def test_detail_keeps_to_its_bytes(tmp_path: Path, differing: float) -> None:
    """Where the layers would not fit, their numbers are kept, and are right."""
    tokens, sampled = 8000, 2000
    given = detail(tokens, sampled, differing=differing)
    stem = written(tmp_path, {0: given})
    fixed = 1024  # the file's header
    assert details_path(stem).stat().st_size <= fixed + BYTES_A_SAMPLED_TOKEN * sampled + BYTES_A_TOKEN * tokens
    found = read_detail(stem, 0)
    assert (found.differs_without_replay.layers is None) is (differing == 0.5)
    numbers = np.unpackbits(given.differs_without_replay, axis=1).sum(axis=1)
    assert np.array_equal(found.differs_without_replay.numbers, numbers)


def test_loads_count_the_present_rows(tmp_path: Path) -> None:
    experts = np.array([[[0, 1]], [[1, 3]], [[0, 2]]], np.uint8)
    routing = Routing(experts, np.array([True, True, False]), (), 4)
    group = Group("t", (replace(trajectory(1.0), routing=routing), replace(trajectory(0.0), routing=routing)))
    write_trajectories(tmp_path, 3, [group], details={}, routes=False)
    loads = read_loads(step_stem(tmp_path, 3))
    assert loads.tolist() == [[2, 4, 0, 2]]
    assert read_detail(step_stem(tmp_path, 3), 0) is None


def test_a_step_without_detail_has_none_and_a_damaged_one_is_one_line(tmp_path: Path) -> None:
    stem = written(tmp_path, {0: detail(50, 30, differing=0.01)})
    path = details_path(stem)
    path.write_bytes(path.read_bytes()[:-40])
    for read in (lambda: read_detail(stem, 0), lambda: read_loads(stem)):
        with pytest.raises(AgentRlError, match=r"step-000003\.train\.safetensors: damaged"):
            read()
    write_trajectories(tmp_path, 3, [Group("t", (trajectory(1.0),))])
    assert not path.exists()
    assert (read_detail(stem, 0), read_loads(stem)) == (None, None)
