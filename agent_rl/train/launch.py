"""Ray and the ranks' actors are started, on the device that the config and the cluster's resources give."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from agent_rl.config import RunConfig, TrainConfig
from agent_rl.errors import TrainerError
from agent_rl.train.orders import RankDevice, RankOrder

if TYPE_CHECKING:
    from ray.actor import ActorClass, ActorProxy
    from ray.util.placement_group import PlacementGroup

    from agent_rl.train.actor import RankActor


def start_actors(
    config: RunConfig, stack: ExitStack, room: PlacementGroup | None = None
) -> tuple[list[ActorProxy[RankActor]], RankOrder]:
    """Connect to Ray, or start a local one (``stack`` ends it), and start an actor a rank; what each is to build.

    ``room``: where a bundle is reserved for each; ranks that follow each other are then on one machine. Raises
    TrainerError where Ray can't be reached or has too few GPUs.
    """
    import ray

    from agent_rl.train.actor import WRITER, RankActor
    from agent_rl.train.cluster import ray_cluster

    world = config.train.parallel.world_size
    stack.enter_context(ray_cluster(config.train.ray_address, cpus=world))
    device = _device(config.train) if room is None else _device_of(room)
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(device == "cuda"), "max_restarts": 0}
    options["concurrency_groups"] = {WRITER: 1}  # Ray's types don't know this option
    actor_class: ActorClass[RankActor] = ray.remote(**options)(RankActor)
    places = [{}] * world if room is None else rank_places(room)
    return [actor_class.options(**place).remote() for place in places], _order(config, device)


def rank_places(room: PlacementGroup) -> list[dict[str, Any]]:
    """The options by which actors get the bundles of ``room``, machine by machine."""
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = placement_group_table(room)["bundles_to_node_id"]
    order = sorted(range(room.bundle_count), key=lambda index: (nodes[index], index))
    return [{"scheduling_strategy": PlacementGroupSchedulingStrategy(room, index)} for index in order]


def _order(config: RunConfig, device: RankDevice) -> RankOrder:
    reference = config.reference_folder
    return RankOrder(
        config,
        model=config.model.absolute(),
        reference=None if reference is None else reference.absolute(),
        device=device,
        threads=_threads(config.train.parallel.world_size),
    )


def _device(train: TrainConfig) -> RankDevice:
    import ray

    gpus, world = ray.cluster_resources().get("GPU", 0), train.parallel.world_size
    if train.device == "cuda" and gpus < world:
        raise TrainerError(f"train.device is cuda and Ray has {gpus:g} GPUs for {world} ranks: set it to cpu")
    return rank_device(train, gpus)


def _device_of(room: PlacementGroup) -> RankDevice:
    return "cuda" if "GPU" in room.bundle_specs[0] else "cpu"


def rank_device(train: TrainConfig, gpus: float) -> RankDevice:
    """Where ranks run: as configured, or on the GPUs of a cluster that has one for each."""
    if train.device == "auto":
        return "cpu" if gpus < train.parallel.world_size else "cuda"
    return train.device


def _threads(ranks: int) -> int:
    """CPU threads a rank uses: OMP_NUM_THREADS where the user set it, else this machine's share."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() else max(1, len(os.sched_getaffinity(0)) // ranks)
