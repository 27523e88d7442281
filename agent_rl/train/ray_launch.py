"""Start Ray and the worker actors, on the device that the config and the cluster's resources determine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from agent_rl.config import TrainConfig
from agent_rl.errors import TrainerError
from agent_rl.train.requests import WorkerDevice
from agent_rl.utils.sockets import NCCL_SETTINGS

if TYPE_CHECKING:
    from ray.actor import ActorClass, ActorProxy
    from ray.util.placement_group import PlacementGroup

    from agent_rl.train.actor import WorkerActor


def start_actors(
    train: TrainConfig, planned_gpu_gb: float | None, stack: ExitStack, placement_group: PlacementGroup | None = None
) -> tuple[list[ActorProxy[WorkerActor]], WorkerDevice]:
    """Connect to Ray, or start a local one that ``stack`` ends, and start one actor per rank. Returns the actors and
    their device.

    ``placement_group``: the reservation of the workers (:func:`placement_options`). ``planned_gpu_gb``: as in
    :func:`worker_device`. Raises TrainerError where Ray cannot be reached or has too few CPUs or GPUs.
    """
    import ray

    from agent_rl.train.actor import BACKGROUND_GROUP, WorkerActor
    from agent_rl.train.ray_session import ray_cluster

    world = train.parallel.world_size
    stack.enter_context(ray_cluster(train.ray_address, cpus=world))
    if placement_group is None:
        _check_cpus(world)
    device = _device(train, planned_gpu_gb) if placement_group is None else _device_of(placement_group)
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(device == "cuda"), "max_restarts": 0}
    options["concurrency_groups"] = {BACKGROUND_GROUP: 1}  # missing in Ray's types
    if device == "cuda":
        options["runtime_env"] = {"env_vars": cuda_environment(os.environ)}
    actor_class: ActorClass[WorkerActor] = ray.remote(**options)(WorkerActor)
    placements = [{}] * world if placement_group is None else placement_options(placement_group)
    return [actor_class.options(**placement).remote() for placement in placements], device


def cuda_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of ranks on GPUs; those set in ``environment`` stay. Engines must not get the allocator's
    option: torch-memory-saver refuses it."""
    defaults = {**NCCL_SETTINGS, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {name: environment.get(name, value) for name, value in defaults.items()}


def _check_cpus(world: int) -> None:
    """Raises TrainerError where Ray has too few CPUs: without a reservation its actors would wait for ever."""
    import ray

    if (cpus := ray.cluster_resources().get("CPU", 0)) < world:
        raise TrainerError(
            f"Ray has {cpus:g} CPUs for {world} ranks: start more nodes or lower train.parallel.world_size"
        )


def placement_options(placement_group: PlacementGroup) -> list[dict[str, Any]]:
    """The actors' options, by rank, which put them into the bundles of ``placement_group``, node by node."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return [
        {"scheduling_strategy": PlacementGroupSchedulingStrategy(placement_group, index)}
        for index, _ in worker_bundles(placement_group)
    ]


def worker_bundles(placement_group: PlacementGroup) -> list[tuple[int, str]]:
    """The bundle and the node of each rank. A bundle has one CPU per rank, and its ranks are consecutive."""
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(placement_group)["bundles_to_node_id"]
    order = sorted(range(placement_group.bundle_count), key=lambda index: (nodes[index], index))
    return [(index, nodes[index]) for index in order for _ in range(int(placement_group.bundle_specs[index]["CPU"]))]


def _device(train: TrainConfig, planned_gpu_gb: float | None) -> WorkerDevice:
    import ray

    gpus, world = ray.cluster_resources().get("GPU", 0), train.parallel.world_size
    if train.device == "cuda" and gpus < world:
        raise TrainerError(f"train.device is cuda and Ray has {gpus:g} GPUs for {world} ranks: set it to cpu")
    return worker_device(train, planned_gpu_gb, gpus)


def _device_of(placement_group: PlacementGroup) -> WorkerDevice:
    return "cuda" if "GPU" in placement_group.bundle_specs[0] else "cpu"


def worker_device(train: TrainConfig, planned_gpu_gb: float | None, gpus: float) -> WorkerDevice:
    """The device of the workers. ``auto`` takes GPUs if the cluster has one per rank, and CPUs if it has no GPU and the
    config plans none. Raises TrainerError where the config plans GPUs and there are too few."""
    device, world, planned = train.device, train.parallel.world_size, planned_gpu_gb
    if device != "auto":
        return device
    if gpus >= world:
        return "cuda"
    if gpus or planned is not None:
        plan = "" if planned is None else f" and hardware.gpu_memory_gb is {planned:g}"
        raise TrainerError(
            f"train.device is auto{plan}, and Ray has {gpus:g} GPUs for {world} ranks: start more nodes, lower "
            "train.parallel.world_size, or set train.device to cpu"
        )
    return "cpu"


def threads_per_rank(ranks: int) -> int:
    """CPU threads per rank: OMP_NUM_THREADS where it is set, otherwise an equal share of this node."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdigit() else max(1, len(os.sched_getaffinity(0)) // ranks)
