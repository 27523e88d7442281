"""From the routes of a pass to plans that give expert ranks equal work. Import only in rank processes.

::

    own routes ─ count ─> [M, C, E] ─ one all-gather over the expert group ─> [M, C, R, E]
                      every rank plans the same in integers: the first micro-batch at once, the others in a thread
                      ─ checksums compared ─> the pass fetches a micro-batch's plans when it comes to it

Nothing of a plan travels. Plans belong to a pass: the passes before the update pair the ranks' micro-batches over the
whole step, an update pairs those of its mini step. Axes: M micro-batches of a pass, C MoE layers of this rank's stage
(columns), E experts, R ranks of the expert group.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from agent_rl.config import BalanceConfig
from agent_rl.errors import TrainerError
from agent_rl.train.batching.packing import MicroBatch
from agent_rl.train.expert_balancing.exchange import communicator, leave
from agent_rl.train.expert_balancing.report import BalancedPass, BalanceReport, PassBalance
from r3.balance import Grid, Plan, Plans
from r3.balance.cost import borrowed, busiest_link, imbalance, rank_load
from r3.balance.expert_placement import measured_home
from r3.balance.planners import Options, plan_pass
from r3.shard import Packing, RouteShard, ShardSpec, router_places

if TYPE_CHECKING:
    from agent_rl.train.expert_balancing.plan_feed import Balancing
    from agent_rl.train.expert_balancing.transfer import Transfer
    from agent_rl.train.megatron.model import PolicyModel

Counts = NDArray[np.int32]

Planner = Callable[[Counts, Grid, Options], Plans]
"""From counts ``[M, C, R, E]`` to plans, the same on every rank."""

TIMEOUT_SECONDS = 600.0

COUNTED_ROWS = 2048
"""Rows of routes that are counted at once: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Foreseen:
    """This rank's own (token, expert) pairs of its micro-batches: ``counts`` ``[M, C, E]``. Of ``rows`` ``[M]`` of
    routes, ``unforeseen`` ``[M]`` are absent and will be routed natively."""

    counts: Counts
    rows: NDArray[np.int64]
    unforeseen: NDArray[np.int64]

    def part(self, part: slice) -> Foreseen:
        """Some of the micro-batches."""
        return Foreseen(self.counts[part], self.rows[part], self.unforeseen[part])


def foresee(batches: Sequence[MicroBatch], shares: Sequence[RouteShard], spec: ShardSpec, experts: int) -> Foreseen:
    """Count the routes that will be replayed: those present, and padding, which keeps the experts it came with."""
    pinned = [_pinned(batch, share, spec) for batch, share in zip(batches, shares, strict=True)]
    counts = [
        count_experts(share.experts if mask.all() else share.experts[mask], experts)
        for share, mask in zip(shares, pinned, strict=True)
    ]
    return Foreseen(
        np.stack(counts) if counts else np.zeros((0, len(spec.columns), experts), np.int32),
        np.array([len(mask) for mask in pinned], np.int64),
        np.array([int((~mask).sum()) for mask in pinned], np.int64),
    )


def _pinned(batch: MicroBatch, share: RouteShard, spec: ShardSpec) -> NDArray[np.bool_]:
    if spec.multiple == 1:
        return share.present
    packing = Packing(tuple(np.diff(batch.cu_seqlens).tolist()), spec.multiple)
    padding: NDArray[np.bool_] = packing.rows(router_places(packing, spec)).source < 0
    return share.present | padding


def count_experts(experts: NDArray[np.integer], total: int) -> Counts:
    """How often each of ``total`` experts is named, ``[C, total]``, in ``[R, C, K]``."""
    counts = np.zeros((experts.shape[1], total), np.int32)
    for start in range(0, len(experts), COUNTED_ROWS):
        # A row's ids are moved as one value: the layers' ids then lie together, which is most of the time.
        block = np.ascontiguousarray(experts[start : start + COUNTED_ROWS])
        rows = block.view(np.dtype((np.void, block.shape[2] * block.itemsize)))[..., 0]
        ids = np.ascontiguousarray(rows.T).view(block.dtype)
        layers = torch.from_numpy(ids if ids.itemsize == 1 else ids.astype(np.int32))
        for column, layer in enumerate(layers):
            counts[column] += torch.bincount(layer, minlength=total).numpy()
    return counts


class ComingPlans(Sequence[Mapping[int, Plan]]):
    """The plans of a pass by micro-batch and column, while they are being made: an item is waited for.

    Raises TrainerError, on all ranks, where a plan could not be made, or differs between them.
    """

    def __init__(self, microbatches: int, first: Plans | None, rest: Future[Plans] | None) -> None:
        self._microbatches, self._first, self._rest = microbatches, first, rest
        self.waited = 0.0

    def __len__(self) -> int:
        return self._microbatches

    def __getitem__(self, microbatch: Any) -> Any:
        if not 0 <= microbatch < len(self):
            raise IndexError(microbatch)
        started = time.perf_counter()
        plans, at = (self._first, 0) if microbatch == 0 else (self._others(), microbatch - 1)
        self.waited += time.perf_counter() - started
        assert plans is not None
        return {column: plans.of(at, column) for column in range(plans.load.shape[1])}

    def all(self) -> Plans | None:
        """All of them, once they are made; None where there are no micro-batches."""
        parts = [part for part in (self._first, self._others()) if part is not None]
        return Plans.join(parts) if parts else None

    def _others(self) -> Plans | None:
        return None if self._rest is None else self._rest.result()

    def join(self) -> None:
        """Wait for the thread, whatever becomes of it."""
        if self._rest is not None:
            wait([self._rest])


class ExpertGroup:
    """The ranks that share experts, on a communicator of its own for small arrays of the host. ``ranks``: their numbers
    in the world, in the group's order. All ranks of the world make theirs together."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self._group: Any = communicator(self.ranks, TIMEOUT_SECONDS, backend="gloo")

    def gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Every rank's array of one shape and type, stacked in the group's order."""
        own = torch.from_numpy(np.ascontiguousarray(array))
        found = own.new_empty(len(self.ranks), *own.shape)
        dist.all_gather(list(found), own, group=self._group)
        return found.numpy()

    def hosts(self) -> list[str]:
        """The machine of every rank, by its name."""
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, socket.gethostname(), group=self._group)
        return found

    def close(self) -> None:
        """Leave it. Idempotent."""
        group, self._group = self._group, None
        leave(group)


def machines_of(hosts: Sequence[str], ranks: Sequence[int], per_machine: int | None) -> tuple[int, ...]:
    """The machine of every rank of an expert group, counted from 0, by ``hosts`` or ``per_machine`` neighbours each.

    Raises TrainerError where ranks of one machine are not neighbours, or machines have unequally many of them.
    """
    if per_machine is not None:
        return tuple(rank // per_machine for rank in range(len(hosts)))
    names = list(dict.fromkeys(hosts))
    each = len(hosts) // len(names)
    found = tuple(names.index(host) for host in hosts)
    if found != tuple(rank // each for rank in range(len(hosts))):
        places = ", ".join(f"{rank} on {host}" for rank, host in zip(ranks, hosts, strict=True))
        raise TrainerError(
            f"train.balance: the expert ranks are not grouped by machine ({places}): give Ray nodes with equally many "
            "places, or set train.parallel.expert to the ranks of one machine"
        )
    return found


def expert_group() -> ExpertGroup:
    """This rank's, of Megatron's groups. Collective."""
    from megatron.core import parallel_state

    return ExpertGroup(dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group()))


def expert_grid(config: BalanceConfig, group: ExpertGroup, experts: int) -> Grid:
    """Where experts live and how many can be borrowed. Collective. Raises TrainerError as :func:`machines_of`."""
    machine = machines_of(group.hosts(), group.ranks, config.ranks_per_node)
    return Grid(experts, len(group.ranks), config.slots, machine)


def borrowing(config: BalanceConfig, group: ExpertGroup, grid: Grid) -> Balancing:
    """How the model is built."""
    from agent_rl.train.expert_balancing.host_pool import open_transfers
    from agent_rl.train.expert_balancing.plan_feed import Balancing

    chosen = partial(open_transfers, grid=grid, config=config, ranks=group.ranks, timeout=TIMEOUT_SECONDS)
    return Balancing(grid, chosen, min_rows=config.min_rows, keep_order=config.keep_order)


class RankBalance:
    """One rank's plans, pass by pass, and what they did in a step.

    ``layers``: the numbers of the rank's MoE layers, those of ``spec``'s columns. ``transfers`` bring the experts; they
    are refreshed before the first pass with plans after the weights changed.
    """

    def __init__(
        self,
        group: ExpertGroup,
        grid: Grid,
        config: BalanceConfig,
        transfers: Iterable[Transfer],
        spec: ShardSpec,
        layers: Sequence[int],
        planner: Planner = plan_pass,
    ) -> None:
        self._group, self._grid, self._config, self._planner = group, grid, config, planner
        self._transfers = list(dict.fromkeys(transfers))
        self._spec, self._layers = spec, tuple(layers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plans")
        self._changed = True
        self._last_loads: Counts | None = None
        self._clear()

    @classmethod
    def of(cls, config: BalanceConfig, group: ExpertGroup, grid: Grid, model: PolicyModel) -> RankBalance:
        """Of a model that was built with :func:`borrowing`."""
        assert model.balancer is not None
        transfers = (model.balancer.recompute, model.balancer.update)
        layers = [model.layer_numbers[column] for column in model.shard.columns]
        return cls(group, grid, config, transfers, model.shard, layers)

    def _clear(self) -> None:
        self._passes: list[PassBalance] = []
        self._loads = np.zeros((len(self._layers), self._grid.experts), np.int32)
        self._rows = self._unforeseen = 0
        self._planning = self._exposed = 0.0

    def weights_changed(self) -> None:
        """After an update, and after weights were loaded."""
        self._changed = True

    def measure_homes(self, foreseen: Foreseen, moe_layers: int, device: torch.device) -> NDArray[np.int32]:
        """Home orders ``[moe_layers, E]`` by what all ranks foresee of a step, by which plans are made from now on. The
        same on all ranks of the world, which call it together."""
        columns, experts = list(self._spec.columns), self._grid.experts
        loads = torch.zeros(moe_layers, experts, dtype=torch.int64, device=device)
        loads[columns] = torch.from_numpy(foreseen.counts.sum(axis=0, dtype=np.int64)).to(device)
        machines = torch.tensor(self._grid.machines, device=device)
        dist.all_reduce(loads)
        dist.all_reduce(machines, dist.ReduceOp.MAX)
        each = self._grid.ranks // int(machines)
        wide = replace(self._grid, machine=tuple(rank // each for rank in range(self._grid.ranks)))
        homes = measured_home(loads.cpu().numpy(), wide)
        self._grid = replace(self._grid, home=homes[columns])
        return homes

    def foresee(self, batches: Sequence[MicroBatch], shares: Sequence[RouteShard]) -> Foreseen:
        """See :func:`foresee`; the time is that of planning."""
        started, spent = time.perf_counter(), time.thread_time()
        found = foresee(batches, shares, self._spec, self._grid.experts)
        self._planning += time.thread_time() - spent
        self._exposed += time.perf_counter() - started
        return found

    @contextmanager
    def planned(self, kind: BalancedPass, foreseen: Foreseen) -> Iterator[ComingPlans]:
        """Around a pass over the micro-batches ``foreseen``: its plans. Collective over the expert group.

        Raises TrainerError, on all ranks of it, where a rank could not plan or plans differ.
        """
        if self._changed:
            for transfer in self._transfers:
                transfer.refresh()
            self._changed = False
        started = time.perf_counter()
        # A pipeline stage may have no layer with experts: it has nothing to plan.
        counts = self._gather(foreseen.counts) if self._layers else foreseen.counts[:0]
        first = self._agreed(counts[:1], kind) if len(counts) else None
        rest = self._thread.submit(self._agreed, counts[1:], kind) if len(counts) > 1 else None
        plans = ComingPlans(len(counts), first, rest)
        self._exposed += time.perf_counter() - started
        try:
            yield plans
        finally:
            plans.join()
        self._note(kind, plans, foreseen)

    def report(self) -> BalanceReport:
        """What was done since the last report."""
        moved = [transfer.take_stats() for transfer in self._transfers]
        made = BalanceReport(
            group=self._group.ranks[0],
            passes=tuple(self._passes),
            rows=self._rows,
            unforeseen=self._unforeseen,
            bytes_fetched=sum(stats.fetched for stats in moved),
            bytes_returned=sum(stats.returned for stats in moved),
            planning_ms=1e3 * self._planning,
            planning_exposed_ms=1e3 * self._exposed,
            exposed_transfer_ms=sum(stats.exposed_ms for stats in moved),
            pool_refresh_ms=sum(stats.refresh_ms for stats in moved),
        )
        self._last_loads = self._loads
        self._clear()
        return made

    def close(self) -> None:
        """Leave the group, end the thread, let go of what the transfers hold. Idempotent."""
        self._thread.shutdown()
        for transfer in self._transfers:
            transfer.close()
        self._group.close()

    def _note(self, kind: BalancedPass, plans: ComingPlans, foreseen: Foreseen) -> None:
        self._exposed += plans.waited
        self._rows += int(foreseen.rows.sum()) * len(self._layers)
        self._unforeseen += int(foreseen.unforeseen.sum()) * len(self._layers)
        made = plans.all()
        if made is None:
            return
        self._loads += made.counts.sum(axis=(0, 2))
        if self._group.rank == 0:
            self._passes.append(_pass_balance(kind, made, self._layers))

    def _gather(self, counts: Counts) -> Counts:
        """All ranks' counts ``[M, C, R, E]``, M the most micro-batches of any. What a rank without one brings
        instead, a filler of a few tokens that are routed natively, is not foreseen."""
        most = int(self._group.gather(np.array([len(counts)])).max())
        restore = np.zeros((most, *counts.shape[1:]), np.int32)
        restore[: len(counts)] = counts
        return np.ascontiguousarray(self._group.gather(restore).transpose(1, 2, 0, 3))

    def _agreed(self, counts: Counts, kind: BalancedPass) -> Plans:
        """Plans that are the same on all ranks. A rank that fails tells the others, which would wait for it."""
        started = time.thread_time()
        plans, failure = None, None
        try:
            plans = self._planner(counts, self._grid, self._options(kind))
            sums = np.concatenate(([0], plans.checksum()))
        except Exception as error:
            failure = error
            sums = np.array([1] + [0] * len(self._layers))
        self._planning += time.thread_time() - started
        self._check(self._group.gather(sums.astype(np.int64)), failure)
        assert plans is not None
        return plans

    def _options(self, kind: BalancedPass) -> Options:
        config = self._config
        within_node = config.within_node and kind == "update"
        return Options(config.planner, config.link_slots, within_node, self._last_loads)

    def _check(self, sums: NDArray[np.int64], failure: Exception | None) -> None:
        if len(failed := np.flatnonzero(sums[:, 0])):
            rank = self._group.ranks[failed[0]]
            raise TrainerError(
                f"train.balance: rank {rank} could not plan: {failure or 'see its own error'}"
            ) from failure
        if len(differing := np.flatnonzero((sums[:, 1:] != sums[0, 1:]).any(axis=0))):
            column = int(differing[0])
            others = np.flatnonzero(sums[:, column + 1] != sums[0, column + 1])
            ranks = [self._group.ranks[rank] for rank in others]
            raise TrainerError(
                f"train.balance: layer {self._layers[column]}: the plans of ranks {ranks} differ from those of rank "
                f"{self._group.ranks[0]}; all ranks must run the same version on the same config"
            )


def _pass_balance(kind: BalancedPass, plans: Plans, layers: tuple[int, ...]) -> PassBalance:
    home = Plans.identity(plans.grid, plans.counts)
    return PassBalance(
        kind=kind,
        layers=layers,
        imbalance_before=imbalance(rank_load(home)),
        imbalance_after=imbalance(rank_load(plans)),
        link_before=busiest_link(home),
        link_after=busiest_link(plans),
        borrowed=borrowed(plans),
    )
