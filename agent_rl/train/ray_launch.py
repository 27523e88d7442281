"""Ray and the ranks' actors are started, on the device that the config and the cluster's resources give."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from agent_rl.config import RunConfig
from agent_rl.errors import TrainerError
from agent_rl.train.requests import RankDevice, WorkerRequest

if TYPE_CHECKING:
    from ray.actor import ActorClass, ActorProxy
    from ray.util.placement_group import PlacementGroup

    from agent_rl.train.actor import RankActor


def start_actors(
    config: RunConfig, stack: ExitStack, room: PlacementGroup | None = None
) -> tuple[list[ActorProxy[RankActor]], WorkerRequest]:
    """Connect to Ray, or start a local one (``stack`` ends it), and start an actor a rank; what each is to build.

    ``room``: what is reserved for them (:func:`rank_places`). Raises TrainerError where Ray can't be reached or has too
    few GPUs.
    """
    import ray

    from agent_rl.train.actor import BESIDE, RankActor
    from agent_rl.train.ray_session import ray_cluster

    world = config.train.parallel.world_size
    stack.enter_context(ray_cluster(config.train.ray_address, cpus=world))
    device = _device(config) if room is None else _device_of(room)
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(device == "cuda"), "max_restarts": 0}
    options["concurrency_groups"] = {BESIDE: 1}  # Ray's types don't know this option
    actor_class: ActorClass[RankActor] = ray.remote(**options)(RankActor)
    places = [{}] * world if room is None else rank_places(room)
    return [actor_class.options(**place).remote() for place in places], _order(config, device)


def rank_places(room: PlacementGroup) -> list[dict[str, Any]]:
    """The options by which the actors, in the ranks' order, get the bundles of ``room``, machine by machine."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return [{"scheduling_strategy": PlacementGroupSchedulingStrategy(room, index)} for index, _ in rank_bundles(room)]


def rank_bundles(room: PlacementGroup) -> list[tuple[int, str]]:
    """The bundle and the machine of each rank. A bundle has as many CPUs as ranks, which follow each other."""
    from ray.util.placement_group import placement_group_table

    nodes = placement_group_table(room)["bundles_to_node_id"]
    order = sorted(range(room.bundle_count), key=lambda index: (nodes[index], index))
    return [(index, nodes[index]) for index in order for _ in range(int(room.bundle_specs[index]["CPU"]))]


def _order(config: RunConfig, device: RankDevice) -> WorkerRequest:
    reference = config.reference_dir
    return WorkerRequest(
        config,
        model=config.model.absolute(),
        reference=None if reference is None else reference.absolute(),
        device=device,
        threads=_threads(config.train.parallel.world_size),
    )


def _device(config: RunConfig) -> RankDevice:
    import ray

    gpus, world = ray.cluster_resources().get("GPU", 0), config.train.parallel.world_size
    if config.train.device == "cuda" and gpus < world:
        raise TrainerError(f"train.device is cuda and Ray has {gpus:g} GPUs for {world} ranks: set it to cpu")
    return rank_device(config, gpus)


def _device_of(room: PlacementGroup) -> RankDevice:
    return "cuda" if "GPU" in room.bundle_specs[0] else "cpu"


def rank_device(config: RunConfig, gpus: float) -> RankDevice:
    """Where ranks run: as configured; by ``auto`` on the GPUs of a cluster that has one for each, and on CPUs where
    there is no GPU and the config plans for none. Raises TrainerError where GPUs are meant and there are too few."""
    device, world, planned = config.train.device, config.train.parallel.world_size, config.hardware.gpu_memory_gb
    if device != "auto":
        return device
    if gpus >= world:
        return "cuda"
    if gpus or planned is not None:
        meant = "" if planned is None else f" and hardware.gpu_memory_gb is {planned:g}"
        raise TrainerError(
            f"train.device is auto{meant}, and Ray has {gpus:g} GPUs for {world} ranks: start more nodes, lower "
            "train.parallel.world_size, or set train.device to cpu"
        )
    return "cpu"


def _threads(ranks: int) -> int:
    """CPU threads a rank uses: OMP_NUM_THREADS where the user set it, else this machine's share."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() else max(1, len(os.sched_getaffinity(0)) // ranks)
