"""One rank of the worlds in which experts are balanced: runs every case with plans and without, and saves how far apart
they are. Arguments: rank, directory for results, file of the plan (:func:`main` says what is in it)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import megatron_worker as worker
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_rl.config import BalanceConfig, ParallelConfig
from agent_rl.models.spec import read_model_spec
from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes
from agent_rl.train.megatron.parallel import ParallelState, destroy_parallel, init_parallel
from r3.balance import ExpertLayout, LayerPlan
from r3.balance.planners import PlannerOptions, plan_pass

SLOTS, UPDATES = 2, 2
Routes = list[PackedRoutes] | None


def hand_made(kind: str, layout: ExpertLayout, counts: NDArray[np.int32], shift: int) -> LayerPlan:
    """A plan for ``counts`` ``[R, E]``, in which ranks borrow from their neighbours, other experts for every ``shift``.

    ``relocate``: the borrower takes all of an expert's tokens, and in every third plan rank 0 borrows nothing.
    ``replicate``: owner and borrowers share them.
    """
    borrowed = np.full((layout.ranks, layout.slots), -1, np.int32)
    taken: set[int] = set()
    for rank in range(int(kind == "relocate" and shift % 3 == 2), layout.ranks):
        for slot in range(layout.slots):
            neighbour = (rank + 1 + slot * (kind == "replicate")) % layout.ranks
            expert = neighbour * layout.experts_per_rank + (shift + slot) % layout.experts_per_rank
            if layout.owner_rank[expert] != rank and (kind == "replicate" or expert not in taken):
                borrowed[rank, slot] = expert
                taken.add(expert)
    load = np.zeros((layout.experts, layout.ranks), np.int32)
    for expert, total in enumerate(counts.sum(axis=0).tolist()):
        holders = [rank for rank in range(layout.ranks) if expert in borrowed[rank]]
        holders += [int(layout.owner_rank[expert])] * (kind == "replicate" or not holders)
        load[expert, sorted(set(holders))] = np.diff(np.linspace(0, total, len(set(holders)) + 1).astype(np.int32))
    plan = LayerPlan(layout, borrowed, load, counts)
    plan.check()
    return plan


def foreseen(routes: list[Tensor], experts: int, group: Any) -> NDArray[np.int32]:
    """``[M, L, R, E]`` from the routes ``[rows, L, k]`` of each batch, which every rank of the group recorded."""
    own = [
        np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in batch.numpy().swapaxes(0, 1)])
        for batch in routes
    ]
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, own, group=group)
    most, layers = max(map(len, everyone)), max(len(batch) for rank in everyone for batch in rank)
    counts = np.zeros((most, layers, len(everyone), experts), np.int32)
    for rank, held in enumerate(everyone):
        for index, batch in enumerate(held):
            counts[index, :, rank] = batch
    return counts


class NotReturned:
    """A transfer that does not return gradients."""

    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def return_gradients(self, *_unused: Any) -> None: ...


class NotKept(NotReturned):
    """A transfer that uses a layer's newest plan in backward passes of earlier micro-batches."""

    def __init__(self, transfer: Any) -> None:
        super().__init__(transfer)
        self._newest: dict[int, LayerPlan] = {}
        self._seen: list[LayerPlan] = []

    def prefetch(self, layer: int, plan: LayerPlan) -> None: ...

    def fetch(self, layer: int, plan: LayerPlan) -> Any:
        if not any(plan is seen for seen in self._seen):
            self._seen.append(plan)
            self._newest[layer] = plan
        return self._transfer.fetch(layer, self._newest[layer])

    def return_gradients(self, layer: int, _plan: LayerPlan, grad1: Tensor, grad2: Tensor) -> None:
        self._transfer.return_gradients(layer, self._newest[layer], grad1, grad2)

    def refresh(self) -> None:
        self._seen.clear()


FAULTS: dict[str | None, Any] = {"not returned": NotReturned, "not kept": NotKept}


def balancing(case: Mapping[str, Any], experts: int, group: Any) -> Any:
    """The model's option ``balance``: the case's transfers, one of them with the case's fault."""
    from agent_rl.train.expert_balancing.host_pool import open_transfers
    from agent_rl.train.expert_balancing.plan_feed import BalancingSpec

    layout, config = ExpertLayout(experts, group.size(), SLOTS), BalanceConfig.model_validate(case.get("config", {}))

    def transfers(layers: Any) -> Any:
        ranks = torch.distributed.get_process_group_ranks(group)
        recompute, update = open_transfers(layers, layout, config, ranks, timeout=120.0)
        return recompute, FAULTS.get(case.get("fault"), lambda sound: sound)(update)

    return BalancingSpec(layout, transfers)


def refresh(model: Any, *, first: bool, fault: str | None) -> None:
    """Call after a change of the weights. With the fault ``stale`` only the first call has an effect."""
    if model.balancer is not None and (first or fault != "stale"):
        for transfer in transfers_of(model):
            transfer.refresh()


def transfers_of(model: Any) -> list[Any]:
    return list(dict.fromkeys((model.balancer.recompute, model.balancer.update)))


def batches() -> list[PackedBatch]:
    """Long enough that every used expert has sixteen foreseen tokens or more: the bits of a product of fewer rows may
    depend on their number."""
    return [worker.tiny.packed(seed, (93, 76 + seed)) for seed in range(3)]


def given_routes(items: list[PackedBatch], model: Any, kind: str) -> Routes:
    """Random routes; ``absent``: every fifth row has none, ``crowded``: all rows have the same experts, ``native``:
    None."""
    if kind == "native":
        return None
    layers, top_k, experts = model.moe_layers, model.model_spec.top_k, model.model_spec.num_experts
    found = []
    for batch in items:
        generator = torch.Generator().manual_seed(len(batch))
        chosen = torch.rand(len(batch), layers, experts, generator=generator).argsort(-1)[..., :top_k].to(torch.uint8)
        if kind == "crowded":
            chosen = torch.arange(top_k, dtype=torch.uint8).expand_as(chosen)
        present = torch.arange(len(batch)) % 5 != 0 if kind == "absent" else torch.ones(len(batch), dtype=torch.bool)
        found.append(PackedRoutes(chosen, present))
    return found


def results(model: Any, items: list[PackedBatch], given: Routes, plans: Any, case: Mapping[str, Any]) -> dict[str, Any]:
    """Old log-probs, a training pass with its gradients and watched routers, and the weights after the updates."""
    fault = case.get("fault")
    refresh(model, first=True, fault=fault)
    outputs = model.forward_logprobs(items, given, entropy=True, record=True, plans=plans)
    found: dict[str, Any] = {"logprobs": [output.logprobs for output in outputs], "routes": [o.routes for o in outputs]}
    steps = worker.optimizer(model, model.config.params_dtype)
    watch = worker.Watch(model, items, given, model.ranks) if given else None
    model.replayer.observer = watch
    for update in range(UPDATES):
        losses = model.train_microbatches(items, given, worker.loss, entropy_gradient=True, plans=plans)
        if update == 0:
            assert watch is None or watch.wrong == [], watch.wrong
            model.replayer.observer = None
            found["losses"] = [metrics["loss"] for metrics in losses]
            found["gradients"] = [p.main_grad.clone() for module in model.modules for p in module.parameters()]
        found[f"norm {update}"] = [torch.tensor(steps.step().grad_norm)]
        refresh(model, first=False, fault=fault)
    return found | {"weights": worker.weights(model)}


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """The largest difference by kind; of gradients and norms over the tensor's largest."""
    differences = {}
    for kind, tensors in wanted.items():
        scaled, each = kind == "gradients" or kind.startswith("norm"), [0.0]
        for got, want in zip(found[kind], tensors, strict=True):
            if bool(want.any()):
                scale = want.double().abs().max() if scaled else 1.0
                each.append(float((got.double() - want.double()).abs().max() / scale))
        differences[kind] = max(each)
    return differences


def build(case: Mapping[str, Any], parallel: ParallelConfig, **options: Any) -> Any:
    from agent_rl.train.megatron.model import PolicyModel

    options |= case.get("options", {})
    options["dtype"] = getattr(torch, options.pop("dtype", "float32"))
    return PolicyModel.build(Path(case["directory"]), parallel, device=torch.device("cpu"), **options)


def experts_of(model: Any) -> Iterator[Any]:
    """The experts of every layer on this rank."""
    from agent_rl.train.megatron.moe import Experts

    for module in model.modules:
        yield from (part for part in module.modules() if isinstance(part, Experts))


def most_allocated(run: Callable[[], Any]) -> int:
    """The peak of the bytes of tensors during ``run``, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(changes).max())


class World:
    """The cases of one layout; results without balancing are computed once."""

    def __init__(self, parallel: ParallelConfig, ranks: ParallelState) -> None:
        from megatron.core import parallel_state

        self._parallel, self._group = parallel, parallel_state.get_expert_model_parallel_group()
        self._mine = slice(ranks.data_rank, None, ranks.data_size)
        self._plain: dict[str, dict[str, Any]] = {}

    def run(self, case: Mapping[str, Any]) -> dict[str, float]:
        """How far apart a case's results are with and without balancing, and the bytes moved that were not planned."""
        kind, short = case.get("routes", "whole"), case.get("short", False)
        items = (worker.batches() if short else batches())[self._mine]
        key = json.dumps([case["directory"], case.get("options"), kind, short])
        if key not in self._plain:
            model = build(case, self._parallel)
            self._plain[key] = results(model, items, given_routes(items, model, kind), None, {})
        plain = self._plain[key]
        experts = read_model_spec(Path(case["directory"])).num_experts
        model = build(case, self._parallel, balance=balancing(case, experts, self._group))
        layout = ExpertLayout(experts, self._group.size(), SLOTS)
        counts = foreseen(plain["routes"], experts, self._group)
        plans = list(self._plans(case["plan"], layout, counts)) if case["plan"] != "none" else None
        found = apart(results(model, items, given_routes(items, model, kind), plans, case), plain)
        found |= {} if case.get("fault") else self._unplanned(model, plans)
        if case.get("memory"):
            found["memory"] = self._memory(model, plans, build(case, self._parallel))
        for transfer in transfers_of(model):
            transfer.close()
        return found

    def _unplanned(self, model: Any, plans: Any) -> dict[str, float]:
        """Bytes moved that were not planned: each borrowed expert is fetched for the old log-probs, and in an update
        forward and backward, and is returned once."""
        rank, moved = self._group.rank(), [transfer.take_stats() for transfer in transfers_of(model)]
        lent = sum(int((plan.borrowed[rank] >= 0).sum()) for batch in plans or () for plan in batch.values())
        each = next((e.weight1[0].nbytes + e.weight2[0].nbytes for e in experts_of(model)), 0)
        return {
            "fetched": float(sum(stats.fetched for stats in moved) - lent * each * (1 + 2 * UPDATES)),
            "returned": float(sum(stats.returned for stats in moved) - lent * each * UPDATES),
            "borrowed": float(lent),
        }

    def _memory(self, model: Any, plans: Any, plain: Any) -> float:
        """What an update with plans takes beyond one of the ``plain`` model, at its peak, over the weights of a rank's
        borrowed slots in a layer."""
        items = worker.batches()[self._mine]
        given = given_routes(items, model, "whole")
        peaks = []
        for one, lent in ((model, plans), (plain, None)):
            update = partial(one.train_microbatches, items, given, worker.loss, entropy_gradient=True, plans=lent)
            update()  # allocates what stays
            peaks.append(most_allocated(update))
        each = next(e.weight1[0].nbytes + e.weight2[0].nbytes for e in experts_of(model))
        return (peaks[0] - peaks[1]) / (SLOTS * each)

    @staticmethod
    def _plans(kind: str, layout: ExpertLayout, counts: NDArray[np.int32]) -> Iterator[dict[int, LayerPlan]]:
        planned = plan_pass(counts, layout, PlannerOptions()) if kind == "planned" else None
        for index, batch in enumerate(counts):
            if planned:
                yield {column: planned.layer_plan(index, column) for column in range(len(batch))}
            else:
                yield {column: hand_made(kind, layout, held, index + column) for column, held in enumerate(batch)}


def main() -> None:
    """Plan: a list of worlds ``{world_size, place, parallel, cases}``, run one after another by the first
    ``world_size`` processes. A case is ``{name, directory, plan, options, routes, config, fault,
    memory, short}``."""
    rank, directory, worlds = int(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    torch.set_num_threads(1)
    for world in worlds:
        if rank >= world["world_size"]:
            continue
        parallel = ParallelConfig(world_size=world["world_size"], **world["parallel"])
        place = worker.meeting(world["place"], rank)
        ranks = init_parallel(parallel, rank, device=torch.device("cpu"), timeout=120, **place)
        cases = World(parallel, ranks)
        for case in world["cases"]:
            (directory / f"{case['name']}-{rank}.json").write_text(json.dumps(cases.run(case)))
        destroy_parallel()


if __name__ == "__main__":
    main()
