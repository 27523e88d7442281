"""The time of an expert layer that a plan leads to, in integers: what the planner minimizes.

Eq. 3 of ForeMoE (arXiv 2606.11867) weighs compute against links, ``alpha max load + gamma max traffic``; this model
adds the transfer of experts. Times are picoseconds: equal plans have equal times on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from r3.balance.cost import borrowed_by_reach, busiest_link, rank_load
from r3.balance.plan import Ints, PlanArrays

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds that expert layers reach on a rank. ``flops``: FLOP/s of grouped products. In bytes/s and one direction:
    ``local`` to a rank of the same node, ``network`` to other nodes, ``host`` from the memory of the node."""

    flops: float
    local: float
    network: float
    host: float


HARDWARE: Mapping[Device, Hardware] = MappingProxyType(
    {
        "cuda": Hardware(flops=0.5 * 989e12, local=0.7 * 450e9, network=0.7 * 50e9, host=0.7 * 64e9),
        "cpu": Hardware(flops=57e9, local=2e9, network=1e9, host=5e9),
    }
)
"""``cuda``: an H100 SXM with NVLink 4, a network card of 400 Gbit/s per GPU and PCIe 5 (data sheets), of which products
reach a half and links 0.7 (assumed). ``cpu``: one thread in float32 (docs/research/benchmarks.md) and sockets
(assumed)."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """An expert of three ``[hidden, inner]`` matrices, whose values take ``value_bytes``."""

    hidden: int
    inner: int
    value_bytes: int

    @property
    def nbytes(self) -> int:
        return 3 * self.hidden * self.inner * self.value_bytes

    def state_time(self, hardware: Hardware) -> int:
        """Picoseconds in which a rank sends its weights and Adam's moments to another node, in float32."""
        return _picoseconds(3 * 3 * self.hidden * self.inner * 4 / hardware.network)

    @property
    def pair_nbytes(self) -> int:
        """Bytes that a (token, expert) pair sends: to the expert and back."""
        return 2 * self.hidden * self.value_bytes


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Picoseconds in one micro-batch of one layer. ``pair``: one (token, expert) pair on the fullest rank (alpha).
    ``link``: one pair over the busiest node's link (gamma). Per expert of the rank that moves most: ``crossing``
    between nodes, ``returned`` within its node. ``fetch``: per expert that a rank borrows; it runs beside the products,
    so only what exceeds their time counts."""

    pair: int = 1
    link: int = 1
    crossing: int = 0
    returned: int = 0
    fetch: int = 0

    @staticmethod
    def of(shape: ExpertShape, hardware: Hardware, ranks_per_node: int, *, update: bool, pool: bool) -> TimeModel:
        """The model of a forward pass, or with ``update`` of a forward and backward pass: three times the products,
        twice the traffic of tokens, weights fetched twice, gradients returned once. ``pool``: weights come from the
        memory of the rank's node, not from the owner."""
        passes, expert = 1 + update, shape.nbytes
        return TimeModel(
            pair=_picoseconds((1 + 2 * update) * 6 * shape.hidden * shape.inner / hardware.flops),
            link=_picoseconds(passes * shape.pair_nbytes / (hardware.network * ranks_per_node)),
            crossing=_picoseconds((passes * (not pool) + update) * expert / hardware.network),
            returned=_picoseconds(update * expert / hardware.local),
            fetch=_picoseconds(passes * expert / (hardware.host if pool else hardware.local)),
        )

    def time(self, work: Work) -> Ints:
        """Returns the picoseconds of ``work``, int64 in its shape."""
        products = self.pair * work.load
        moved = self.crossing * work.crossing + self.returned * work.local
        fetched = self.fetch * (work.crossing + work.local)
        return products + self.link * work.link + moved + np.maximum(fetched - products, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a time model weighs, int64 arrays of one shape. ``load``: tokens of the fullest rank. ``link``: tokens over
    the busiest node's link. ``crossing`` and ``local``: the most experts that a rank borrows or lends across nodes, and
    the most that a rank borrows from its node."""

    load: Ints
    link: Ints
    crossing: Ints
    local: Ints


def work_of(plans: PlanArrays) -> Work:
    """Returns the work of each micro-batch and layer, ``[M, L]``."""
    crossing, local = borrowed_by_reach(plans)
    load = rank_load(plans).max(axis=2)
    return Work(*(part.astype(np.int64) for part in (load, busiest_link(plans), crossing, local)))


def _picoseconds(seconds: float) -> int:
    return round(1e12 * seconds)
