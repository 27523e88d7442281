"""What a run asks of a Ray cluster, and whether the cluster has it: told before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent_rl.config import EngineConfig, TrainConfig

Resources = Mapping[str, float]
"""By Ray's names: GPU, CPU."""


@dataclass(frozen=True, slots=True)
class Ask:
    """``count`` times ``each`` on every one of ``nodes`` machines; ``what`` says so, with the config's key."""

    what: str
    count: int
    each: Resources
    nodes: int = 1

    def fits(self, resource: str, nodes: Sequence[Resources]) -> bool:
        """Whether this alone fits on the ``nodes`` of a cluster."""
        each = self.each.get(resource, 0)
        times = [min(self.count, int(node.get(resource, 0) // each)) for node in nodes] if each else []
        return not each or sum(times) >= self.count * self.nodes

    @property
    def room(self) -> str:
        """What one of the ``count`` takes, in words."""
        return f"{amount(self.each)} on {_many(self.nodes, 'machine')}"

    def in_blocks(self, size: int) -> Ask:
        """The same in all, ``size`` of them at a time."""
        each = {resource: size * amount for resource, amount in self.each.items()}
        return replace(self, count=self.count // size, each=each)

    @property
    def largest(self) -> float:
        """The GPUs that one takes of a machine, or the CPUs where it takes no GPU."""
        return self.each.get("GPU", self.each["CPU"])

    def total(self, resource: str) -> float:
        return self.count * self.nodes * self.each.get(resource, 0)


def engine_ask(engine: EngineConfig, device: str) -> Ask:
    """What the engines ask for with which a run begins."""
    key, count = ("engine.min_count", engine.min_count) if engine.min_count else ("engine.count", engine.count)
    each = {"CPU": 1.0, "GPU": engine.gpus / engine.nodes} if device == "cuda" else {"CPU": max(1.0, engine.threads)}
    where = "" if engine.nodes == 1 else f" on each of {engine.nodes} machines"
    return Ask(f"{key} for {_many(count, 'engine')} of {amount(each)}{where}", count, each, engine.nodes)


def rank_ask(train: TrainConfig, device: str) -> Ask:
    """What the trainer asks for."""
    world = train.parallel.world_size
    each = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
    return Ask(f"train.parallel.world_size for {_many(world, 'rank')} of {amount(each)}", world, each)


def amount(each: Resources) -> str:
    """The GPUs of ``each`` in words, or the CPUs where it has none."""
    name = "GPU" if "GPU" in each else "CPU"
    return _many(each[name], name)


def shortage(asks: Sequence[Ask], nodes: Mapping[str, Resources], free: Resources | None = None) -> str | None:
    """Why the cluster of ``nodes``, of which so much is ``free`` (None: all), has too little for ``asks``, in one
    line; None where it has enough. Of several asks those after the first may be for one of a resource at once."""
    for resource in ("GPU", "CPU"):
        wanted = sum(ask.total(resource) for ask in asks)
        there = sum(node.get(resource, 0) for node in nodes.values())
        left = there if free is None else free.get(resource, 0)
        if wanted > left or not all(ask.fits(resource, list(nodes.values())) for ask in asks):
            whats = " and ".join(ask.what for ask in asks if ask.total(resource))
            have = ", ".join(f"{name}: {node.get(resource, 0):g}" for name, node in nodes.items())
            taken = f", of which {there - left:g} are taken" if left < there else ""
            return (
                f"the Ray cluster has too few {resource}s: {whats} ask for {wanted:g}, and its nodes have {have}"
                f"{taken}; start more nodes, or ask for less"
            )
    return None


def _many(count: float, what: str) -> str:
    return f"{count:g} {what}" if count == 1 else f"{count:g} {what}s"
