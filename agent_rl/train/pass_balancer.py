"""Expert balancing (ForeMoE) as one object of the training step. Needs torch.

The step says which routes its passes replay and asks for the plans of each pass. Without ``train.balance``, and before
routes are known, a pass has no plans: every rank computes its own experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from agent_rl.train.batching.packing import MicroBatch
from agent_rl.train.expert_balancing.report import BalancedPass, BalanceReport
from agent_rl.train.expert_balancing.worker import ForeseenLoads, RankBalancer
from agent_rl.train.megatron.packed_batch import PassPlans
from r3.shard import RouteShard


class PassBalancer:
    """The expert balancing of one rank. ``balance`` None: balancing is off, and no pass has plans."""

    def __init__(self, balance: RankBalancer | None = None) -> None:
        self._balance = balance
        self._foreseen: ForeseenLoads | None = None

    def begin_step(self) -> None:
        """Forget the routes of the step before."""
        self._foreseen = None

    def use_routes(self, batches: Sequence[MicroBatch], routes: Sequence[RouteShard] | None) -> None:
        """Count the routes that the following passes over ``batches`` replay, one shard per micro-batch."""
        if self._balance is not None:
            self._foreseen = self._balance.count_foreseen(batches, routes or ())

    def plans(self, kind: BalancedPass, micro_batches: slice = slice(None)) -> AbstractContextManager[PassPlans | None]:
        """A context around one pass over ``micro_batches`` of the step, which gives its plans or None. Collective."""
        if self._balance is None or self._foreseen is None:
            return nullcontext()
        return self._balance.planned(kind, self._foreseen.part(micro_batches))

    def weights_changed(self) -> None:
        """To be called after every optimizer update and every load of weights."""
        if self._balance is not None:
            self._balance.weights_changed()

    def measure_placement(
        self, batches: Sequence[MicroBatch], routes: Sequence[RouteShard], moe_layers: int, device: torch.device
    ) -> NDArray[np.int32]:
        """Choose where experts live from the loads of these routes over all ranks; ``[moe_layers, E]``, the same on
        every rank. Plans follow this placement from now on. Collective."""
        assert self._balance is not None, "train.balance is off"
        return self._balance.measure_placement(self._balance.count_foreseen(batches, routes), moe_layers, device)

    def report(self) -> BalanceReport | None:
        """What balancing did since the last report; None where it is off."""
        return None if self._balance is None else self._balance.report()

    def close(self) -> None:
        """Release communicators, threads and buffers. Idempotent."""
        if self._balance is not None:
            self._balance.close()
