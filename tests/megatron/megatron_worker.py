"""One rank of a test world: runs every case of a plan and saves what came out of each.

Arguments: rank, directory for results, file of the plan (:func:`main` says what is in it).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import numpy as np
import torch
from torch import Tensor

from agent_rl.config import ParallelConfig, RunConfig, TrainConfig
from agent_rl.models.spec import read_model_spec
from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes
from agent_rl.train.megatron.parallel import ParallelState, destroy_parallel, init_parallel
from r3.kept_tokens import KeptTokens

Batches = list[PackedBatch]
Routes = list[PackedRoutes] | None


def batches(count: int = 3) -> Batches:
    """Every second batch has kept tokens, the others candidates from the whole vocabulary."""
    items = [tiny.packed(seed, (13, 6 + seed)) for seed in range(count)]
    draw = torch.Generator().manual_seed(5)
    others = [torch.randint(0, tiny.VOCAB, (len(batch), 3), generator=draw, dtype=torch.int32) for batch in items]
    return [
        replace(batch, kept=kept_of(batch)) if number % 2 else replace(batch, candidates=others[number])
        for number, batch in enumerate(items)
    ]


def kept_of(batch: PackedBatch) -> KeptTokens:
    """Each token is drawn from itself and 0 to 20 others; every third one from the whole vocabulary."""
    draw = np.random.default_rng(len(batch))
    rows = [[int(token), *draw.integers(0, tiny.VOCAB, at % 21).tolist()] for at, token in enumerate(batch.tokens)]
    return KeptTokens.from_rows([[] if at % 3 == 2 else row for at, row in enumerate(rows)])


def routes(items: Batches, layers: int = tiny.LAYERS) -> list[PackedRoutes]:
    """Random routes with every fifth row absent."""
    given = [tiny.random_routes(len(batch), layers, seed=len(batch)) for batch in items]
    return [PackedRoutes(experts, torch.arange(len(experts)) % 5 != 0) for experts in given]


def router_rows(batch: PackedBatch, ranks: ParallelState) -> Tensor:
    """The token of each row of this rank's routers, -1 for padding. Written independently of the product's code."""
    rows: list[int] = []
    pieces = 2 * ranks.context_size if ranks.context_size > 1 else 1
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        tokens = list(range(start, stop))
        tokens += [-1] * (-len(tokens) % (pieces * ranks.tensor_size))
        size = len(tokens) // pieces
        mine = (ranks.context_rank, pieces - 1 - ranks.context_rank) if pieces > 1 else (0,)
        for piece in mine:
            rows += tokens[piece * size : (piece + 1) * size]
    share = len(rows) // ranks.tensor_size
    return torch.tensor(rows[ranks.tensor_rank * share : (ranks.tensor_rank + 1) * share])


class Watch:
    """Compares what the routers used with whole routes, token by token.

    ``seen[action][microbatch]`` bool ``[tokens, moe_layers]`` marks where the routers used exactly the given experts
    (absent rows: the same ones forward and in the recomputation). ``wrong`` names everything else.
    """

    def __init__(self, model: Any, items: Batches, given: list[PackedRoutes], ranks: ParallelState) -> None:
        self.columns = {number: column for column, number in enumerate(model.layer_numbers)}
        self.items, self.given, self.ranks = items, given, ranks
        shapes, actions = [(len(batch), len(self.columns)) for batch in items], ("replay_forward", "replay_backward")
        self.seen = {action: [torch.zeros(shape, dtype=torch.bool) for shape in shapes] for action in actions}
        self.wrong: list[str] = []
        self._forward: dict[tuple[int, int], Tensor] = {}

    def assigned(self, layer_number: int, microbatch: int, experts: Tensor) -> None: ...

    def action(self, layer_number: int, microbatch: int, action: str) -> None: ...

    def forwarded(
        self, layer_number: int, microbatch: int, action: str, used: Tensor, expected: Tensor | None, fallback_rows: int
    ) -> None:
        if microbatch >= len(self.items):
            return  # a filler micro-batch
        where, key = f"{action} of layer {layer_number}, micro-batch {microbatch}", (layer_number, microbatch)
        routes, rows = self.given[microbatch], router_rows(self.items[microbatch], self.ranks)
        tokens, column = rows[rows >= 0], self.columns[layer_number]
        if not torch.equal(used, self._forward.setdefault(key, used)) or not torch.equal(used, expected):
            self.wrong.append(f"{where}: not the experts of the forward pass")
        present = routes.present[tokens]
        if fallback_rows != int((~present).sum()):
            self.wrong.append(f"{where}: {fallback_rows} rows without routes, there are {int((~present).sum())}")
        same = (used[rows >= 0] == routes.experts[tokens, column].long().sort(-1).values).all(-1)
        seen = self.seen[action][microbatch]
        if bool(seen[tokens, column].any()):
            self.wrong.append(f"{where}: used twice")
        seen[tokens, column] = same | ~present


def optimizer(model: Any, dtype: torch.dtype) -> Any:
    """AdamW with a large epsilon, nearly linear in the gradient, so small differences stay small."""
    from agent_rl.train.optimizer import PolicyOptimizer
    from agent_rl.train.requests import OptimizerSpec

    return PolicyOptimizer(model.chunks, OptimizerSpec(lr=0.05, eps=1e-2, weight_decay=0.01), dtype)


def loss(logprobs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
    assert entropy is not None
    value = -(logprobs.sum() + entropy.sum()) / 50
    if batch.candidates is not None:
        value = value - (batch.extras["candidates"] * torch.tensor([0.5, -0.25, 0.1])).sum() / 50
    return value, {"loss": value}


def trained(model: Any, items: Batches, given: Routes) -> list[dict[str, Any]]:
    """A training pass; one dict of metrics a micro-batch."""
    found: list[dict[str, Any]] = model.train_microbatches(items, given, loss, entropy_gradient=True)
    return found


def watched(model: Any, items: Batches, given: list[PackedRoutes], ranks: ParallelState) -> Any:
    """A training pass with every router watched: ``(metrics, Watch)``."""
    model.replayer.observer = watch = Watch(model, items, given, ranks)
    metrics = trained(model, items, given)
    model.replayer.observer = None
    return metrics, watch


def exported(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` (under the optimizer's names of the parameters) under their Hugging Face names, on rank 0."""
    parameters = [p for chunk in model.modules for p in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for index, module in enumerate(model.modules):
        for name, parameter in module.named_parameters():
            parameter.data = tensors[f"{index}.{name}"]
    found = {name: tensor.clone() for name, tensor in model.export_weights()}
    everywhere = [None] * torch.distributed.get_world_size()
    sums = {name: float(tensor.double().sum()) for name, tensor in model.export_weights("every rank")}
    torch.distributed.all_gather_object(everywhere, sums)
    assert everywhere == [sums] * len(everywhere)
    assert sums.keys() >= found.keys()
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return found


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of the last pass under their Hugging Face names, on rank 0."""
    chunks = enumerate(model.modules)
    return exported(model, {f"{i}.{name}": p.main_grad for i, chunk in chunks for name, p in chunk.named_parameters()})


def state(model: Any, optimizer: Any, slot: str) -> dict[str, Tensor]:
    """A slot of the optimizer's state under Hugging Face names, on rank 0."""
    held = {shard.name: shard for shard in optimizer.shards()}
    named = {f"{i}.{name}": p for i, chunk in enumerate(model.modules) for name, p in chunk.named_parameters()}
    return exported(model, {name: whole(p, held.get(name), slot, optimizer.distributed) for name, p in named.items()})


def whole(parameter: Tensor, shard: Any, slot: str, distributed: bool) -> Tensor:
    """A parameter's whole slot, from the shards of all ranks that hold a copy of the parameter."""
    from megatron.core import parallel_state

    full = torch.zeros(parameter.numel())
    if shard is not None:
        full[shard.start : shard.stop] = shard.slots[slot]
    if distributed:
        everywhere = getattr(parameter, "allreduce", True)
        dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
        group = dense if everywhere else parallel_state.get_expert_data_parallel_group()
        # Shards don't overlap. Summed as integers, their bits are unchanged.
        torch.distributed.all_reduce(full.view(torch.int32), group=group)
    return full.view(parameter.shape)


def whole_routes(model: Any, items: Batches, local: list[Tensor], ranks: ParallelState) -> list[PackedRoutes]:
    """The recorded routes of all ranks, combined for the batches that they share."""
    parts: list[Any] = [None] * ranks.world_size
    columns = list(model.shard.columns)
    mine = [(router_rows(batch, ranks), columns, found) for batch, found in zip(items, local, strict=True)]
    torch.distributed.all_gather_object(parts, (ranks.data_rank, mine))
    top_k = model.model_spec.top_k
    whole = [torch.zeros(len(batch), len(model.layer_numbers), top_k, dtype=torch.int16) for batch in items]
    for data_rank, held in parts:
        if data_rank == ranks.data_rank:
            for routes, (rows, places, found) in zip(whole, held, strict=True):
                for place, column in enumerate(places):
                    routes[rows[rows >= 0], column] = found[rows >= 0, place].to(routes.dtype)
    return [tiny.everywhere(found) for found in whole]


def check_reference(model: Any, items: Batches, given: Routes, wanted: Any) -> None:
    """The reference is the model's own checkpoint. Its log-probs are ``wanted``, whatever the weights are by then."""
    from agent_rl.train.reference import Reference

    reference = Reference.load(model, model.directory)
    for parameter in (moved := [p for module in model.modules for p in module.parameters()]):
        parameter.data.neg_()
    before = weights(model)
    with reference.swapped_in():
        found = model.forward_logprobs(items, given)
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(found, wanted, strict=True)), "another reference"
    assert all(map(torch.equal, weights(model), before)), "the reference has changed the weights"
    assert model.sum_over_data(torch.ones(1)).item() == model.ranks.data_size
    for parameter in moved:
        parameter.data.neg_()


def forward_passes(model: Any, items: Batches, given: Routes, ranks: ParallelState) -> dict[str, Any]:
    """Log-probs without replay, with replay, and with all tokens sent to two experts."""
    native = model.forward_logprobs(items, None, entropy=True, record=given is not None)
    found = {"native": [output.logprobs for output in native], "entropy": [output.entropy for output in native]}
    check_reference(model, items, given, native if given is None else model.forward_logprobs(items, given))
    if given is None:
        return found
    replayed = model.forward_logprobs(items, given, record=True)
    # All tokens go to experts 0 and 1: with expert parallelism the second rank's experts get none.
    crowded = [PackedRoutes(torch.tensor([0, 1]).expand_as(r.experts), torch.ones_like(r.present)) for r in given]
    return found | {
        "routes_without_replay": [r.experts for r in whole_routes(model, items, [o.routes for o in native], ranks)],
        "replayed": [output.logprobs for output in replayed],
        "routes": [r.experts for r in whole_routes(model, items, [o.routes for o in replayed], ranks)],
        "crowded": [output.logprobs for output in model.forward_logprobs(items, crowded)],
    }


def r2_pass(model: Any, items: Batches, ranks: ParallelState) -> Watch:
    """A training pass with the model's own routes, recorded before its routers changed."""
    recorded = model.forward_logprobs(items, None, record=True)
    own = whole_routes(model, items, [output.routes for output in recorded], ranks)
    routers = [p for module in model.modules for name, p in module.named_parameters() if "router" in name]
    for parameter in routers:
        parameter.data.neg_()  # changes the routers' own choice
    _, watch = watched(model, items, own, ranks)
    for parameter in routers:
        parameter.data.neg_()
    return watch


def run(model: Any, items: Batches, given: Routes, ranks: ParallelState, *, updates: int = 2) -> dict[str, Any]:
    """Watched training passes with R2 and R3, an update with a clipped norm, and updates without replay. Without
    experts (``given`` None) no replay at all."""
    dtype, found = model.config.params_dtype, dict[str, Any]()
    if given is None:
        metrics = trained(model, items, None)
    else:
        second = r2_pass(model, items, ranks)
        metrics, first = watched(model, items, given, ranks)
        found = {"wrong": first.wrong + second.wrong, "seen": first.seen, "seen_r2": second.seen}
    steps = optimizer(model, dtype)
    if not steps.distributed:
        found["gradients"] = gradients(model)
    losses, norms = [metrics], [steps.step().grad_norm]
    if steps.distributed or ranks.world_size == 1:  # otherwise a rank has the sum of its own shard only
        found["exp_avg"] = state(model, steps, "exp_avg")
    for _ in range(1, updates):
        losses.append(trained(model, items, None))
        norms.append(steps.step().grad_norm)
    return found | {
        "place": (ranks.data_rank, ranks.data_size),
        "losses": [[float(metric["loss"]) for metric in of_step] for of_step in losses],
        "grad_norms": norms,
        "weights": state(model, steps, "master"),
        "state_numel": sum(s.stop - s.start for s in steps.shards()),
    }


def restored(model: Any, items: Batches) -> list[str]:
    """Two updates, then the second again from the state saved between them; the differences in words."""
    dtype, wrong = model.config.params_dtype, []
    steps = optimizer(model, dtype)
    trained(model, items, None)
    steps.step()
    saved = [{slot: tensor.clone() for slot, tensor in shard.slots.items()} for shard in steps.shards()]
    counts = steps.counts
    trained(model, items, None)
    update, wanted = steps.step(), weights(model)
    again = optimizer(model, dtype)
    left = iter(saved)
    again.load(lambda shard: next(left), counts)
    trained(model, items, None)
    if again.step() != update or not all(map(torch.equal, weights(model), wanted)):
        wrong.append("another update")
    if again.counts != steps.counts:
        wrong.append(f"{again.counts}, not {steps.counts}")
    return wrong


def weights(model: Any) -> list[Tensor]:
    return [parameter.detach().clone() for module in model.modules for parameter in module.parameters()]


def resume(rank: int, case: dict[str, Any], results: Path) -> None:
    """Two updates of real trainer ranks in the first of ``layouts`` with a checkpoint between them; then the second
    update from the checkpoint in every other layout. Each saves what it loaded to ``<name>-<number>`` and its weights
    after the update to ``<name>-<number>.pt``. The reference stays the first model."""
    from agent_rl.train.checkpoint import directory as checkpoint
    from agent_rl.train.requests import OptimizerSpec, WorkerRequest
    from agent_rl.train.worker import TrainerWorker

    sequences = [(batch.tokens.int().numpy(), torch.ones(len(batch)).numpy()) for batch in batches()]
    directory, optimizer = results / case["name"], OptimizerSpec(lr=0.05, eps=1e-2)
    for number, layout in enumerate(case["layouts"]):
        parallel, start = ParallelConfig(world_size=case["world_size"], **layout), Path(case["directory"])
        config = RunConfig(name="resume", model=start, train=TrainConfig(parallel=parallel, recompute="full"))
        order = WorkerRequest(config, read_model_spec(start), start, start, device="cpu", threads=1)
        trainer = TrainerWorker(order, optimizer, rank, **meeting(case["places"][number], rank))
        if number == 0:
            begun = logprobs(trainer)
        split = trainer.info().data_size > 1
        if number == 0:
            trainer.supervise(sequences, [[[0]], [[1, 2]]] if split else [[[0], [1, 2]]], 50.0)
            saved = save(trainer, directory, rank, case["world_size"], parallel)
        else:
            trainer.load(directory, saved)
            save(trainer, results / f"{case['name']}-{number}", rank, case["world_size"], parallel)
        assert not torch.allclose(logprobs(trainer), begun, rtol=0, atol=1e-2)
        with trainer._reference.swapped_in():
            torch.testing.assert_close(logprobs(trainer), begun, rtol=0, atol=1e-5)
        trainer.supervise(sequences, [[[2, 1]], [[0]]] if split else [[[2, 1], [0]]], 50.0)
        weights = {name: tensor.clone() for name, tensor in trainer.model.export_weights()}
        if rank == 0:
            torch.save(weights, results / f"{case['name']}-{number}.pt")
        trainer.close()
    assert checkpoint.read_manifest(directory) == saved


def logprobs(trainer: Any) -> Tensor:
    """The current model's log-probs of all batches."""
    return torch.cat([output.logprobs for output in trainer.model.forward_logprobs(batches(), None)])


def save(trainer: Any, directory: Path, rank: int, world_size: int, parallel: ParallelConfig) -> Any:
    """Writes a checkpoint of all ranks as the driver does; returns its manifest."""
    from agent_rl.train.checkpoint import directory as checkpoint

    if rank == 0:
        checkpoint.begin(directory)
    torch.distributed.barrier()
    updates, counts = trainer.save(checkpoint.partial_dir(directory))
    checksums: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(checksums, trainer.written())
    layout = parallel.model_dump()
    manifest = checkpoint.Manifest(checkpoint.FORMAT, updates, counts, layout, "float32", tuple(checksums))
    if rank == 0:
        checkpoint.commit(directory, manifest)
    torch.distributed.barrier()
    return manifest


def meeting(place: list[int], rank: int) -> dict[str, Any]:
    """Where the ranks meet: ``place`` is a port and rank 0's open socket on it."""
    port, listener = place
    return {"master_addr": "127.0.0.1", "master_port": port, "listener": listener if rank == 0 else None}


def of_case(case: dict[str, Any], parallel: ParallelConfig, ranks: ParallelState) -> dict[str, Any]:
    """What a case gives on this rank; ``options`` are those of ``PolicyModel.build``."""
    from agent_rl.train.megatron.model import PolicyModel

    options = dict(case["options"])
    options["dtype"] = getattr(torch, options.pop("dtype", "float32"))
    model = PolicyModel.build(Path(case["directory"]), parallel, device=torch.device("cpu"), **options)
    mine = slice(ranks.data_rank, None, ranks.data_size)
    items = batches()[mine]
    given = routes(batches(), model.moe_layers)[mine] if model.moe_layers else None
    found = forward_passes(model, items, given, ranks) if case["forward"] else {}
    found |= run(model, items, given, ranks, updates=case["updates"])
    if case["saves"]:
        model.save_hf(Path(case["saves"]))
    if case["restores"]:
        found["restored"] = restored(model, items)
    return found


def main() -> None:
    """Plan: ``{world_size, worlds, resume}``; ``worlds`` ``{place, parallel, cases}`` run one after another. A
    case is ``{name, directory, options, updates, forward, saves, restores}`` (:func:`of_case`); ``resume`` is what
    :func:`resume` is given, or None."""
    rank, results, plan = int(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    torch.set_num_threads(1)
    device = torch.device("cpu")
    for world in plan["worlds"]:
        parallel = ParallelConfig(world_size=plan["world_size"], **world["parallel"])
        ranks = init_parallel(parallel, rank, device=device, timeout=120, **meeting(world["place"], rank))
        for case in world["cases"]:
            torch.save(of_case(case, parallel, ranks), results / f"{case['name']}-{rank}.pt")
        destroy_parallel()
    if plan["resume"]:
        resume(rank, plan["resume"], results)


if __name__ == "__main__":
    main()
