"""The order in which the pipeline stages of a trainer send their weights.

The first rank of each stage sends the weights of its stage through a process group of its own, so that they need not
travel to rank 0 before. The senders take turns, because an engine takes one request of an update at a time, and
engines that took requests of two senders in different orders would wait for each other::

    stage 0 (rank 0)   join ─ pause ─ begin ─ buckets ─┐                         ┌─ end ─ checksums ─ resume
    stage 1            join ─ first bucket ────────────┴─ buckets ─┐             │
    stage 2            join ─ first bucket ────────────────────────┴─ buckets ───┘

Each prepares its first bucket while it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_rl.errors import WeightSyncError
from agent_rl.weight_sync.digests import DigestKind, RankDigests

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StagePart:
    """What a stage has sent in one update: ``bytes``, the checksums that engines will have of them, and seconds."""

    bytes: int
    digests: Mapping[DigestKind, RankDigests]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def sum(parts: Sequence[StagePart]) -> StagePart:
        """The parts as one. No engine parameter has weights of two stages."""
        seconds = Counter[str]()
        for part in parts:
            seconds.update(part.seconds)
        digests = {
            kind: tuple(
                {name: digest for part in parts for name, digest in part.digests[kind][rank].items()}
                for rank in range(kind.ranks)
            )
            for kind in parts[0].digests
        }
        return StagePart(sum(part.bytes for part in parts), digests, seconds)


class StageTurns:
    """The turns of the senders of ``stages`` pipeline stages; this one sends stage ``stage``.

    ``gather`` returns what all senders gave, by stage, when all have called it. Methods are collective: the senders
    call them in the same order.
    """

    def __init__(self, gather: Callable[[Any], Sequence[Any]], stage: int, stages: int) -> None:
        self.gather, self.stage, self._stages = gather, stage, stages

    @property
    def last(self) -> bool:
        """Whether no other stage sends after this one."""
        return self.stage == self._stages - 1

    def run(self, action: Callable[[], Result]) -> Result:
        """Run each sender's ``action``, one after the other. After one that raises WeightSyncError no other runs, and
        all senders raise it."""
        result: list[Result] = []
        for turn in range(self._stages):
            failure = _failure(lambda: result.append(action())) if turn == self.stage else None
            if (first := self.gather(failure)[turn]) is not None:
                raise WeightSyncError(first)
        return result[0]

    def together(self, action: Callable[[], object]) -> None:
        """Run all senders' actions at the same time. If one raises WeightSyncError, all senders raise the first."""
        for first in self.gather(_failure(action)):
            if first is not None:
                raise WeightSyncError(first)


def _failure(action: Callable[[], object]) -> str | None:
    """Run ``action``; returns the message of the WeightSyncError that it raises. The exception itself would keep its
    frames alive, and with them the process group of a transfer that broke off."""
    try:
        action()
    except WeightSyncError as error:
        return str(error)
    return None


ALONE = StageTurns(lambda item: [item], 0, 1)
"""The turns of rank 0 where no other stage sends."""
