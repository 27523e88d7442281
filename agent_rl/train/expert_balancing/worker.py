"""Makes plans from the routes of a pass that give expert ranks equal work. Import only in rank processes.

::

    own routes ─ count ─> [M, C, E] ─ one all-gather over the expert group ─> [M, C, R, E]
               ─ every rank computes the same integer plans: the first micro-batch at once, the others in a thread
               ─ compare checksums ─> the pass takes the plans of each micro-batch when it starts it

Plans are not sent. A plan belongs to a pass: passes before the update combine the ranks' micro-batches of the whole
step, an update those of its mini step. Axes: M micro-batches of a pass, C MoE layers of this rank's pipeline stage
(columns), E experts, R ranks of the expert group.

The training step uses :class:`PassBalancer`: it says which routes its passes replay and asks for the plans of each
pass. Without ``train.balance``, and before routes are known, a pass has no plans: every rank computes its own experts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from agent_rl.train.expert_balancing.report import BalancedPass, BalanceReport, Moved, PassBalance
from agent_rl.train.megatron.packed_batch import PassPlans
from r3.balance import ExpertLayout, LayerPlan, PlanArrays
from r3.balance.cost import borrowed, busiest_link, imbalance, rank_load
from r3.balance.planners import PlannerOptions, plan_pass
from r3.balance.time_model import HARDWARE, ExpertShape, Hardware, TimeModel
from r3.shard import Packing, RouteShard, ShardSpec, router_places

if TYPE_CHECKING:
    from agent_rl.train.expert_balancing.plan_feed import BalancingSpec
    from agent_rl.train.expert_balancing.renewal import PlacementRenewal
    from agent_rl.train.expert_balancing.transfer import Transfer
    from agent_rl.train.megatron.model import PolicyModel

Counts = NDArray[np.int32]

Planner = Callable[[Counts, ExpertLayout, PlannerOptions], PlanArrays]
"""Makes plans from counts ``[M, C, R, E]``; must return the same on every rank."""

TIMEOUT_SECONDS = 600.0

COUNTED_ROWS = 2048
"""Rows of routes per counting block: a block fits into the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class ForeseenLoads:
    """Expert loads of this rank's micro-batches: ``counts`` ``[M, C, E]`` (token, expert) pairs. Of the ``rows``
    ``[M]`` of routes, ``unforeseen`` ``[M]`` are absent and will be routed without replay."""

    counts: Counts
    rows: NDArray[np.int64]
    unforeseen: NDArray[np.int64]

    def part(self, micro_batches: slice) -> ForeseenLoads:
        """Returns the loads of some micro-batches."""
        return ForeseenLoads(self.counts[micro_batches], self.rows[micro_batches], self.unforeseen[micro_batches])


def count_foreseen(
    batches: Sequence[MicroBatch], shares: Sequence[RouteShard], spec: ShardSpec, experts: int
) -> ForeseenLoads:
    """Count the routes that will be replayed: the present rows, and padding rows, which keep their filler experts."""
    pinned = [_pinned_rows(batch, share, spec) for batch, share in zip(batches, shares, strict=True)]
    counts = [
        count_experts(share.experts if mask.all() else share.experts[mask], experts)
        for share, mask in zip(shares, pinned, strict=True)
    ]
    return ForeseenLoads(
        np.stack(counts) if counts else np.zeros((0, len(spec.columns), experts), np.int32),
        np.array([len(mask) for mask in pinned], np.int64),
        np.array([int((~mask).sum()) for mask in pinned], np.int64),
    )


def _pinned_rows(batch: MicroBatch, share: RouteShard, spec: ShardSpec) -> NDArray[np.bool_]:
    if spec.multiple == 1:
        return share.present
    packing = Packing(tuple(np.diff(batch.cu_seqlens).tolist()), spec.multiple)
    padding: NDArray[np.bool_] = packing.rows(router_places(packing, spec)).source < 0
    return share.present | padding


def count_experts(experts: NDArray[np.integer], total: int) -> Counts:
    """Returns how often each of ``total`` experts occurs in ``experts`` ``[rows, C, top_k]``, ``[C, total]``."""
    counts = np.zeros((experts.shape[1], total), np.int32)
    for start in range(0, len(experts), COUNTED_ROWS):
        # Transposing the ids of a row as one value is most of the work; the ids of a layer are then contiguous.
        block = np.ascontiguousarray(experts[start : start + COUNTED_ROWS])
        rows = block.view(np.dtype((np.void, block.shape[2] * block.itemsize)))[..., 0]
        ids = np.ascontiguousarray(rows.T).view(block.dtype)
        layers = torch.from_numpy(ids if ids.itemsize == 1 else ids.astype(np.int32))
        for column, layer in enumerate(layers):
            counts[column] += torch.bincount(layer, minlength=total).numpy()
    return counts


class PendingPlans(Sequence[Mapping[int, LayerPlan]]):
    """The plans of a pass, by micro-batch and column, while a thread computes them: indexing waits for the plan.

    Raises TrainerError on all ranks when a rank could not plan or when plans differ between ranks.
    """

    def __init__(self, microbatches: int, first: PlanArrays | None, rest: Future[PlanArrays] | None) -> None:
        self._microbatches, self._first, self._rest = microbatches, first, rest
        self.waited = 0.0

    def __len__(self) -> int:
        return self._microbatches

    def __getitem__(self, microbatch: Any) -> Any:
        if not 0 <= microbatch < len(self):
            raise IndexError(microbatch)
        started = time.perf_counter()
        plans, index = (self._first, 0) if microbatch == 0 else (self._wait_rest(), microbatch - 1)
        self.waited += time.perf_counter() - started
        assert plans is not None
        return {column: plans.layer_plan(index, column) for column in range(plans.load.shape[1])}

    def all(self) -> PlanArrays | None:
        """Wait for all plans and return them; None without micro-batches."""
        parts = [part for part in (self._first, self._wait_rest()) if part is not None]
        return PlanArrays.concatenate(parts) if parts else None

    def _wait_rest(self) -> PlanArrays | None:
        return None if self._rest is None else self._rest.result()

    def join(self) -> None:
        """Wait for the thread to end, successful or not."""
        if self._rest is not None:
            wait([self._rest])


class ExpertGroup:
    """The ranks that share experts, with a separate communicator for small arrays in host memory.

    ``ranks``: their global numbers, in the group's order. All ranks of the world construct theirs together."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self._group: Any = communicator(self.ranks, TIMEOUT_SECONDS, backend="gloo")

    def gather(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the arrays of all ranks, of equal shape and type, stacked in the group's order."""
        own = torch.from_numpy(np.ascontiguousarray(array))
        gathered = own.new_empty(len(self.ranks), *own.shape)
        dist.all_gather(list(gathered), own, group=self._group)
        return gathered.numpy()

    def hostnames(self) -> list[str]:
        """Returns the host name of every rank."""
        names: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(names, socket.gethostname(), group=self._group)
        return names

    def close(self) -> None:
        """Leave the communicator. Idempotent."""
        group, self._group = self._group, None
        leave(group)


def nodes_of_ranks(hostnames: Sequence[str], ranks: Sequence[int], per_node: int | None) -> tuple[int, ...]:
    """Returns the node of every rank of an expert group, counted from 0: by ``hostnames``, or ``per_node`` consecutive
    ranks each.

    Raises TrainerError when the ranks of a node are not consecutive, or when nodes have different numbers of ranks.
    """
    if per_node is not None:
        return tuple(rank // per_node for rank in range(len(hostnames)))
    names = list(dict.fromkeys(hostnames))
    each = len(hostnames) // len(names)
    nodes = tuple(names.index(name) for name in hostnames)
    if nodes != tuple(rank // each for rank in range(len(hostnames))):
        placed = ", ".join(f"{rank} on {name}" for rank, name in zip(ranks, hostnames, strict=True))
        raise TrainerError(
            f"train.balance: the expert ranks are not grouped by node ({placed}): use Ray nodes with equal numbers of "
            "workers, or set train.parallel.expert to the number of ranks on one node"
        )
    return nodes


def expert_group() -> ExpertGroup:
    """Returns this rank's expert-parallel group of Megatron. Collective."""
    from megatron.core import parallel_state

    return ExpertGroup(dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group()))


def expert_layout(config: BalanceConfig, group: ExpertGroup, experts: int) -> ExpertLayout:
    """Returns how experts and borrowed slots are spread over ``group``. Collective. Raises TrainerError as
    :func:`nodes_of_ranks`."""
    node_of_rank = nodes_of_ranks(group.hostnames(), group.ranks, config.ranks_per_node)
    return ExpertLayout(experts, len(group.ranks), config.slots, node_of_rank)


def balancing_spec(config: BalanceConfig, group: ExpertGroup, layout: ExpertLayout) -> BalancingSpec:
    """Returns what the model is built with."""
    from agent_rl.train.expert_balancing.host_pool import open_transfers
    from agent_rl.train.expert_balancing.plan_feed import BalancingSpec

    transfers = partial(open_transfers, layout=layout, config=config, ranks=group.ranks, timeout=TIMEOUT_SECONDS)
    return BalancingSpec(layout, transfers)


def time_models(
    config: BalanceConfig, layout: ExpertLayout, shape: ExpertShape, hardware: Hardware
) -> dict[BalancedPass, TimeModel]:
    """Returns the time models of passes without and with gradients."""
    transfers: dict[BalancedPass, str] = {"recompute": config.transfer.recompute, "update": config.transfer.update}
    each = layout.ranks // layout.nodes
    return {
        kind: TimeModel.of(shape, hardware, each, update=kind == "update", pool=transfer == "pool")
        for kind, transfer in transfers.items()
    }


class RankBalancer:
    """Plans the passes of one rank and reports what the plans did in a step.

    ``layers``: the numbers of the rank's MoE layers, one per column of ``spec``. ``transfers`` move the experts; they
    are refreshed before the first planned pass after a change of the weights.
    """

    def __init__(
        self,
        group: ExpertGroup,
        layout: ExpertLayout,
        config: BalanceConfig,
        transfers: Iterable[Transfer],
        spec: ShardSpec,
        layers: Sequence[int],
        times: Mapping[BalancedPass, TimeModel],
        planner: Planner = plan_pass,
        renewal: PlacementRenewal | None = None,
    ) -> None:
        self._group, self._layout, self._config, self._planner = group, layout, config, planner
        self._times, self._renewal = times, renewal
        self._transfers = list(dict.fromkeys(transfers))
        self._spec, self._layers = spec, tuple(layers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plans")
        self._weights_changed = True
        self._last_loads: Counts | None = None
        self._clear()

    @classmethod
    def for_model(
        cls, balance: BalanceConfig, group: ExpertGroup, layout: ExpertLayout, model: PolicyModel
    ) -> RankBalancer:
        """The balancer of a model that was built with :func:`balancing_spec`. All ranks of the world construct theirs
        together."""
        from agent_rl.train.expert_balancing.renewal import PlacementRenewal

        assert model.balancer is not None
        transfers = (model.balancer.recompute, model.balancer.update)
        columns, layers = model.shard.columns, [model.layer_numbers[column] for column in model.shard.columns]
        hardware = HARDWARE["cuda" if model.device.type == "cuda" else "cpu"]
        shape = ExpertShape(model.model_spec.hidden, model.model_spec.expert_inner, model.config.params_dtype.itemsize)
        times = time_models(balance, layout, shape, hardware)
        renewal = PlacementRenewal(
            group.ranks,
            layout,
            columns,
            model.moe_layers,
            list(times.values()),
            moving=shape.state_time(hardware),
            every=balance.placement_every,
            device=model.device,
        )
        return cls(group, layout, balance, transfers, model.shard, layers, times, renewal=renewal)

    def _clear(self) -> None:
        self._passes: list[PassBalance] = []
        self._loads = np.zeros((len(self._layers), self._layout.experts), np.int32)
        self._rows = self._unforeseen = 0
        self._planning = self._exposed = 0.0
        self._moved = Moved()

    def weights_changed(self) -> None:
        """Call after every update and every load of weights."""
        self._weights_changed = True

    def renewed_placement(self, foreseen: ForeseenLoads) -> NDArray[np.int32] | None:
        """Count a step. Returns a better expert placement ``[moe_layers, E]`` for its loads, the same on all ranks of
        the world, or None if all experts stay. Collective over the world."""
        if self._renewal is None or not self._renewal.due():
            return None
        started = time.thread_time()
        counts = self._gather(foreseen.counts) if self._layers else foreseen.counts[:, :, None]
        placement = self._renewal.choose(counts)
        self._planning += time.thread_time() - started
        return placement

    def use_placement(self, placement: NDArray[np.int32], moved: Moved) -> None:
        """Plan for ``placement`` ``[moe_layers, E]`` from now on. ``moved``: what it took to get there."""
        self._layout = replace(self._layout, placement=placement[list(self._spec.columns)])
        self._moved, self._weights_changed = moved, True

    def count_foreseen(self, batches: Sequence[MicroBatch], shares: Sequence[RouteShard]) -> ForeseenLoads:
        """See :func:`count_foreseen`; its time counts as planning time."""
        started, started_cpu = time.perf_counter(), time.thread_time()
        foreseen = count_foreseen(batches, shares, self._spec, self._layout.experts)
        self._planning += time.thread_time() - started_cpu
        self._exposed += time.perf_counter() - started
        return foreseen

    @contextmanager
    def planned(self, kind: BalancedPass, foreseen: ForeseenLoads) -> Iterator[PendingPlans]:
        """A context around a pass over the micro-batches of ``foreseen``; gives its plans. Collective over the expert
        group.

        Raises TrainerError on all its ranks when a rank could not plan or when plans differ.
        """
        if self._weights_changed:
            for transfer in self._transfers:
                transfer.refresh()
            self._weights_changed = False
        started = time.perf_counter()
        # A pipeline stage without MoE layers has nothing to plan.
        counts = self._gather(foreseen.counts) if self._layers else foreseen.counts[:0]
        first = self._plan_and_compare(counts[:1], kind) if len(counts) else None
        rest = self._thread.submit(self._plan_and_compare, counts[1:], kind) if len(counts) > 1 else None
        plans = PendingPlans(len(counts), first, rest)
        self._exposed += time.perf_counter() - started
        try:
            yield plans
        finally:
            plans.join()
        self._record_pass(kind, plans, foreseen)

    def report(self) -> BalanceReport:
        """Returns what was done since the last report."""
        moved = [transfer.take_stats() for transfer in self._transfers]
        report = BalanceReport(
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
            bytes_moved=self._moved.nbytes,
            placement_ms=self._moved.ms,
        )
        self._last_loads = self._loads
        self._clear()
        return report

    def close(self) -> None:
        """Leave the group, end the thread and close the transfers. Idempotent."""
        self._thread.shutdown()
        for transfer in self._transfers:
            transfer.close()
        self._group.close()

    def _record_pass(self, kind: BalancedPass, plans: PendingPlans, foreseen: ForeseenLoads) -> None:
        self._exposed += plans.waited
        self._rows += int(foreseen.rows.sum()) * len(self._layers)
        self._unforeseen += int(foreseen.unforeseen.sum()) * len(self._layers)
        arrays = plans.all()
        if arrays is None:
            return
        self._loads += arrays.counts.sum(axis=(0, 2))
        if self._group.rank == 0:
            self._passes.append(_pass_balance(kind, arrays, self._layers))

    def _gather(self, counts: Counts) -> Counts:
        """Returns all ranks' counts ``[M, C, R, E]``; M is the highest number of micro-batches of a rank. Zeros stand
        for missing micro-batches, which a rank replaces by a few filler tokens routed without replay."""
        most = int(self._group.gather(np.array([len(counts)])).max())
        padded = np.zeros((most, *counts.shape[1:]), np.int32)
        padded[: len(counts)] = counts
        return np.ascontiguousarray(self._group.gather(padded).transpose(1, 2, 0, 3))

    def _plan_and_compare(self, counts: Counts, kind: BalancedPass) -> PlanArrays:
        """Returns plans that are equal on all ranks. A failing rank reports to the others, so that none waits."""
        started = time.thread_time()
        plans, failure = None, None
        try:
            plans = self._planner(counts, self._layout, self._options(kind))
            sums = np.concatenate(([0], plans.checksum()))
        except Exception as error:
            failure = error
            sums = np.array([1] + [0] * len(self._layers))
        self._planning += time.thread_time() - started
        self._compare_checksums(self._group.gather(sums.astype(np.int64)), failure)
        assert plans is not None
        return plans

    def _options(self, kind: BalancedPass) -> PlannerOptions:
        return PlannerOptions(self._config.planner, self._times[kind], self._last_loads)

    def _compare_checksums(self, sums: NDArray[np.int64], failure: Exception | None) -> None:
        if len(failed := np.flatnonzero(sums[:, 0])):
            rank, reason = self._group.ranks[failed[0]], failure or "see its own error"
            raise TrainerError(f"train.balance: rank {rank} could not plan: {reason}") from failure
        if len(differing := np.flatnonzero((sums[:, 1:] != sums[0, 1:]).any(axis=0))):
            column = int(differing[0])
            others = np.flatnonzero(sums[:, column + 1] != sums[0, column + 1])
            ranks = [self._group.ranks[rank] for rank in others]
            raise TrainerError(
                f"train.balance: layer {self._layers[column]}: the plans of ranks {ranks} differ from those of rank "
                f"{self._group.ranks[0]}; all ranks must run the same version on the same config"
            )


def _pass_balance(kind: BalancedPass, plans: PlanArrays, layers: tuple[int, ...]) -> PassBalance:
    unbalanced = PlanArrays.identity(plans.layout, plans.counts)
    return PassBalance(
        kind=kind,
        layers=layers,
        imbalance_before=imbalance(rank_load(unbalanced)),
        imbalance_after=imbalance(rank_load(plans)),
        link_before=busiest_link(unbalanced),
        link_after=busiest_link(plans),
        borrowed=borrowed(plans),
    )


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

    def renewed_placement(
        self, batches: Sequence[MicroBatch], routes: Sequence[RouteShard]
    ) -> NDArray[np.int32] | None:
        """Where experts should live by the loads of these routes over all ranks, ``[moe_layers, E]``, the same on every
        rank; None: where they are. Collective."""
        if self._balance is None:
            return None
        return self._balance.renewed_placement(self._balance.count_foreseen(batches, routes))

    def use_placement(self, placement: NDArray[np.int32], moved: Moved) -> None:
        """See :meth:`RankBalancer.use_placement`."""
        assert self._balance is not None, "train.balance is off"
        self._balance.use_placement(placement, moved)

    def report(self) -> BalanceReport | None:
        """What balancing did since the last report; None where it is off."""
        return None if self._balance is None else self._balance.report()

    def close(self) -> None:
        """Release communicators, threads and buffers. Idempotent."""
        if self._balance is not None:
            self._balance.close()
