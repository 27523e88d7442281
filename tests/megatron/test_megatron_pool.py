"""A pool of a machine's experts: one a machine, never read while it changes, gone with the ranks however they end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed (the train extra)")
import pool_kill
import pool_worker
import torch
import transfer_worker as worker

from r3.balance import Grid

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one world of four found."""
    return worker.launch(pool_worker.__file__, 4, tmp_path_factory.mktemp("pool"))


def check(got: list[Any], rank: int, ranks: int, dtype: torch.dtype = torch.float32, change: float = 0.0) -> None:
    """``got`` of each layer is what ``rank`` borrows there, after ``change`` was added to all weights."""
    grid = Grid(worker.EXPERTS, ranks, worker.SLOTS, home=worker.HOME)
    for layer, weights in enumerate(got):
        experts = worker.live(worker.random_plan(grid, layer, lopsided=True), rank)
        for weight, whole in zip(weights, worker.every_weight(layer, dtype), strict=True):
            assert torch.equal(weight, whole[experts] + change), f"rank {rank}, layer {layer}"


@pytest.mark.parametrize("case", ["one machine", "two machines"])
def test_nobody_reads_a_pool_that_is_half_refreshed(results: Any, case: str) -> None:
    for rank, found in enumerate(results):
        check(found[case]["before"], rank, 4)
        check(found[case]["after"], rank, 4, change=1.0)
        assert found[case]["refresh_ms"] > 0
    check(results[pool_worker.SLOW][case]["stale"], pool_worker.SLOW, 4)


@pytest.mark.parametrize(("case", "pools"), [("groups", 1), ("groups over machines", 2)])
def test_expert_groups_of_a_machine_share_its_pool(results: Any, case: str, pools: int) -> None:
    for rank, found in enumerate(results):
        check(found[case]["fetched"], rank % 2, 2, torch.bfloat16)
        assert len(found[case]["memory"]) == 2 * worker.LAYERS
        assert found[case]["left"] == set()
    assert len(set().union(*(found[case]["memory"] for found in results))) == 2 * worker.LAYERS * pools


def test_pipeline_stages_have_pools_of_their_own_layers(results: Any) -> None:
    for rank, found in enumerate(results):
        for layers, got in zip((1, 0), found["stages"], strict=True):
            assert len(got) == (layers if rank >= 2 else 1)
            check(got, rank % 2, 2, change=float(rank // 2))


def test_a_pool_that_the_memory_cannot_hold_is_refused_on_every_rank(results: Any) -> None:
    for found in results:
        line = r"train.balance.transfer: a pool of all experts takes [\d.]+ GiB .* has [\d.]+ GiB left: set it"
        assert re.match(line, found["too large"]), found["too large"]


@pytest.mark.bubblewrap
def test_killed_ranks_leave_nothing_and_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    """In a sandbox whose ``/dev/shm`` has 64 KiB, less than the pool."""
    (tmp_path / "first").mkdir()
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "once").touch()
    small = ["bwrap", "--dev-bind", "/", "/", "--size", str(64 << 10), "--tmpfs", "/dev/shm"]
    kill = [*small, sys.executable, pool_kill.__file__, str(tmp_path / "first")]
    seen = json.loads(subprocess.run(kill, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert seen == {"used": [], "killed": []}
    for rank, found in enumerate(worker.launch(pool_kill.__file__, 2, tmp_path / "again", inside=small)):
        check(found["fetched"], rank, 2)
        assert found["shared"] == []
        pool = sum(held.nbytes for layer in range(worker.LAYERS) for held in worker.every_weight(layer, torch.float32))
        assert found["size"] < pool
