"""The stand-ins for SGLang refuse what SGLang, or NCCL between it and the trainer, would not take."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agent_rl.dryrun.engines import StandInEngines

SHAPES = {"a": (2, 3), "b": (4,)}
GROUP = {"world_size": 5}


@pytest.fixture
def engines() -> Iterator[StandInEngines]:
    """Two of two GPUs, which have joined and wait for buckets."""
    with StandInEngines(2, 2, SHAPES, "bfloat16", seconds=0.2) as stand_in:
        for number in range(2):
            stand_in.asked(number, "init_weights_update_group", GROUP | {"rank_offset": 1 + 2 * number})
            stand_in.asked(number, "pause_generation", {})
            stand_in.asked(number, "begin_weight_update", {})
        yield stand_in


def bucket(*tensors: tuple[str, list[int]], dtype: str = "bfloat16") -> dict[str, Any]:
    names, shapes = zip(*tensors, strict=True)
    return {"names": names, "shapes": shapes, "dtypes": [dtype] * len(names), "weight_version": "1"}


def send(engines: StandInEngines, size: int, *tensors: tuple[str, list[int]]) -> None:
    """Announce a bucket to both and broadcast ``size`` bytes."""
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(engines.asked, number, "update_weights_from_distributed", bucket(*tensors)) for number in (0, 1)
        ]
        engines.take(size)
        assert all(answer.result() == {"success": True} for answer in answers)


def test_a_whole_update_is_taken(engines: StandInEngines) -> None:
    send(engines, 12, ("a", [2, 3]))
    send(engines, 8, ("b", [4]))
    for number in range(2):
        engines.asked(number, "end_weight_update", {})
        assert engines.asked(number, "weights_checker", {})["per_engine_checksum"] == "1"
        engines.asked(number, "continue_generation", {})


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (
            "update_weights_from_distributed",
            bucket(("c", [1])),
            "c is bfloat16 .* the model has no such tensor",
        ),
        ("update_weights_from_distributed", bucket(("a", [3, 2])), r"a is bfloat16 \[3, 2\], .* has bfloat16 \[2, 3\]"),
        ("update_weights_from_distributed", bucket(("a", [2, 3]), dtype="float32"), "a is float32"),
        ("update_weights_from_distributed", bucket(("b", [4]), ("b", [4])), "b came twice"),
        ("end_weight_update", {}, "2 tensors did not come, first a"),
        ("begin_weight_update", {}, "engine 0 is open, not paused"),
        ("continue_generation", {}, "engine 0 is open, not paused"),
        ("init_weights_update_group", {"rank_offset": 3, "world_size": 5}, "rank 3 is taken by engine 1"),
        ("init_weights_update_group", {"rank_offset": 1, "world_size": 2}, r"ranks \[1, 2\] of a group of 2"),
    ],
)
def test_what_sglang_would_not_take_is_refused(
    engines: StandInEngines, endpoint: str, body: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        engines.asked(0, endpoint, body)


def test_other_bytes_than_were_announced_are_refused(engines: StandInEngines) -> None:
    with pytest.raises(RuntimeError, match=r"a broadcast of 14 bytes, and engines wait for \{12\}"):
        send(engines, 14, ("a", [2, 3]))


def test_a_broadcast_that_nobody_joins_ends_and_must_be_aborted(engines: StandInEngines) -> None:
    with pytest.raises(RuntimeError, match=r"waited 0\.2 s for engines that did not join it"):
        engines.take(12)
    assert engines.complaints == []
    engines.left(aborted=False)
    assert engines.complaints == ["the group of a weight sync was destroyed, not aborted, within a broadcast"]


def test_an_engine_that_leaves_before_a_bucket_comes_does_not_have_it(engines: StandInEngines) -> None:
    with ThreadPoolExecutor(2) as pool:
        update = ("update_weights_from_distributed", bucket(("a", [2, 3])))
        answers = [pool.submit(engines.asked, number, *update) for number in (0, 1)]
        with engines._changed:
            engines._changed.wait_for(lambda: engines._all_wait)
        for number in (0, 1):
            engines.asked(number, "destroy_weights_update_group", {})
        for number, answer in enumerate(answers):
            with pytest.raises(ValueError, match=f"engine {number}: a bucket was announced and did not come"):
                answer.result()
    assert not engines._all_wait
    assert engines.asked(0, "weights_checker", {})["per_engine_checksum"] == "start"


def test_engines_that_have_the_trainers_gpus_refuse_nccl() -> None:
    with StandInEngines(1, 2, SHAPES, "bfloat16", colocated=True) as stand_in:
        with pytest.raises(ValueError, match="NCCL takes each GPU once"):
            stand_in.asked(0, "init_weights_update_group", {"world_size": 3, "rank_offset": 1, "backend": "nccl"})
        stand_in.asked(0, "init_weights_update_group", {"world_size": 3, "rank_offset": 1, "backend": "gloo"})
