"""The Ray actor around one trainer rank. Light to import: torch and Megatron load inside the actor's process."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_rl.errors import TrainerError
from agent_rl.train.orders import OptimizerSpec, RankOrder

if TYPE_CHECKING:
    from agent_rl.train.rank import TrainerRank
    from agent_rl.train.route_shares import RankInfo

WRITER = "writer"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs: its host, a port that it listens on there, its process id."""

    host: str
    port: int
    pid: int


class RankActor:
    """One rank in a process of its own; wrap with ``ray.remote``."""

    def __init__(self) -> None:
        self._rank: TrainerRank | None = None
        self._listener = socket.create_server(("", 0))

    def place(self) -> Place:
        """Where this actor runs."""
        import ray

        return Place(ray.util.get_node_ip_address(), int(self._listener.getsockname()[1]), os.getpid())

    def start(self, order: RankOrder, optimizer: OptimizerSpec, rank: int, meeting: Place) -> RankInfo:
        """Build the rank; all ranks are started at once and meet at rank 0's place."""
        from agent_rl.train.rank import TrainerRank

        # The rendezvous takes the listening socket over where it is used, and nobody needs it where it is not.
        listener = self._listener.detach()
        if rank != 0:
            os.close(listener)
        self._rank = TrainerRank(
            order,
            optimizer,
            rank,
            master_addr=meeting.host,
            master_port=meeting.port,
            listener=listener if rank == 0 else None,
        )
        return self._rank.info()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of :class:`agent_rl.train.rank.TrainerRank`."""
        if self._rank is None:
            raise TrainerError("the rank was not started")
        return getattr(self._rank, method)(*arguments)

    def written(self) -> int:
        """:meth:`agent_rl.train.rank.TrainerRank.written`, in the concurrency group ``WRITER``: it waits beside what
        :meth:`call` runs."""
        if self._rank is None:
            raise TrainerError("the rank was not started")
        return self._rank.written()
