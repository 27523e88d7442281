"""Lets an engine refuse a bucket that it cannot open (``/update_weights_from_tensor``).

SGLang's scheduler dies of it, and reports the failure of rank 0 only. Runs in the engine's environment, which has no
other module of this project.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def install() -> None:
    """Make this process's SGLang reply with the failure of every tensor rank."""
    module: Any = importlib.import_module("sglang.srt.managers.scheduler_components.weight_updater")
    manager, result = module.SchedulerWeightUpdaterManager, module.UpdateWeightsFromTensorReqOutput
    update = manager.update_weights_from_tensor

    def refusing(self: Any, request: Any) -> Any:
        group = self.tp_cpu_group
        try:
            reply = update(self, request)
        except Exception as error:
            reply = result(success=False, message=f"{type(error).__name__}: {error}")
            torch.distributed.barrier(group=group)  # which the other ranks have entered
        replies: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(replies, (reply.success, reply.message), group=group)
        faults = [f"rank {rank}: {message}" for rank, (success, message) in enumerate(replies) if not success]
        return result(success=False, message="; ".join(faults)) if faults else reply

    manager.update_weights_from_tensor = refusing
