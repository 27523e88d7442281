"""What a run requests of a Ray cluster, and whether the cluster has it. Checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent_rl.config import EngineConfig, RunConfig, SandboxConfig, TrainConfig
from agent_rl.config.run import HardwareConfig

Resources = Mapping[str, float]
"""Amounts by Ray's resource names: GPU, CPU."""


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """``count`` groups of ``nodes`` nodes each, with ``per_node`` on every node; ``description`` says so in words, with
    the config's key."""

    description: str
    count: int
    per_node: Resources
    nodes: int = 1

    def fits(self, resource: str, nodes: Sequence[Resources]) -> bool:
        """Whether this request alone fits on the ``nodes`` of an empty cluster."""
        amount = self.per_node.get(resource, 0)
        fitting = [min(self.count, int(node.get(resource, 0) // amount)) for node in nodes] if amount else []
        return not amount or sum(fitting) >= self.count * self.nodes

    @property
    def group_in_words(self) -> str:
        """What one of the ``count`` groups takes, in words."""
        return f"{in_words(self.per_node)} on {_plural(self.nodes, 'node')}"

    def in_blocks(self, size: int) -> ResourceRequest:
        """The same total, reserved ``size`` at a time."""
        per_node = {resource: size * amount for resource, amount in self.per_node.items()}
        return replace(self, count=self.count // size, per_node=per_node)

    @property
    def largest(self) -> float:
        """The GPUs per node, or the CPUs per node where it takes no GPU."""
        return self.per_node.get("GPU", self.per_node["CPU"])

    def total(self, resource: str) -> float:
        return self.count * self.nodes * self.per_node.get(resource, 0)


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """What a run needs of Ray, by the sections of its config."""

    engine: EngineConfig
    train: TrainConfig
    sandbox: SandboxConfig
    hardware: HardwareConfig

    @classmethod
    def of(cls, config: RunConfig) -> ClusterRequest:
        return cls(config.engine, config.train, config.sandbox, config.hardware)

    @property
    def engines(self) -> bool:
        """Whether the engines are started on Ray."""
        return self.engine.launched and self.engine.placement == "ray"

    @property
    def connects_first(self) -> bool:
        """Whether a training run connects to Ray before its parts are opened."""
        return self.engines or self.sandbox.placement == "ray" or self.train.ray_address is not None

    @property
    def local_cpus(self) -> int:
        """CPUs of a Ray that the run starts itself: one per rank, and those of all ``engine.count`` engines."""
        ranks = self.train.parallel.world_size
        if not self.engines:
            return ranks
        request = engine_request(self.engine, "cpu")
        return ranks + self.engine.count * request.nodes * int(request.per_node["CPU"])


def engine_request(engine: EngineConfig, device: str) -> ResourceRequest:
    """The resources of the engines that a run starts with."""
    key, count = ("engine.min_count", engine.min_count) if engine.min_count else ("engine.count", engine.count)
    cuda = device == "cuda"
    per_node = {"CPU": 1.0, "GPU": engine.gpus / engine.nodes} if cuda else {"CPU": max(1.0, engine.threads)}
    spread = "" if engine.nodes == 1 else f" on each of {engine.nodes} nodes"
    description = f"{key} for {_plural(count, 'engine')} of {in_words(per_node)}{spread}"
    return ResourceRequest(description, count, per_node, engine.nodes)


def rank_request(train: TrainConfig, device: str) -> ResourceRequest:
    """The resources of the trainer's ranks."""
    world = train.parallel.world_size
    per_node = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
    description = f"train.parallel.world_size for {_plural(world, 'rank')} of {in_words(per_node)}"
    return ResourceRequest(description, world, per_node)


def in_words(resources: Resources) -> str:
    """The GPUs of ``resources`` in words, or the CPUs where it has none."""
    name = "GPU" if "GPU" in resources else "CPU"
    return _plural(resources[name], name)


def shortage(
    requests: Sequence[ResourceRequest], nodes: Mapping[str, Resources], free: Resources | None = None
) -> str | None:
    """Why the cluster of ``nodes`` has too little for ``requests``, in one line; None where it has enough. ``free`` is
    what other runs leave (None: everything)."""
    for resource in ("GPU", "CPU"):
        requested = sum(request.total(resource) for request in requests)
        total = sum(node.get(resource, 0) for node in nodes.values())
        available = total if free is None else free.get(resource, 0)
        if requested > available or not all(request.fits(resource, list(nodes.values())) for request in requests):
            requesters = " and ".join(request.description for request in requests if request.total(resource))
            capacities = ", ".join(f"{name}: {node.get(resource, 0):g}" for name, node in nodes.items())
            taken = f", of which {total - available:g} are taken" if available < total else ""
            return (
                f"the Ray cluster has too few {resource}s: {requesters} request {requested:g}, and its nodes have "
                f"{capacities}{taken}; start more nodes, or request less"
            )
    return None


def _plural(count: float, noun: str) -> str:
    return f"{count:g} {noun}" if count == 1 else f"{count:g} {noun}s"
