"""One rank of a test world: runs every layout named on the command line and saves what came out of each.

Arguments: rank, folder of the checkpoint, folder for results, then ``name:port:tensor:pipeline:context:expert`` a
layout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import torch

from agent_rl.config import ParallelConfig
from agent_rl.train.megatron.batch import PackedBatch, PackedRoutes
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel

LEARNING_RATE = 5.0


def batches(count: int = 3) -> list[PackedBatch]:
    return [PackedBatch.from_sequences(tiny.sequences(seed=seed, lengths=(13, 6 + seed))) for seed in range(count)]


def routes(items: list[PackedBatch]) -> list[PackedRoutes]:
    """Random routes with every fifth row absent."""
    given = [tiny.random_routes(len(batch), seed=len(batch)) for batch in items]
    return [PackedRoutes(experts, torch.arange(len(experts)) % 5 != 0) for experts in given]


def optimizer(model: Any) -> Any:
    """Plain gradient descent with a clipped norm: linear in the gradient, so small differences stay small."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="sgd", lr=LEARNING_RATE, clip_grad=1.0, weight_decay=0.0, sgd_momentum=0.0)
    return get_megatron_optimizer(config, model.chunks)


def run(model: Any, items: list[PackedBatch], given: list[PackedRoutes]) -> dict[str, Any]:
    """Log-probs native and replayed, then one clipped step of gradient descent and its weights."""
    native = model.forward_logprobs(items, None, entropy=True, record=True)
    replayed = model.forward_logprobs(items, given, record=True)
    # Everything goes to experts 0 and 1: with expert parallelism the second rank's experts get no token at all.
    lonely = [
        PackedRoutes(torch.tensor([0, 1]).expand(len(batch), tiny.LAYERS, 2), batch.tokens >= 0) for batch in items
    ]
    crowded = model.forward_logprobs(items, lonely)
    metrics = model.train_microbatches(
        items, given, lambda logprobs, entropy, batch: (-logprobs.sum() / 50, {"sum": logprobs.sum()})
    )
    taken, grad_norm, _ = optimizer(model).step()
    assert taken
    return {
        "grad_norm": grad_norm,
        "native": [output.logprobs for output in native],
        "entropy": [output.entropy for output in native],
        "native_routes": [output.routes for output in native],
        "replayed": [output.logprobs for output in replayed],
        "crowded": [output.logprobs for output in crowded],
        "routes": [output.routes for output in replayed],
        "metrics": [float(metric["sum"]) for metric in metrics],
        "weights": {name: tensor.clone() for name, tensor in model.export_weights()},
    }


def main() -> None:
    rank, checkpoint, results = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    for layout in sys.argv[4:]:
        name, *numbers = layout.split(":")
        port, tensor, pipeline, context, expert = map(int, numbers)
        parallel = ParallelConfig(world_size=2, tensor=tensor, pipeline=pipeline, context=context, expert=expert)
        device = torch.device("cpu")
        ranks = init_parallel(parallel, rank, master_addr="127.0.0.1", master_port=port, device=device, timeout=60)
        from agent_rl.train.megatron.model import PolicyModel

        items = batches()
        given = routes(items)
        model = PolicyModel.build(checkpoint, parallel, device=device, recompute="full" if pipeline > 1 else "none")
        mine = slice(ranks.data_rank, None, ranks.data_size)
        torch.save(run(model, items[mine], given[mine]), results / f"{name}-{rank}.pt")
        model.save_hf(results / f"{name}-hf")
        destroy_parallel()


if __name__ == "__main__":
    main()
