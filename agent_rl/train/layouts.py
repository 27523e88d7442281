"""Which parallel layouts are possible, and what they make of a model. Pure functions; imports no torch."""

from __future__ import annotations

from agent_rl.config import ParallelConfig


def weight_copies(parallel: ParallelConfig) -> int:
    """How many ranks hold a copy of a weight that is not an expert's: the data and context ranks."""
    return parallel.world_size // (parallel.tensor * parallel.pipeline)


def expert_copies(parallel: ParallelConfig) -> int:
    """How many ranks hold a copy of an expert: tensor ranks are among them, since experts are never cut."""
    return parallel.world_size // (parallel.pipeline * parallel.expert)


def shares_optimizer(parallel: ParallelConfig) -> bool:
    """Whether optimizer state is shared out: asked for, and some weight has more than one copy to share it among."""
    return parallel.distributed_optimizer and max(weight_copies(parallel), expert_copies(parallel)) > 1
