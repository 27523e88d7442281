"""One of two expert ranks with a fake of DeepEP (in ``fakes``): the chosen dispatcher, and a model's values.

Arguments: rank, directory for results with the model in ``model``, port and rank 0's open socket on it."""

from __future__ import annotations

import sys
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
    """The dispatcher that is chosen for flex, and the notes."""
    from deep_ep import Buffer

    from agent_rl.train.megatron.kernel_choice import choose_kernels

    Buffer.fault = fault
    layout = ParallelConfig(world_size=2, expert=2, dispatcher="flex")
    kernels = choose_kernels(read_model_spec(directory), layout, torch.float32, CPU, balanced=False)
    Buffer.fault = ""
    return kernels.dispatcher, kernels.notes


def trained(directory: Path, dispatcher: str) -> dict[str, Any]:
    """Log-probs, and the gradients of a replayed pass with full recomputation."""
    from deep_ep import Buffer

    from agent_rl.train.megatron.model import PolicyModel

    layout = ParallelConfig(world_size=2, expert=2, dispatcher=dispatcher)
    model = PolicyModel.build(directory, layout, device=CPU, recompute="full")
    lengths = (13, 6 + model.ranks.data_rank)
    batch, routes = tiny.packed(model.ranks.data_rank, lengths), tiny.everywhere(tiny.random_routes(sum(lengths)))
    before = Buffer.dispatches
    logprobs = model.forward_logprobs([batch], [routes])[0].logprobs
    model.train_microbatches([batch], [routes], lambda got, _, __: (got.sum(), {}))
    gradients = [parameter.main_grad.clone() for module in model.modules for parameter in module.parameters()]
    counts = {"dispatches": Buffer.dispatches - before, "left": len(tiny.tensors_in_graphs())}
    return {"logprobs": logprobs, "gradients": gradients, **counts}


def main(rank: int, results: Path, port: int, listener: int) -> None:
    torch.set_num_threads(1)
    place = {"master_addr": "127.0.0.1", "master_port": port, "listener": None if rank else listener}
    init_parallel(ParallelConfig(world_size=2, expert=2), rank, **place, device=CPU)
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
    sys.path.insert(0, str(Path(__file__).with_name("fakes")))
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
