"""Megatron's optimizer and learning-rate schedule behind one small class. Import only in rank processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from agent_rl.errors import TrainerError
from agent_rl.train.reports import Update
from agent_rl.train.settings import OptimizerSettings


class PolicyOptimizer:
    """AdamW over Megatron's model chunks, with warm-up and a constant or cosine schedule."""

    def __init__(self, chunks: Sequence[torch.nn.Module], settings: OptimizerSettings, dtype: torch.dtype) -> None:
        self._optimizer = get_megatron_optimizer(_megatron_config(settings, dtype), list(chunks))
        self._scheduler = _scheduler(self._optimizer, settings)

    def step(self) -> Update:
        """Apply the gradients that are in the model's buffers. Raises TrainerError where their norm is not finite."""
        # Before the update: the first one of a warm-up then has lr / warmup_steps, not 0.
        self._scheduler.step(1)
        taken, grad_norm, _ = self._optimizer.step()
        # The step leaves each parameter's grad aliased to Megatron's gradient buffer: the next backward pass would add
        # its first micro-batch to the buffer twice.
        self._optimizer.zero_grad()
        if not taken or grad_norm is None or not math.isfinite(grad_norm):
            raise TrainerError(f"the gradient norm is {grad_norm}: no update was possible")
        return Update(float(grad_norm), float(self._scheduler.get_lr({})))

    def state_dict(self) -> dict[str, Any]:
        """This rank's optimizer and schedule state, for :meth:`load_state_dict`."""
        return {"optimizer": self._optimizer.state_dict(), "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`'s answer exactly. The schedule's settings stay those of this run's config."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.num_steps = 0
        self._scheduler.step(int(state["scheduler"]["num_steps"]))

    def reload_params(self) -> None:
        """Take over model weights that were changed from outside (the optimizer's master copies follow them)."""
        self._optimizer.reload_model_params()


def _megatron_config(settings: OptimizerSettings, dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.grad_clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )


def _scheduler(optimizer: Any, settings: OptimizerSettings) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if settings.warmup_steps else settings.lr,
        max_lr=settings.lr,
        min_lr=settings.lr * settings.min_lr_ratio,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(settings.total_steps, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
