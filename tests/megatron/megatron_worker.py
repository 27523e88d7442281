"""One rank of a test world: runs every case of a plan and saves what came out of each.

Arguments: rank, folder for results, file of the plan (:func:`main` says what is in it).
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import torch
from torch import Tensor

from agent_rl.config import ParallelConfig
from agent_rl.train.megatron.batch import LossFn, PackedBatch, PackedRoutes
from agent_rl.train.megatron.parallel import Ranks, destroy_parallel, init_parallel

LEARNING_RATE = 5.0


def batches(count: int = 3) -> list[PackedBatch]:
    return [PackedBatch.from_sequences(tiny.sequences(seed=seed, lengths=(13, 6 + seed))) for seed in range(count)]


def routes(items: list[PackedBatch], layers: int = tiny.LAYERS) -> list[PackedRoutes]:
    """Random routes with every fifth row absent."""
    given = [tiny.random_routes(len(batch), layers, seed=len(batch)) for batch in items]
    return [PackedRoutes(experts, torch.arange(len(experts)) % 5 != 0) for experts in given]


def router_rows(batch: PackedBatch, ranks: Ranks) -> Tensor:
    """Which token each row of this rank's routers is, -1 for padding: the cut written out once more, by hand."""
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

    def __init__(self, model: Any, items: list[PackedBatch], given: list[PackedRoutes], ranks: Ranks) -> None:
        self.columns = {number: column for column, number in enumerate(model.shape.moe_layers)}
        self.items, self.given, self.ranks = items, given, ranks
        self.seen = {
            action: [torch.zeros(len(batch), len(self.columns), dtype=torch.bool) for batch in items]
            for action in ("replay_forward", "replay_backward")
        }
        self.wrong: list[str] = []
        self._forward: dict[tuple[int, int], Tensor] = {}

    def assigned(self, layer_number: int, microbatch: int, experts: Tensor) -> None: ...

    def action(self, layer_number: int, microbatch: int, action: str) -> None: ...

    def forwarded(
        self, layer_number: int, microbatch: int, action: str, used: Tensor, expected: Tensor | None, fallback_rows: int
    ) -> None:
        if microbatch >= len(self.items):
            return  # filled up, so that all ranks have as many
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
            self.wrong.append(f"{where}: asked twice")
        seen[tokens, column] = same | ~present


def optimizer(model: Any) -> Any:
    """Plain gradient descent with a clipped norm: linear in the gradient, so small differences stay small."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="sgd", lr=LEARNING_RATE, clip_grad=1.0, weight_decay=0.0, sgd_momentum=0.0)
    return get_megatron_optimizer(config, model.chunks)


def loss(logprobs: Tensor, entropy: Tensor | None, _batch: PackedBatch) -> tuple[Tensor, dict[str, Any]]:
    assert entropy is not None
    return -(logprobs.sum() + entropy.sum()) / 50, {"sum": logprobs.sum()}


def watched(model: Any, items: list[PackedBatch], given: list[PackedRoutes], ranks: Ranks, by: LossFn) -> Any:
    """A training pass with every router watched: ``(metrics, Watch)``."""
    model.replayer.observer = watch = Watch(model, items, given, ranks)
    metrics = model.train_microbatches(items, given, by, entropy_gradient=True)
    model.replayer.observer = None
    return metrics, watch


def gradients(model: Any) -> dict[str, Tensor]:
    """The gradients of the last pass under their Hugging Face names, on rank 0."""
    parameters = [parameter for module in model.modules for parameter in module.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad
    found = {name: tensor.clone() for name, tensor in model.export_weights()}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return found


def whole_routes(model: Any, items: list[PackedBatch], local: list[Tensor], ranks: Ranks) -> list[PackedRoutes]:
    """All ranks' recorded routes put together, for batches that all of them share."""
    parts: list[Any] = [None] * ranks.world_size
    columns = list(model.shard.columns)
    mine = [(router_rows(batch, ranks), columns, found) for batch, found in zip(items, local, strict=True)]
    torch.distributed.all_gather_object(parts, (ranks.data_rank, mine))
    top_k = int(model.shape.config["num_experts_per_tok"])
    whole = [torch.zeros(len(batch), len(model.shape.moe_layers), top_k, dtype=torch.int16) for batch in items]
    for data_rank, held in parts:
        if data_rank == ranks.data_rank:
            for routes, (rows, places, found) in zip(whole, held, strict=True):
                for place, column in enumerate(places):
                    routes[rows[rows >= 0], column] = found[rows >= 0, place].to(routes.dtype)
    return [PackedRoutes(found, torch.ones(len(found), dtype=torch.bool)) for found in whole]


def forward_passes(model: Any, items: list[PackedBatch], given: list[PackedRoutes], ranks: Ranks) -> dict[str, Any]:
    """Log-probs native, replayed, and with everything sent to two experts."""
    native = model.forward_logprobs(items, None, entropy=True, record=True)
    replayed = model.forward_logprobs(items, given, record=True)
    # Everything goes to experts 0 and 1: with expert parallelism the second rank's experts get no token at all.
    lonely = [PackedRoutes(torch.tensor([0, 1]).expand_as(r.experts), torch.ones_like(r.present)) for r in given]
    return {
        "native": [output.logprobs for output in native],
        "entropy": [output.entropy for output in native],
        "native_routes": [r.experts for r in whole_routes(model, items, [o.routes for o in native], ranks)],
        "replayed": [output.logprobs for output in replayed],
        "routes": [r.experts for r in whole_routes(model, items, [o.routes for o in replayed], ranks)],
        "crowded": [output.logprobs for output in model.forward_logprobs(items, lonely)],
    }


def run(model: Any, items: list[PackedBatch], given: list[PackedRoutes], ranks: Ranks) -> dict[str, Any]:
    """A training pass under R3, one under R2 after the routers changed, one clipped step of gradient descent."""
    recorded = model.forward_logprobs(items, None, record=True)
    own = whole_routes(model, items, [output.routes for output in recorded], ranks)
    routers = [p for module in model.modules for name, p in module.named_parameters() if "router" in name]
    for parameter in routers:
        parameter.data.neg_()  # the native choice would now be another one
    _, second = watched(model, items, own, ranks, loss)
    for parameter in routers:
        parameter.data.neg_()
    metrics, first = watched(model, items, given, ranks, loss)
    found = gradients(model)
    taken, grad_norm, _ = optimizer(model).step()
    assert taken
    return {
        "wrong": first.wrong + second.wrong,
        "seen": first.seen,
        "seen_r2": second.seen,
        "sums": [float(metric["sum"]) for metric in metrics],
        "gradients": found,
        "grad_norm": grad_norm,
        "weights": {name: tensor.clone() for name, tensor in model.export_weights()},
    }


def resume(rank: int, case: dict[str, Any], parallel: ParallelConfig, results: Path) -> None:
    """Two updates of a real trainer rank, then the second one again by one that loads the first one's checkpoint."""
    from agent_rl.train.rank import TrainerRank
    from agent_rl.train.settings import ModelSettings, OptimizerSettings

    model = ModelSettings(Path(case["folder"]), parallel, "float32", "cpu", "full", (), seed=0, threads=1)
    sequences = [(batch.tokens.int().numpy(), torch.ones(len(batch)).numpy()) for batch in batches()]
    states = []
    for place in case["places"]:
        trainer = TrainerRank(model, OptimizerSettings(lr=0.01), rank, **meeting(place, rank))
        if states:
            trainer.load(results)
        else:
            trainer.supervise(sequences, [[[0], [1, 2]]], 50.0)
            trainer.save(results)
        trainer.supervise(sequences, [[[2, 1], [0]]], 50.0)
        states.append([module.state_dict() for module in trainer.model.modules])
        trainer.close()
    torch.save(states, results / f"{case['name']}-{rank}.pt")


def meeting(place: list[int], rank: int) -> dict[str, Any]:
    """Where the ranks meet: ``place`` is a port and rank 0's open socket on it."""
    port, listener = place
    return {"master_addr": "127.0.0.1", "master_port": port, "listener": listener if rank == 0 else None}


def main() -> None:
    """Plan: a list of worlds ``{place, parallel, runs}``; a run is ``{name, folder, forward, options}``, or what
    :func:`resume` is given."""
    rank, results, plan = int(sys.argv[1]), Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    torch.set_num_threads(1)
    device = torch.device("cpu")
    for world in plan:
        parallel = ParallelConfig(world_size=2, **world["parallel"])
        if "resume" in world:
            resume(rank, world["resume"], parallel, results)
            continue
        ranks = init_parallel(parallel, rank, device=device, timeout=60, **meeting(world["place"], rank))
        from agent_rl.train.megatron.model import PolicyModel

        mine = slice(ranks.data_rank, None, ranks.data_size)
        for case in world["runs"]:
            model = PolicyModel.build(Path(case["folder"]), parallel, device=device, **case["options"])
            items = batches()[mine]
            given = routes(batches(), model.moe_layers)[mine]
            found = forward_passes(model, items, given, ranks) if case["forward"] else {}
            torch.save(found | run(model, items, given, ranks), results / f"{case['name']}-{rank}.pt")
            if case["forward"]:
                model.save_hf(results / f"{case['name']}-hf")
        destroy_parallel()


if __name__ == "__main__":
    main()
