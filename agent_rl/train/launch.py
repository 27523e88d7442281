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

    from agent_rl.train.actor import RankActor


def start_actors(config: RunConfig, stack: ExitStack) -> tuple[list[ActorProxy[RankActor]], RankOrder]:
    """Connect to Ray, or start a local one (``stack`` ends it), and start an actor a rank; what each is to build.

    Raises TrainerError where Ray can't be reached or has too few GPUs.
    """
    import ray

    from agent_rl.train.actor import WRITER, RankActor
    from agent_rl.train.cluster import ray_cluster

    world = config.train.parallel.world_size
    stack.enter_context(ray_cluster(config.train.ray_address, cpus=world))
    device = _device(config.train)
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": int(device == "cuda"), "max_restarts": 0}
    options["concurrency_groups"] = {WRITER: 1}  # Ray's types don't know this option
    actor_class: ActorClass[RankActor] = ray.remote(**options)(RankActor)
    return [actor_class.remote() for _ in range(world)], _order(config, device)


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
    return "cpu" if train.device == "cpu" or gpus < world else "cuda"


def _threads(ranks: int) -> int:
    """CPU threads a rank uses: OMP_NUM_THREADS where the user set it, else this machine's share."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() else max(1, len(os.sched_getaffinity(0)) // ranks)
