"""One of two expert ranks whose tokens go by a stand-in for DeepEP (the directory stand_in): what is chosen, and what a
model computes.

Arguments: rank, number of ranks, directory for results; the model is in the directory ``model`` there."""

from __future__ import annotations

import gc
import socket
import sys
import time
from pathlib import Path
from typing import Any

import megatron_tiny as tiny
import torch

from agent_rl.config import ParallelConfig
from agent_rl.models.spec import read_model_spec
from agent_rl.train.megatron.parallel import destroy_parallel, init_parallel

CPU = torch.device("cpu")
FAULTS = ("", "off", "backwards", "raises")


def chosen(directory: Path, fault: str) -> tuple[str, tuple[str, ...]]:
    """What ``train.parallel.dispatcher`` flex becomes, and the lines."""
    from deep_ep import Buffer

    from agent_rl.train.megatron.kernel_choice import choose_kernels

    Buffer.fault = fault
    layout = ParallelConfig(world_size=2, expert=2, dispatcher="flex")
    kernels = choose_kernels(read_model_spec(directory), layout, torch.float32, CPU, balanced=False)
    Buffer.fault = ""
    return kernels.dispatcher, kernels.notes


def trained(directory: Path, dispatcher: str) -> dict[str, Any]:
    """Log-probs, and gradients of a replayed pass that runs its layers again."""
    from deep_ep import Buffer

    from agent_rl.train.megatron.model import PolicyModel
    from agent_rl.train.megatron.packed_batch import PackedBatch, PackedRoutes

    layout = ParallelConfig(world_size=2, expert=2, dispatcher=dispatcher)
    model = PolicyModel.build(directory, layout, device=CPU, recompute="full")
    lengths = (13, 6 + model.ranks.data_rank)
    batch = PackedBatch.from_sequences(tiny.sequences(seed=model.ranks.data_rank, lengths=lengths))
    routes = PackedRoutes(tiny.random_routes(sum(lengths)), torch.ones(sum(lengths), dtype=torch.bool))
    before = Buffer.dispatches
    logprobs = model.forward_logprobs([batch], [routes])[0].logprobs
    model.train_microbatches([batch], [routes], lambda got, _, __: (got.sum(), {}))
    gradients = [parameter.main_grad.clone() for module in model.modules for parameter in module.parameters()]
    gc.collect()
    left = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.grad_fn is not None]
    return {
        "logprobs": logprobs,
        "gradients": gradients,
        "dispatches": Buffer.dispatches - before,
        "left": len(left),
        "notes": model.notes,
    }


def main(rank: int, results: Path) -> None:
    holder = results / "port"
    listener = None
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        (results / "port.part").write_text(str(listener.getsockname()[1]))
        (results / "port.part").rename(holder)
    while not holder.exists():
        time.sleep(0.05)
    torch.set_num_threads(1)
    init_parallel(
        ParallelConfig(world_size=2, expert=2),
        rank,
        master_addr="127.0.0.1",
        master_port=int(holder.read_text()),
        device=CPU,
        listener=listener.detach() if listener else None,
    )
    from agent_rl.train.megatron import kernel_choice

    directory = results / "model"
    found: dict[str, Any] = {fault: chosen(directory, fault) for fault in FAULTS}
    found |= {kind: trained(directory, kind) for kind in ("alltoall", "flex")}
    installed = kernel_choice.installed
    kernel_choice.installed = lambda package: installed(package) and (package != "deep_ep" or rank == 0)
    found["missing"] = chosen(directory, "")
    torch.save(found, results / f"{rank}.pt")
    destroy_parallel()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).with_name("stand_in")))
    main(int(sys.argv[1]), Path(sys.argv[3]))
