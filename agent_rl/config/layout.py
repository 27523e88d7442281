"""The sections ``train.parallel`` and ``train.balance``: what each of the trainer's ranks has and computes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agent_rl.config.base import Section

Planner = Literal["foremoe", "eplb", "shadow"]
ExpertPlacement = Literal["contiguous", "measured"]
ExpertTransfer = Literal["pool", "exchange"]


class ParallelConfig(Section):
    """Megatron's parallel layout. The data-parallel size follows from ``world_size``."""

    world_size: int = Field(1, gt=0, description="Trainer ranks.")
    tensor: int = Field(1, gt=0)
    pipeline: int = Field(1, gt=0)
    virtual_pipeline: int = Field(1, gt=0, description="Model chunks of a pipeline stage (interleaved 1F1B).")
    context: int = Field(1, gt=0)
    expert: int = Field(1, gt=0)
    dispatcher: Literal["alltoall", "allgather", "flex"] = Field(
        "alltoall",
        description="How tokens get to their experts; allgather only without pipeline stages; flex: by DeepEP where it "
        "is right, and else alltoall.",
    )
    distributed_optimizer: bool = Field(
        True,
        description="The ranks that hold a copy of a weight share its optimizer state out (ZeRO-1); a single copy "
        "is kept whole.",
    )


class BalanceTransferConfig(Section):
    """How borrowed experts reach the ranks that compute them; docs/balancing.md says what each costs."""

    recompute: ExpertTransfer = Field("pool", description="In passes without gradients.")
    update: ExpertTransfer = Field("exchange", description="In passes with gradients, which always return by exchange.")


class BalanceConfig(Section):
    """Expert ranks are given equal work in every micro-batch and layer, by the routes that replay knows beforehand
    (ForeMoE); docs/balancing.md says when it helps."""

    enabled: bool = Field(False, description="Let expert ranks borrow each other's experts for a micro-batch.")
    planner: Planner = Field(
        "foremoe", description="Who borrows what: by the foreseen routes, or a baseline to compare with."
    )
    slots: int = Field(4, gt=0, description="Experts that a rank may borrow at once, in each layer.")
    link_slots: int | None = Field(
        None, ge=0, description="How many of these may keep tokens within a machine; None: the planner chooses."
    )
    min_rows: int = Field(16, gt=0, description="Products of fewer tokens of a shared expert are filled up to so many.")
    transfer: BalanceTransferConfig = BalanceTransferConfig()
    within_node: bool = Field(True, description="In updates, borrow only from ranks of the same machine.")
    ranks_per_node: int | None = Field(
        None, gt=0, description="Neighbouring expert ranks that share a machine; None: as the ranks find themselves."
    )
    expert_placement: ExpertPlacement = Field(
        "contiguous",
        description="Which rank keeps an expert: by its number, or so that ranks and machines were even over the first "
        "step after a start or resume, for which the weights are loaded twice.",
    )
    prefetch: bool = Field(True, description="Fetch the next layer's experts while this one computes.")
    keep_order: bool = Field(
        True, description="Add up a token's experts in the order without balancing: the same bits (all-to-all alone)."
    )
