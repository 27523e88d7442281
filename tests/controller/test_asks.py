"""What a run requests of a Ray cluster, and the one line where the cluster has too little."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agent_rl.config import EngineConfig, ParallelConfig, RunConfig, TrainConfig
from agent_rl.controller.cluster_resources import ClusterRequest, engine_request, rank_request, shortage


def shortage_of(engine: dict[str, int], ranks: int, nodes: list[int], free: int | None = None) -> str | None:
    requests = [
        engine_request(EngineConfig.model_validate({"placement": "ray", "device": "cuda", **engine}), "cuda"),
        rank_request(TrainConfig(parallel=ParallelConfig(world_size=ranks)), "cuda"),
    ]
    have = {f"node-{at}": {"GPU": gpus, "CPU": 64.0} for at, gpus in enumerate(nodes)}
    return shortage(requests, have, None if free is None else {"GPU": free, "CPU": 64.0 * len(nodes)})


@pytest.mark.parametrize(
    ("engine", "ranks", "nodes", "enough"),
    [
        ({"count": 4, "gpus": 4}, 32, [8] * 6, True),
        ({"count": 4, "gpus": 4}, 32, [8] * 5, False),
        ({"count": 2, "gpus": 8}, 8, [8, 8, 8], True),
        ({"count": 2, "gpus": 8}, 8, [8, 8, 4, 4], True),
        ({"count": 2, "gpus": 8}, 8, [8, 4, 4, 4, 4], False),  # no second node has eight
        ({"count": 1, "gpus": 16, "nodes": 2}, 8, [8, 8, 8], True),
        ({"count": 1, "gpus": 16, "nodes": 2}, 8, [16, 16], True),
        ({"count": 1, "gpus": 16, "nodes": 2}, 8, [24], False),  # two nodes are requested
        ({"count": 4, "gpus": 8, "min_count": 1}, 8, [8, 8], True),
    ],
)
def test_engines_take_whole_nodes_and_ranks_the_rest(
    engine: dict[str, int], ranks: int, nodes: list[int], enough: bool
) -> None:
    assert (shortage_of(engine, ranks, nodes) is None) == enough


def test_too_few_gpus_are_one_line() -> None:
    assert shortage_of({"count": 4, "gpus": 4}, 32, [8, 8]) == (
        "the Ray cluster has too few GPUs: engine.count for 4 engines of 4 GPUs and train.parallel.world_size for 32 "
        "ranks of 1 GPU request 48, and its nodes have node-0: 8, node-1: 8; start more nodes, or request less"
    )
    line = shortage_of({"count": 1, "gpus": 16, "nodes": 2}, 1, [8, 8, 8], free=10)
    assert line is not None
    assert "1 engine of 8 GPUs on each of 2 nodes" in line
    assert "node-2: 8, of which 14 are taken; start" in line


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"nodes": 2, "gpus": 2}, "set engine.placement to ray"),
        ({"nodes": 2, "gpus": 3, "placement": "ray"}, "engine.gpus is 3; it must be a multiple of engine.nodes"),
        ({"min_count": 3, "count": 2, "placement": "ray"}, "engine.min_count is 3; it must be at most engine.count"),
    ],
)
def test_engines_that_cannot_be_placed_are_refused(engine: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        EngineConfig.model_validate(engine)


@pytest.mark.parametrize(
    ("engine", "cpus"),
    [
        ({}, 2),
        ({"placement": "ray", "count": 3}, 5),
        ({"placement": "ray", "count": 3, "threads": 4, "min_count": 1}, 14),
        ({"placement": "ray", "count": 3, "urls": ["http://there:1"]}, 2),
    ],
)
def test_a_local_ray_has_the_cpus_of_all_ranks_and_engines(engine: dict[str, object], cpus: int) -> None:
    train = {"parallel": {"world_size": 2}}
    config = RunConfig.model_validate({"name": "local", "model": "m", "engine": engine, "train": train})
    assert ClusterRequest(config.engine, config.train, config.sandbox, config.hardware).local_cpus == cpus
