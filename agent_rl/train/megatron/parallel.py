"""Joins this process to the trainer's process group and creates Megatron's parallel groups.

Ranks with the same ``data_rank`` (tensor, pipeline and context peers) work on the same micro-batches. Experts are
distributed over ``expert`` ranks among the tensor, context and data ranks of a pipeline stage. A single expert is never
sharded (expert tensor parallelism is 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from agent_rl.config import ParallelConfig
from agent_rl.train.parallel_checks import parallel_problems, refuse

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ParallelState:
    """Rank of this process and group size for each kind of parallelism."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    context_rank: int
    context_size: int
    expert_rank: int
    expert_size: int

    @property
    def stage_leaders(self) -> range:
        """The first rank of each pipeline stage. They are the pipeline group of rank 0, because Megatron numbers the
        ranks stage by stage."""
        return range(0, self.world_size, self.world_size // self.pipeline_size)

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1


def check_parallel(parallel: ParallelConfig) -> None:
    """Raises ConfigError for an impossible layout (:mod:`agent_rl.train.parallel_checks`). Imports no torch."""
    refuse(parallel_problems(parallel))


def init_parallel(
    parallel: ParallelConfig,
    rank: int,
    *,
    master_addr: str,
    master_port: int,
    device: torch.device,
    seed: int = 0,
    timeout: float = 600.0,
    listener: int | None = None,
) -> ParallelState:
    """Join the process group (gloo on a CPU, NCCL on a GPU) and create Megatron's groups. Collective.

    ``timeout`` in seconds limits the rendezvous and every collective. ``listener``: on rank 0 the file descriptor of a
    socket already bound to ``master_port``, so that no other process can take the port. Raises ConfigError for an
    impossible layout.
    """
    check_parallel(parallel)
    import torch

    if device.type == "cpu":
        from agent_rl.train.megatron.cpu import install_cpu_shim

        install_cpu_shim()
    else:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    world, backend = parallel.world_size, "gloo" if device.type == "cpu" else "nccl"
    store = torch.distributed.TCPStore(
        master_addr, master_port, world, rank == 0, timeout=limit, master_listen_fd=listener
    )
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    _init_megatron(parallel, seed, timeout)
    return current_parallel_state()


def _init_megatron(parallel: ParallelConfig, seed: int, timeout: float) -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    # Without Transformer Engine, Megatron 0.16.1 leaves this name undefined and every router raises NameError.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(timeout / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def current_parallel_state() -> ParallelState:
    """This process's ranks in the groups of :func:`init_parallel`."""
    import torch
    from megatron.core import parallel_state as state

    return ParallelState(
        rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
        data_rank=state.get_data_parallel_rank(),
        data_size=state.get_data_parallel_world_size(),
        tensor_rank=state.get_tensor_model_parallel_rank(),
        tensor_size=state.get_tensor_model_parallel_world_size(),
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        pipeline_size=state.get_pipeline_model_parallel_world_size(),
        context_rank=state.get_context_parallel_rank(),
        context_size=state.get_context_parallel_world_size(),
        expert_rank=state.get_expert_model_parallel_rank(),
        expert_size=state.get_expert_model_parallel_world_size(),
    )


def destroy_parallel() -> None:
    """Leave the process group. Idempotent."""
    import torch

    if torch.distributed.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
