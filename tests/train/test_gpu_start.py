"""Decisions at the start of a run on GPUs: devices, node blocks, groups over nodes, the updates of an optimizer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agent_rl.config import ParallelConfig, RunConfig
from agent_rl.controller.cluster_resources import rank_request
from agent_rl.errors import TrainerError
from agent_rl.train.parallel_checks import cross_node_groups, layer_groups, node_block_sizes
from agent_rl.train.ray_launch import worker_device

torch = pytest.importorskip("torch", reason="needs the trainer environment")
PAPER = ParallelConfig(world_size=32, tensor=4, expert=8)


def config_of(world: int, device: str = "auto", gpu_memory_gb: float | None = None) -> RunConfig:
    train = {"device": device, "parallel": {"world_size": world}}
    data = {"name": "gpus", "model": "model", "train": train, "hardware": {"gpu_memory_gb": gpu_memory_gb}}
    return RunConfig.model_validate(data)


def test_a_rank_uses_its_only_visible_gpu() -> None:
    """With its index, because torch.cuda.set_device refuses a device without one."""
    from agent_rl.train.worker import device_of

    assert (device_of("cuda").index, device_of("cpu").type) == (0, "cpu")


@pytest.mark.parametrize(
    ("world", "device", "gpus", "found"),
    [(2, "auto", 0, "cpu"), (2, "auto", 2, "cuda"), (2, "cpu", 2, "cpu"), (2, "cuda", 0, "cuda")],
)
def test_the_device_of_ranks_follows_config_and_cluster(world: int, device: str, gpus: int, found: str) -> None:
    assert worker_device(config_of(world, device).train, None, gpus) == found


@pytest.mark.parametrize(("gpus", "planned"), [(7, None), (7, 80.0), (0, 80.0)])
def test_auto_refuses_too_few_gpus(gpus: int, planned: float | None) -> None:
    with pytest.raises(TrainerError, match=f"auto.* and Ray has {gpus} GPUs for 8 ranks: start more nodes") as error:
        worker_device(config_of(8).train, planned, gpus)
    assert ("gpu_memory_gb is 80" in str(error.value)) == (planned is not None)


def test_ranks_are_requested_in_blocks_that_fit_a_node() -> None:
    assert node_block_sizes(PAPER) == (8, 4, 1)
    assert node_block_sizes(ParallelConfig()) == (1,)
    assert node_block_sizes(ParallelConfig(world_size=16, tensor=2, context=4)) == (8, 2, 1)
    ask = rank_request(config_of(32).train, "cuda")
    uneven = [{"GPU": gpus, "CPU": 64.0} for gpus in (8, 6, 6, 6, 6)]
    fits = {size: ask.in_blocks(size).fits("GPU", uneven) for size in node_block_sizes(PAPER)}
    assert fits == {8: False, 4: False, 1: True}
    assert ask.in_blocks(8).fits("GPU", [{"GPU": 8}] * 4)


@pytest.mark.parametrize(
    ("parallel", "per_node", "groups"),
    [
        (PAPER, 4, "expert groups (expert=8)"),
        (PAPER, 6, "tensor groups (tensor=4) and expert groups (expert=8)"),
        (ParallelConfig(world_size=16, tensor=2, context=4), 4, "context groups (context=4)"),
    ],
)
def test_groups_over_several_nodes_are_named_in_one_line(parallel: ParallelConfig, per_node: int, groups: str) -> None:
    assert cross_node_groups(parallel, [f"node-{rank // 8}" for rank in range(parallel.world_size)]) is None
    line = cross_node_groups(parallel, [f"node-{rank // per_node}" for rank in range(parallel.world_size)]) or ""
    assert line.startswith(f"train.parallel: {groups} span several nodes")
    assert "\n" not in line


@pytest.mark.megatron
@pytest.mark.parametrize(
    "sizes",
    [
        {"world_size": 32, "tensor": 4, "expert": 8},
        {"world_size": 32, "tensor": 2, "context": 2, "pipeline": 2, "expert": 8},
        {"world_size": 16, "tensor": 4, "context": 2, "expert": 2},
        {"world_size": 12, "context": 3, "expert": 2, "pipeline": 2},
    ],
)
def test_groups_equal_megatrons(sizes: dict[str, int], megatron_shim: None) -> None:
    from megatron.core.parallel_state import RankGenerator

    parallel = ParallelConfig.model_validate(sizes)
    tensor, context, pipeline, expert = parallel.tensor, parallel.context, parallel.pipeline, parallel.expert
    stage, order = parallel.world_size // pipeline, "tp-cp-ep-dp-pp"
    dense = RankGenerator(tensor, 1, stage // (tensor * context), pipeline, context, order)
    experts = RankGenerator(1, expert, stage // expert, pipeline, 1, order)
    found = {name: sorted(list(group) for group in groups) for name, groups in layer_groups(parallel).items()}
    made = {"tensor": dense.get_ranks("tp"), "context": dense.get_ranks("cp"), "expert": experts.get_ranks("ep")}
    assert found == {name: sorted(groups) for name, groups in made.items()}


@pytest.mark.megatron
def test_updates_are_counted_from_parameter_state_or_groups(megatron_shim: None) -> None:
    """Transformer Engine's Adam has ``step`` in its groups, from the first update on."""
    from agent_rl.train.optimizer import updates_made

    adam = SimpleNamespace(param_groups=[{}, {}], state={1: {"exp_avg": torch.zeros(1)}})
    assert updates_made(adam) == 0
    adam.param_groups[1]["step"] = 7
    assert updates_made(adam) == 7
    assert updates_made(SimpleNamespace(param_groups=[{}], state={1: {"step": torch.tensor(3.0)}})) == 3
